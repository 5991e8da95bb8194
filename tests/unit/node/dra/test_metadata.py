"""The metadata of claims' devices: its content in containers, and the life of the files."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import pytest

from hooks.cdi import schema
from hooks.cdi.tree import number_of
from hooks.config import Config
from integration.cdi.errors import CdiSpecUnwritten
from integration.node.options import DRA_DRIVER
from integration.node.services.dra import metadata
from integration.node.services.dra.claims import read_claim
from integration.node.services.dra.devices import devices_of
from integration.node.services.dra.discovery import NodeDevices
from integration.node.services.dra.rpc import prepared_response
from integration.node.state import claims_file
from integration.node.values.claims import Claim, ClaimDevice, Reference
from integration.nvml.mig_parts import Parts
from tests.unit.node.dra.test_slices import DEVICES, GPUS, NODE, PARTS
from tests.unit.node.dra.test_transaction import (
    PART,
    REFERENCE,
    Killed,
    Node,
    node,
    settled,
    started,
)

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["node"]

BASE: Final = "/var/run/kubernetes.io/dra-device-attributes"
KNOWN: Final = {device.name: device for device in DEVICES}
BIG, SMALL, TOO = GPUS[0].lower(), PARTS[0].lower(), GPUS[1].lower()


def claim_of(*results: tuple[str, str], pod_claim: str | None = None) -> Claim:
    """Return an allocated claim with metadata: the request and device of each result."""
    allocated = [
        {"request": request, "driver": DRA_DRIVER, "pool": "node-1", "device": device}
        for request, device in results
    ]
    annotations = {"resource.kubernetes.io/pod-claim-name": pod_claim} if pod_claim else {}
    found = {
        "metadata": {"uid": "0uid", "annotations": annotations},
        "status": {"allocation": {"devices": {"results": allocated}}},
    }
    reference = Reference("default", "0uid", "web-gpu-x7k2p")
    claim = read_claim(found, reference, DRA_DRIVER, "node-1", KNOWN)
    return replace(claim, has_metadata=True)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(
        state=str(tmp_path / "state"),
        kubelet_root=str(tmp_path / "kubelet"),
        cdi_spec_dirs=(str(tmp_path / "cdi"),),
    )


def found_by(claim: Claim, config: Config) -> dict[str, Any]:
    """Return the metadata that containers find through CDI, by its path in them."""
    found = {}
    answer = prepared_response(claim, DRA_DRIVER).devices
    names = [name for device in answer for name in device.cdi_device_ids]
    for name in (each for each in names if "/metadata=" in each):
        kind, _, device = name.partition("=")
        path = f"{config.cdi_spec_dirs[0]}/{DRA_DRIVER}_metadata_{device}.json"
        with open(path, encoding="utf-8") as file:
            tree = json.load(file)
        spec = schema.parse(tree, path)
        assert number_of(tree["cdiVersion"]) >= number_of(schema.minimum_version(tree))
        (described,) = spec.devices
        assert (spec.kind, described.name) == (kind, device)
        (mount,) = described.edits.mounts
        assert mount.options == ("ro", "bind")
        assert os.stat(mount.host_path).st_mode & 0o777 == 0o644
        with open(mount.host_path, encoding="utf-8") as file:
            found[mount.container_path] = json.load(file)
    return found


def test_a_container_finds_a_file_for_each_request_with_all_attributes(config: Config) -> None:
    claim = claim_of(("big", BIG), ("small/cut", SMALL), ("big", TOO), pod_claim="gpu")
    metadata.write_all(config, DRA_DRIVER, claim, KNOWN)
    where = f"{BASE}/resourceclaimtemplates/gpu"
    found = found_by(claim, config)
    assert found.keys() == {
        f"{where}/{request}/{DRA_DRIVER}-metadata.json" for request in ("big", "small")
    }
    big, small = (found[f"{where}/{each}/{DRA_DRIVER}-metadata.json"] for each in ("big", "small"))
    attributes = big["requests"][0]["devices"][0]["attributes"]
    assert attributes == KNOWN[BIG].attributes
    assert big == {
        "apiVersion": "metadata.resource.k8s.io/v1alpha1",
        "kind": "DeviceMetadata",
        "metadata": {
            "name": "web-gpu-x7k2p", "namespace": "default", "uid": "0uid", "generation": 1,
        },
        "podClaimName": "gpu",
        "requests": [
            {
                "name": "big",
                "devices": [
                    {"driver": DRA_DRIVER, "pool": "node-1", "name": BIG, "attributes": attributes},
                    {
                        "driver": DRA_DRIVER, "pool": "node-1", "name": TOO,
                        "attributes": KNOWN[TOO].attributes,
                    },
                ],
            }
        ],
    }  # fmt: skip
    assert small["requests"][0]["name"] == "small/cut"
    answer = prepared_response(claim, DRA_DRIVER).devices
    assert [len(each.cdi_device_ids) for each in answer] == [2, 2, 1], "with the first device"


@pytest.mark.parametrize("annotation", [None, "", "../../../etc", "a/b", "Gpu", "g" * 64, "gpu\n"])
def test_a_name_that_no_pod_has_for_a_claim_becomes_no_part_of_a_path(
    config: Config, annotation: str | None
) -> None:
    claim = claim_of(("gpu", BIG), pod_claim=annotation)
    metadata.write_all(config, DRA_DRIVER, claim, KNOWN)
    ((path, found),) = found_by(claim, config).items()
    assert path == f"{BASE}/resourceclaims/web-gpu-x7k2p/gpu/{DRA_DRIVER}-metadata.json"
    assert "podClaimName" not in found


def test_without_the_option_the_kubelet_gets_the_same_answer_as_before() -> None:
    claim = replace(claim_of(("gpu", BIG)), has_metadata=False)
    (device,) = prepared_response(claim, DRA_DRIVER).devices
    assert len(device.cdi_device_ids) == 1


def test_a_mig_device_that_was_created_says_its_uuid(config: Config) -> None:
    (part,) = (each for each in devices_of(NODE) if each.name == SMALL)
    made = {PART: replace(part, name=PART, uuid=PART)}
    device = ClaimDevice("gpu", "node-1", PART, PARTS[0], GPUS[2])
    claim = Claim("uid", "default", "claim", (device,), has_metadata=True)
    metadata.write_all(config, DRA_DRIVER, claim, made)
    (found,) = found_by(claim, config).values()
    ((told,),) = (each["devices"] for each in found["requests"])
    assert told["attributes"]["gpu.nvidia.com/uuid"] == {"string": PARTS[0]}


def test_files_of_claims_that_are_gone_are_removed_and_no_others(config: Config) -> None:
    claims = [replace(claim_of(("gpu", BIG)), uid=uid) for uid in ("one", "other")]
    for claim in claims:
        metadata.write_all(config, DRA_DRIVER, claim, KNOWN)
    own = os.path.join(config.kubelet_root or "", f"plugins/{DRA_DRIVER}/dra-device-metadata")
    foreign = [
        f"{config.cdi_spec_dirs[0]}/{name}"
        for name in ("gpu.example.com_metadata_one_gpu.json", "x")
    ]
    left = [
        f"{own}/.one_gpu.json.abcdefgh.new",
        f"{config.cdi_spec_dirs[0]}/.{DRA_DRIVER}_metadata_x.new",
    ]
    for path in (*foreign, *left):
        with open(path, "w", encoding="utf-8"):
            pass
    metadata.sweep(config, DRA_DRIVER, {"other"})
    assert os.listdir(own) == ["other_gpu.json"]
    assert found_by(claims[1], config)
    assert all(map(os.path.exists, foreign))
    metadata.remove(config, DRA_DRIVER, "other")
    metadata.remove(config, DRA_DRIVER, "other")
    assert os.listdir(own) == []
    assert sorted(os.listdir(config.cdi_spec_dirs[0])) == [os.path.basename(p) for p in foreign]


def test_the_checkpoint_and_else_the_kubelets_record_say_which_claims_have_metadata(
    config: Config,
) -> None:
    claim = claim_of(("gpu/any", BIG), pod_claim="gpu")
    claims_file.save(config, [claim])
    (loaded,) = claims_file.load(config, DRA_DRIVER).values()
    assert (loaded.has_metadata, loaded.pod_claim) == (True, "gpu")
    assert loaded.devices[0].chosen == "any"
    os.unlink(f"{config.state}/dra.json")
    note(config, claim)
    (recorded,) = claims_file.load(config, DRA_DRIVER).values()
    assert (recorded.has_metadata, recorded.pod_claim) == (True, None)


@pytest.mark.anyio
async def test_a_claim_keeps_its_metadata_until_it_is_unprepared(node: Node) -> None:
    node.describes = True
    driver = await started(node)
    node.allocate(BIG)
    prepared = await driver.transactions.prepare(REFERENCE)
    assert prepared.has_metadata
    before = node.metadata()
    (path,) = before
    assert path == f"{BASE}/resourceclaims/claim/gpu/{DRA_DRIVER}-metadata.json"
    for name in os.listdir(node.config.cdi_spec_dirs[0]):
        os.unlink(f"{node.config.cdi_spec_dirs[0]}/{name}")
    node.describes = False  # the next agent runs without the option
    driver = await started(node)
    await settled(driver)
    assert node.metadata() == before, "it is there again before the kubelet calls"
    again = await driver.transactions.prepare(REFERENCE)
    assert prepared_response(again, DRA_DRIVER) == prepared_response(prepared, DRA_DRIVER)
    node.allocate(TOO)
    node.ends_at = node.effects + 3
    with pytest.raises(Killed):
        await driver.transactions.prepare(REFERENCE)
    node.ends_at = 0
    (begun,) = claims_file.load(node.config, DRA_DRIVER).values()
    assert begun.before is not None
    assert begun.before.has_metadata, "in the middle of another transaction, too"
    driver = await started(node)
    await driver.transactions.prepare(REFERENCE)
    (((described,),),) = ([one["devices"] for one in each] for each in node.metadata().values())
    assert described["name"] == TOO
    await driver.transactions.unprepare(REFERENCE)
    assert not os.listdir(node.config.cdi_spec_dirs[0])
    own = f"{node.config.kubelet_root}/plugins/{DRA_DRIVER}/dra-device-metadata"
    assert not os.listdir(own)


@pytest.mark.anyio
async def test_no_metadata_is_written_while_the_devices_are_unknown(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.describes = True
    driver = await started(node)
    node.allocate(BIG)
    await driver.transactions.prepare(REFERENCE)
    before = node.metadata()
    own = f"{node.config.kubelet_root}/plugins/{DRA_DRIVER}/dra-device-metadata"
    (name,) = os.listdir(own)
    os.unlink(f"{own}/{name}")
    with monkeypatch.context() as patch:
        patch.setattr(Node, "discovered", lambda *_: NodeDevices({}, None, Parts()))
        await started(node)
    assert not os.listdir(own)
    await started(node)
    assert node.metadata() == before


def note(config: Config, claim: Claim) -> None:
    """Write the kubelet's checkpoint of a prepared claim."""
    devices = [
        {
            "PoolName": each.pool_name, "DeviceName": each.device_name,
            "RequestNames": list(each.request_names), "CDIDeviceIDs": list(each.cdi_device_ids),
        }
        for each in prepared_response(claim, DRA_DRIVER).devices
    ]  # fmt: skip
    info = {
        "ClaimUID": claim.uid, "ClaimName": claim.name, "Namespace": claim.namespace,
        "DriverState": {DRA_DRIVER: {"Devices": devices}},
    }  # fmt: skip
    data = {"kind": "DRACheckpoint", "ClaimInfoStateList": [info]}
    os.makedirs(config.kubelet_root or "", exist_ok=True)
    with open(f"{config.kubelet_root}/dra_manager_state", "w", encoding="utf-8") as file:
        json.dump({"Data": json.dumps(data), "Checksum": 1}, file)


