"""The devices of claims, from recordings of a real cluster, and which claims may have them."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import pytest

from hooks.config import Config
from integration.agent_errors import (
    ClaimConfigUnknown,
    ClaimedDeviceMissing,
    DeviceTaken,
    DraStateUnwritten,
    ResourceClaimUnusable,
)
from integration.node.services.dra.claims import read_claim, refuse_taken
from integration.node.services.dra.devices import Device
from integration.node.services.plugin.claimed import claimed_on, refuse_claimed, without_claimed
from integration.node.state import claims_file as state
from integration.node.state.store import State
from integration.node.values.claims import Claim, ClaimDevice, Reference
from integration.node.values.resources import Device as PluginDevice
from integration.node.values.resources import Resource
from tests.harness.launcher import REPOSITORY
from tests.harness.node_state import publish
from tests.harness.raising import raises
from tests.harness.recorded import recorded_lines

if TYPE_CHECKING:
    from pathlib import Path

DRIVER: Final = "gpu.example.com"
POOL: Final = "gpu-node"
GPU, OTHER = (f"GPU-{n}0000000-0000-4000-8000-00000000000a" for n in range(2))
PART, SIBLING = (f"MIG-{n}0000000-0000-4000-8000-00000000000b" for n in range(2))
DEVICES: Final = {
    f"gpu-{n}": Device(f"gpu-{n}", uuid, uuid, {}, {}) for n, uuid in enumerate((GPU, OTHER))
}
RECORDED: Final = recorded_lines("dra/claims.jsonl")
REFERENCE: Final = Reference("default", "a UID", "claim")


def claim_of(allocation: dict[str, Any], **more: Any) -> Claim:
    found = {"metadata": {"uid": REFERENCE.uid}, "status": {"allocation": allocation}}
    return read_claim(found, REFERENCE, DRIVER, POOL, more.get("devices", DEVICES))


def plain(each: dict[str, Any]) -> dict[str, Any]:
    """Return a recorded allocation without that driver's own configurations."""
    return {"devices": {**each["allocation"]["devices"], "config": []}}


@pytest.mark.parametrize("each", RECORDED, ids=lambda each: each["claim"])
def test_what_a_real_scheduler_allocated_is_read(each: dict[str, Any]) -> None:
    results = each["allocation"]["devices"]["results"]
    names = [one["device"] for one in results]
    claim = claim_of(plain(each), devices={one: Device(one, one, one, {}, {}) for one in names})
    assert [device.device for device in claim.devices] == names
    assert [device.admin for device in claim.devices] == [
        one.get("adminAccess", False) for one in results
    ]
    for device, one in zip(claim.devices, results, strict=True):
        assert one["request"].split("/")[0] == device.request


def test_every_kind_of_request_was_recorded() -> None:
    requests = {
        each["request"] for one in RECORDED for each in one["allocation"]["devices"]["results"]
    }
    assert {"gpu", "gpu/any", "container-0-request-0"} <= requests


def test_configurations_that_are_not_known_are_an_error() -> None:
    configured = [each for each in RECORDED if each["allocation"]["devices"].get("config")]
    with raises(ClaimConfigUnknown, match=r"GpuConfig of example\.com/v1 is unknown"):
        claim_of(configured[0]["allocation"])
    result = {"request": "gpu", "driver": DRIVER, "pool": POOL, "device": "gpu-0"}
    for config, is_known in (
        ({"opaque": {"driver": "another.example.com", "parameters": {"kind": "Odd"}}}, True),
        ({"opaque": {"driver": DRIVER, "parameters": "odd"}}, False),
        ({"source": "FromClass"}, False),
    ):
        allocation = {"devices": {"results": [result], "config": [config]}}
        if is_known:
            assert claim_of(allocation).devices
        else:
            with raises(ClaimConfigUnknown):
                claim_of(allocation)


