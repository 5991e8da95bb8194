"""GPUs that several claims share: how they are published, and the share of each claim."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hooks.config import Config
from integration.agent_errors import (
    ClaimConfigUnknown,
    DeviceTaken,
    ResourceClaimUnusable,
    SharingConflict,
)
from integration.containers.shares import Share, shares_in
from integration.node.services.dra import cdi
from integration.node.services.dra.claims import refuse_taken
from integration.node.services.dra.devices import Device, publishable
from integration.node.services.dra.mig_layout import Counters, Part
from integration.node.services.dra.rpc import prepared_response
from integration.node.services.dra.sharing import (
    MOST,
    consumed,
    daemons_of,
    edits_of,
    refuse_conflicts,
    refuse_overfull,
    with_shares,
)
from integration.node.services.dra.slices import VERSIONS, contents
from integration.node.state import claims_file as state
from integration.node.values.claims import Claim, Sharing
from tests.harness.raising import raises
from tests.harness.slice_rules import faults
from tests.unit.node.dra.test_claims import DRIVER, GPU, OTHER, POOL, claim_of, having
from tests.unit.node.dra.test_configuration import entry, ours
from tests.unit.node.dra.test_slices import DEVICES, GPUS, NODE, PARTS

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

ID, SECOND = (f"{n}b1f5c5e-7d47-4c3c-9f0d-5f4b4a3d2c1b" for n in range(2))
SHARED: Final = {
    f"gpu-{n}": Device(f"gpu-{n}", uuid, uuid, {}, {"gpu.nvidia.com/memory": "80Gi"}, shares=4)
    for n, uuid in enumerate((GPU, OTHER))
}


OF_PART: Final = {
    f"gpu.nvidia.com/{name}": value
    for name, value in (
        ("memory", "9856Mi"), ("multiprocessors", "16"), ("copyEngines", "1"), ("decoders", "1"),
        ("encoders", "0"), ("jpegEngines", "1"), ("ofaEngines", "0"),
    )
}  # fmt: skip


def spec_of(devices: Iterable[Device]) -> dict[str, Any]:
    (found,) = contents(devices, "v1")
    pool = {"name": POOL, "generation": 1, "resourceSliceCount": 1}
    return {"driver": DRIVER, "pool": pool, "nodeName": POOL, **found}


def part(memory: int = 20, shares: int = 1, *, share: str = ID, device: str = "gpu-0") -> Any:
    capacity = {"gpu.nvidia.com/memory": f"{memory}Gi", "gpu.nvidia.com/shares": str(shares)}
    return {
        "request": "gpu", "driver": DRIVER, "pool": POOL, "device": device,
        "shareID": share, "consumedCapacity": capacity,
    }  # fmt: skip


def sharing(*results: Any, name: str = "one", config: tuple[Any, ...] = ()) -> Claim:
    claim = claim_of({"devices": {"results": results, "config": config}}, devices=SHARED)
    return replace(claim, uid=f"UID of {name}", name=name)


# -- published ---------------------------------------------------------------------------------


def test_without_being_told_a_gpu_is_published_as_a_whole() -> None:
    assert with_shares(DEVICES, 0, NODE, Config()) == DEVICES
    assert with_shares(DEVICES, 1, NODE, Config()) == DEVICES


@pytest.mark.parametrize("version", VERSIONS)
def test_a_gpu_and_a_mig_device_are_published_with_shares(version: str) -> None:
    devices = [
        replace(each, capacity=OF_PART) if each.name.startswith("mig-") else each
        for each in DEVICES
    ]
    (told,) = contents(with_shares(devices, 4, NODE, Config()), version)
    assert faults(spec_of(with_shares(devices, 4, NODE, Config()))) == []
    for each in told["devices"]:
        device = each.get("basic", each)
        assert device["allowMultipleAllocations"] is True
        is_gpu = each["name"].startswith("gpu-")
        total, share = ("80Gi", "20Gi") if is_gpu else ("9856Mi", "2464Mi")
        expected = {
            "gpu.nvidia.com/memory": {
                "value": total,
                "requestPolicy": {
                    "default": share,
                    "validRange": {"min": "1Mi", "max": total, "step": "1Mi"},
                },
            },
            "gpu.nvidia.com/shares": {
                "value": "4",
                "requestPolicy": {
                    "default": "1",
                    "validRange": {"min": "1", "max": "4", "step": "1"},
                },
            },
        }
        # A claim takes only what it requests; otherwise the first would take everything.
        free = {"requestPolicy": {"default": "0", "validRange": {"min": "0"}}}
        for name, value in OF_PART.items():
            if not is_gpu and not name.endswith("/memory"):
                expected[name] = {"value": value, **free}
        assert device["capacity"] == expected


@pytest.mark.parametrize(
    ("mode", "default", "least"), [("memory", "80Gi", "1Mi"), ("unlimited", "0", "0")]
)
def test_in_nvidias_modes_a_number_limits_claims_only_if_containers_are_limited(
    mode: str, default: str, least: str
) -> None:
    valid = {"min": least, "max": "80Gi", "step": "1Mi"}
    memory = {"value": "80Gi", "requestPolicy": {"default": default, "validRange": valid}}
    one = {"default": "1", "validRange": {"min": "1", "max": "3", "step": "1"}}
    for holders, more in (
        ("any", {}),
        (3, {"gpu.nvidia.com/shares": {"value": "3", "requestPolicy": one}}),
    ):
        shared = with_shares(DEVICES[:1], mode, NODE, Config(holders=holders))
        (told,) = contents(shared, "v1")
        (device,) = told["devices"]
        assert device["allowMultipleAllocations"] is True
        assert device["capacity"] == {"gpu.nvidia.com/memory": memory, **more}
        assert faults(spec_of(shared)) == []
    assert with_shares(DEVICES, mode, NODE, Config(holders="exclusive")) == DEVICES


def test_any_number_of_claims_has_a_gpu_as_long_as_its_memory_suffices() -> None:
    (gpu,) = with_shares([replace(SHARED["gpu-0"], shares=0)], "unlimited", NODE, Config())
    devices = {gpu.name: replace(gpu, uuid=GPU, gpu=GPU)}

    def taking(memory: str, number: int) -> Claim:
        result = {
            **part(share=f"share-{number}"),
            "consumedCapacity": {"gpu.nvidia.com/memory": memory},
        }
        return sharing(result, name=f"claim {number}")

    many = [taking("0", number) for number in range(100)]
    refuse_overfull(taking("80Gi", 100), many, devices)
    with raises(DeviceTaken, match=r"it can have any number and 81920Mi"):
        refuse_overfull(taking("80Gi", 100), [*many, taking("1Mi", 101)], devices)


def test_what_takes_from_counters_has_no_shares() -> None:
    taking = [replace(each, counters=Counters("of-its-gpu", {}, {})) for each in DEVICES]
    assert list(with_shares(taking, 4, NODE, Config())) == taking
    made = {"gpu-0": replace(SHARED["gpu-0"], part=Part(OTHER, 19, 0, 1), shares=0)}
    with pytest.raises(ResourceClaimUnusable, match="created for one claim and cannot be shared"):
        claim_of({"devices": {"results": [part()]}}, devices=made)


def test_a_device_with_shares_has_as_many_facts_as_the_api_takes() -> None:
    attributes = {f"attribute{n}": {"int": n} for n in range(16)}
    slices = {f"gpu.nvidia.com/memorySlice{n}": "1" for n in range(8)}
    whole = replace(DEVICES[-1], attributes=attributes, capacity=OF_PART | slices)
    (published,) = publishable([whole], {})
    assert len(published.attributes) + len(published.capacity) == 32
    (shared,) = publishable(with_shares([whole], 4, NODE, Config()), {})
    assert len(shared.attributes) + len(shared.capacity) == 17 + 8
    (all_of_it,) = publishable(with_shares([whole], "memory", NODE, Config()), {})
    assert len(all_of_it.attributes) + len(all_of_it.capacity) <= 32
    assert shared.capacity == {**OF_PART, "gpu.nvidia.com/shares": "4"}


@given(
    st.integers(0, MOST) | st.sampled_from(["memory", "unlimited"]),
    st.integers(MOST << 20, 1 << 40),
)
def test_what_is_published_is_never_wrong(most: int | str, memory: int) -> None:
    gpus = tuple(replace(gpu, memory=memory >> 20 << 20) for gpu in NODE.gpus)
    node = replace(NODE, gpus=gpus)
    devices = [
        replace(each, capacity={"gpu.nvidia.com/memory": f"{memory >> 20}Mi"}) for each in DEVICES
    ]
    assert faults(spec_of(with_shares(devices, most, node, Config()))) == []


def test_there_are_no_more_shares_than_containers_may_have_the_gpu() -> None:
    config = Config(holders=3, holders_of=(f"{GPUS[0]}=1", f"{GPUS[1]}=2"))
    assert [each.shares for each in with_shares(DEVICES, 4, NODE, config)][:2] == [0, 2]
    assert with_shares(DEVICES, 4, NODE, Config(holders="exclusive")) == DEVICES
    assert [each.shares for each in with_shares(DEVICES, 4, NODE, Config(holders=3))] == [3] * 4
    # A MIG device has its own limit, or that of its GPU.
    config = Config(holders_of=(f"{GPUS[2]}=2", f"{PARTS[1]}=3"))
    assert [each.shares for each in with_shares(DEVICES, 4, NODE, config)] == [4, 4, 2, 3]


# -- allocated ---------------------------------------------------------------------------------


def test_two_claims_have_a_gpu_as_long_as_it_is_enough_for_both() -> None:
    one = sharing(part(40))
    two = sharing(part(40, share=SECOND), name="two")
    refuse_taken(two, [one])
    refuse_overfull(two, [one], SHARED)
    refuse_overfull(one, [one, two], SHARED)
    refuse_overfull(having(OTHER, OTHER, "whole"), [one], SHARED)
    for greedy in (part(41, share=SECOND), part(1, 4, share=SECOND)):
        with raises(DeviceTaken, match=r"with claim default/one it would have [25] shares"):
            refuse_overfull(sharing(greedy, name="two"), [one], SHARED)
    third = sharing(part(1, 4, share=SECOND), name="three")
    for others in ([one, two], [two, one]):  # in either order of preparation
        with raises(DeviceTaken, match="with claim default/one, claim default/two it would"):
            refuse_overfull(third, others, SHARED)
    with raises(DeviceTaken, match="with its other shares"):
        refuse_overfull(sharing(part(41), part(40, share=SECOND)), [], SHARED)
    refuse_overfull(sharing(part(80, device="gpu-1"), name="two"), [one], SHARED)
    # The setting may have changed since; the memory still counts.
    unshared = {name: replace(each, shares=0) for name, each in SHARED.items()}
    refuse_overfull(sharing(part(1, 4, share=SECOND), name="two"), [one], unshared)
    with raises(DeviceTaken):
        refuse_overfull(sharing(part(41, share=SECOND), name="two"), [one], unshared)


def test_who_has_no_share_has_the_whole_gpu() -> None:
    one, whole = sharing(part()), having(GPU, GPU, "whole")
    for new, old in ((one, whole), (whole, one)):
        with raises(DeviceTaken):
            refuse_taken(new, [old])
    with raises(DeviceTaken):
        refuse_taken(one, (), {GPU: "a pod"})
    refuse_taken(one, [having(GPU, GPU, "admin", admin=True)])
    refuse_taken(having("MIG-of-it", "GPU-other", "part"), [one])
    with raises(DeviceTaken):
        refuse_taken(having("MIG-of-it", GPU, "part"), [one])


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (part(20, 2), (ID, 20 << 10, 2)),
        ({**part(), "shareID": None}, ("", 0, 0)),
        ({"shareID": ID}, (ID, 0, 0)),
        ({"shareID": ID, "consumedCapacity": {"gpu.nvidia.com/memory": "odd"}}, (ID, 0, 0)),
        ({"consumedCapacity": {"gpu.nvidia.com/memory": "1Gi"}}, ("", 0, 0)),
    ],
)
def test_what_part_an_allocation_is(result: Any, expected: tuple[str, int, int]) -> None:
    assert consumed(result) == expected


def test_the_kubelets_record_tells_of_shares(tmp_path: Path) -> None:
    device = {
        "PoolName": POOL, "DeviceName": GPU.lower(), "ShareID": ID, "RequestNames": ["gpu"],
        "CDIDeviceIDs": ["odd"],
    }  # fmt: skip
    info = {"ClaimUID": "UID", "ClaimName": "one", "Namespace": "default"}
    info["DriverState"] = {DRIVER: {"Devices": [device, device]}}  # type: ignore[assignment]
    data = json.dumps({"ClaimInfoStateList": [info]})
    (tmp_path / "dra_manager_state").write_text(json.dumps({"Data": data}), "ascii")
    config = Config(state=str(tmp_path), proc=str(tmp_path), kubelet_root=str(tmp_path))
    (claim,) = state.load(config, DRIVER).values()
    assert [(each.uuid, each.share) for each in claim.devices] == [(GPU, ID)]
    name = f"k8s.{DRIVER}/claim=UID-{GPU.lower()}-{ID}"
    assert cdi.name_of(DRIVER, "UID", claim.devices[0]) == name


def test_only_the_first_version_of_the_kubelets_api_has_shares() -> None:
    claim = sharing(part())
    assert prepared_response(claim, DRIVER).devices[0].share_id == ID
    old = prepared_response(claim, DRIVER, knows_shares=False)
    assert not old.devices[0].HasField("share_id")
    whole = prepared_response(having(GPU, GPU), DRIVER)
    assert not whole.devices[0].HasField("share_id")


# -- how they are shared -----------------------------------------------------------------------


def test_claims_that_share_a_gpu_share_it_in_the_same_way() -> None:
    def shared(name: str, **parameters: Any) -> Claim:
        return sharing(part(), name=name, config=(entry(ours(**parameters)),))

    plain, mps, users = shared("plain"), shared("mps", mps={}), shared("u", mps={"multiUser": True})
    long, short = shared("long", timeSlice="Long"), shared("short", timeSlice="Short")
    for new, old, words in (
        (plain, mps, "claim default/mps shares it by MPS"),
        (mps, long, "shares it without MPS"),
        (mps, users, "with multiUser true"),
        (long, short, "with the time slice Short"),
    ):
        with raises(SharingConflict, match=words):
            refuse_conflicts(new, [old])
    refuse_conflicts(plain, [long])
    refuse_conflicts(long, [plain])
    refuse_conflicts(mps, [shared("other", mps={"memoryLimit": "1Gi"})])
    refuse_conflicts(mps, [having(OTHER, OTHER)])


def test_shares_of_a_gpu_have_one_daemon_and_each_its_limits_by_variables() -> None:
    config = (entry(ours(mps={"threadPercentage": 30, "memoryLimit": "4Gi"})),)
    one = sharing(part(20), config=config)
    two = sharing(part(2, share=SECOND), name="two", config=(entry(ours(mps={})),))
    (name,) = daemons_of([one, two])
    assert name == f"shares/{GPU}"
    (daemon,) = daemons_of([one, two]).values()
    assert (daemon.limits, daemon.threads) == ({GPU: 0}, 100)
    first, second = (edits_of(each.devices[0], "/run/nvidia/mps").env for each in (one, two))
    pipe = f"CUDA_MPS_PIPE_DIRECTORY=/mps/shares/{GPU}/pipe"
    assert first[1:] == (
        pipe, "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=4096M", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=30",
    )  # fmt: skip
    assert second[1:] == (pipe, "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=2048M")
    assert shares_in([*first, *second]) == (
        Share(ID, GPU, 20 << 10, 1), Share(SECOND, GPU, 2 << 10, 1),
    )  # fmt: skip
    results = (part(), part(device="gpu-1", share=SECOND))
    with raises(ClaimConfigUnknown, match="a share of a device"):
        sharing(*results, config=config)
    assert sharing(*results).devices[0].sharing == Sharing()


@pytest.mark.parametrize(
    "word",
    ["", None, 5, "NVSHIM_GPU_SHARE_=a,memory=1Mi,shares=1", "NVSHIM_GPU_SHARE_A=b,memory=1",
     "NVSHIM_GPU_SHARE_A=b,memory=٣Mi,shares=1"],
)  # fmt: skip
def test_a_variable_of_another_form_tells_of_no_share(word: object) -> None:
    assert shares_in([word]) == ()