@pytest.mark.anyio
@pytest.mark.parametrize("is_reboot", [False, True])
async def test_what_the_pod_calls_a_claim_is_not_lost_with_the_checkpoint(
    node: Node, is_reboot: bool
) -> None:
    node.describes = True
    driver = await started(node)
    node.allocate(BIG)
    node.document["metadata"]["annotations"] = {"resource.kubernetes.io/pod-claim-name": "gpu"}
    note(node.config, await driver.transactions.prepare(REFERENCE))
    before = node.metadata()
    assert before.keys() == {f"{BASE}/resourceclaimtemplates/gpu/gpu/{DRA_DRIVER}-metadata.json"}
    os.unlink(f"{node.config.state}/dra.json")
    if is_reboot:  # files on a tmpfs are gone, and the kubelet prepares again
        for name in os.listdir(node.config.cdi_spec_dirs[0]):
            os.unlink(f"{node.config.cdi_spec_dirs[0]}/{name}")
    driver = await started(node)  # the API server does not answer
    if is_reboot:
        await driver.transactions.prepare(REFERENCE)
    assert node.metadata() == before
    (claim,) = driver.table.claims.values()
    await driver.table.write()
    assert claims_file.load(node.config, DRA_DRIVER)["uid"].pod_claim == claim.pod_claim
    assert claim.pod_claim == ("gpu" if is_reboot else None)


@pytest.mark.anyio
async def test_a_claim_is_prepared_without_metadata_that_cannot_be_written(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise CdiSpecUnwritten("to write", found="a test's error")

    monkeypatch.setattr(metadata, "write", fail)
    node.describes = True
    driver = await started(node)
    node.allocate(BIG)
    prepared = await driver.transactions.prepare(REFERENCE)
    monkeypatch.undo()
    assert not prepared.has_metadata
    again = await driver.transactions.prepare(REFERENCE)
    assert prepared_response(again, DRA_DRIVER) == prepared_response(prepared, DRA_DRIVER)
    assert node.metadata() == {}