def test_a_claim_has_to_be_the_one_that_is_meant_and_allocated_here() -> None:
    result = {"request": "gpu", "driver": DRIVER, "pool": POOL, "device": "gpu-0"}
    lost = {"gpu-0": replace(DEVICES["gpu-0"], lost=True)}
    with pytest.raises(ClaimedDeviceMissing, match="does not answer"):
        claim_of({"devices": {"results": [result]}}, devices=lost)
    for change, error in (
        ({"device": "gpu-9"}, ClaimedDeviceMissing),
        ({"pool": "another"}, ClaimedDeviceMissing),
        ({"driver": "another.example.com"}, ResourceClaimUnusable),
    ):
        with pytest.raises(error):
            claim_of({"devices": {"results": [{**result, **change}]}})
    for found in ({}, {"metadata": {"uid": "another"}}, {"metadata": {"uid": "a UID"}}):
        with pytest.raises(ResourceClaimUnusable):
            read_claim(found, REFERENCE, DRIVER, POOL, DEVICES)


def having(uuid: str, gpu: str, name: str = "one", **more: Any) -> Claim:
    return Claim(name, "default", name, (ClaimDevice("gpu", POOL, uuid, uuid, gpu, **more),))


@pytest.mark.parametrize(
    ("uuid", "gpu", "is_taken"),
    [(GPU, GPU, True), (PART, GPU, True), (OTHER, OTHER, False)],
)
def test_a_gpu_and_its_parts_exclude_each_other(uuid: str, gpu: str, is_taken: bool) -> None:
    for one, other in ((GPU, uuid), (uuid, GPU)):
        whose = {GPU: GPU, uuid: gpu}
        new, old = having(one, whose[one], "new"), having(other, whose[other], "old")
        if is_taken:
            with raises(DeviceTaken, match="claim default/old has it"):
                refuse_taken(new, [having("GPU-3", "GPU-3", "third"), old])
        else:
            refuse_taken(new, [old])
        refuse_taken(having(one, whose[one], "new", admin=True), [old])
        refuse_taken(new, [having(other, whose[other], "old", admin=True)])
        refuse_taken(having(one, whose[one], "old"), [old])


def test_parts_of_one_gpu_do_not() -> None:
    refuse_taken(having(PART, GPU, "new"), [having(SIBLING, GPU, "old")])
    refuse_taken(having(PART, GPU), (), {SIBLING: "a pod"})
    with raises(DeviceTaken, match="a pod has it"):
        refuse_taken(having(PART, GPU), (), {GPU: "a pod"})
    with raises(DeviceTaken, match="a pod has it"):
        refuse_taken(having(PART, GPU), (), {PART: "a pod"})


# -- on disk -----------------------------------------------------------------------------------


@pytest.fixture
def config(tmp_path: Path) -> Config:
    boot = tmp_path / "proc/sys/kernel/random"
    boot.mkdir(parents=True)
    (boot / "boot_id").write_text("first\n")
    (tmp_path / "kubelet").mkdir()
    return Config(
        state=str(tmp_path / "state"), proc=str(tmp_path / "proc"),
        kubelet_root=str(tmp_path / "kubelet"),
    )  # fmt: skip


def test_what_was_prepared_is_there_after_a_restart_but_not_after_a_reboot(config: Config) -> None:
    claims = [having(GPU, GPU), having(OTHER, OTHER, "admin", admin=True)]
    assert state.load(config, DRIVER) == {}
    state.save(config, ())
    assert not os.path.exists(f"{config.state}/dra.json")
    state.save(config, claims)
    assert os.stat(f"{config.state}/dra.json").st_mode & 0o777 == 0o600
    assert list(state.load(config, DRIVER).values()) == claims
    assert state.held(config) == claims[0].devices
    with open(f"{config.proc}/sys/kernel/random/boot_id", "w", encoding="ascii") as file:
        file.write("second\n")
    assert state.load(config, DRIVER) == {}
    assert state.held(config) == ()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"format": 2}', b'{"format": 1}', b"null"])
def test_notes_that_are_damaged_do_not_count_and_end_nothing(
    config: Config, content: bytes
) -> None:
    state.save(config, [having(GPU, GPU)])
    with open(f"{config.state}/dra.json", "wb") as file:
        file.write(content)
    assert state.load(config, DRIVER) == {}
    recorded = f"{REPOSITORY}/tests/recorded/kubernetes-1.36/kubelet/claims-shared.json"
    shutil.copyfile(recorded, f"{config.kubelet_root}/dra_manager_state")
    _, claim = state.load(config, DRIVER).values()
    (device,) = claim.devices
    assert (claim.namespace, claim.name, device.request) == ("default", "shared", "gpu")
    assert state.load(config, "another.example.com") == {}


@pytest.mark.parametrize(
    "data",
    [None, {}, {"ClaimInfoStateList": None}, {"ClaimInfoStateList": [{}]},
     {"ClaimInfoStateList": [{"DriverState": {DRIVER: {"Devices": [{}]}}}]},
     {"ClaimInfoStateList": ["odd"]}, []],
)  # fmt: skip
def test_a_record_that_no_kubelet_writes_gives_nothing(config: Config, data: Any) -> None:
    with open(f"{config.kubelet_root}/dra_manager_state", "w", encoding="utf-8") as file:
        json.dump({"Data": json.dumps(data)}, file)
    assert state.load(config, DRIVER) == {}


def test_what_cannot_be_written_down_is_an_error(config: Config) -> None:
    os.makedirs(f"{config.state}/dra.json")
    with pytest.raises(DraStateUnwritten, match="NVSHIM-E2777"):
        state.save(config, [having(GPU, GPU)])


# -- the device plugin -------------------------------------------------------------------------


def test_the_plugin_goes_by_the_state_or_else_by_what_is_on_disk(config: Config) -> None:
    known = State()
    assert not claimed_on(known, config)
    state.save(config, [having(GPU, GPU)])
    assert [each.uuid for each in claimed_on(known, config)] == [GPU]
    publish(known.claimed_devices, ())
    assert not claimed_on(known, config)


PLAIN: Final = PluginDevice(GPU, GPU, GPU, "0", 0)
SHARE: Final = PluginDevice(f"{PART}::0", PART, OTHER, "1:0", 1)
WHOLE_PART: Final = PluginDevice(SIBLING, SIBLING, OTHER, "1:1", 1)


@pytest.mark.parametrize(
    ("claims", "left"),
    [
        ((), (PLAIN, SHARE, WHOLE_PART)),
        ((having(GPU, GPU),), (SHARE, WHOLE_PART)),
        ((having(PART, OTHER),), (PLAIN, WHOLE_PART)),
        ((having(OTHER, OTHER),), (PLAIN,)),
        # A whole GPU of the device plugin, while a claim has a MIG device of it.
        ((having("MIG-of-it", GPU),), (SHARE, WHOLE_PART)),
        ((having("GPU-3", "GPU-3"),), (PLAIN, SHARE, WHOLE_PART)),
    ],
)
def test_the_plugin_gives_nothing_that_a_claim_has(
    claims: tuple[Claim, ...], left: tuple[PluginDevice, ...]
) -> None:
    devices = (PLAIN, SHARE, WHOLE_PART)
    # A device that is being created has the name of its part.
    claimed = [replace(device, device="x") for claim in claims for device in claim.devices]
    found = without_claimed(Resource("nvidia.com/gpu", devices), claimed)
    assert [each.id for each in found.devices] == [each.id for each in devices]
    assert [each.id for each in found.devices if each.is_healthy] == [each.id for each in left]
    refuse_claimed(left, claimed)
    for each in {*devices} - {*left}:
        with raises(DeviceTaken):
            refuse_claimed([each], claimed)


def test_no_mig_device_is_given_whose_gpu_is_just_being_cut() -> None:
    name = f"{OTHER.lower()}-mig-1g10gb-19-2"
    making = ClaimDevice("gpu", POOL, name, name, OTHER)
    with raises(DeviceTaken):
        refuse_claimed([WHOLE_PART], [making])
    refuse_claimed([PLAIN], [making])
    # An existing device stays healthy: its holder must not be told that it is gone.
    resource = Resource("nvidia.com/mig-1g.10gb", (WHOLE_PART, PLAIN))
    assert without_claimed(resource, [making]) is resource
    # Once it is created, its UUID is known.
    refuse_claimed([WHOLE_PART, PLAIN], [replace(making, uuid="MIG-of-the-claim")])
