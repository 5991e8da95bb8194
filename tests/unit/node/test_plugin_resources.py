from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from hooks.node.gpus import Gpu, MigDevice, Nodes
from integration.node.errors import (
    MigDevicesUnknown,
    MigLayoutUnsuitable,
    SettingsConflict,
    SharingUnsuitable,
)
from integration.node.health.machine import Condition
from integration.node.health.values import State
from integration.node.plugin.resources import resources_of, unmatched
from integration.node.plugin.values import (
    MPS,
    TIME_SLICING,
    Mig,
    Settings,
    SharedResource,
    Sharing,
)
from tests.unit.node.inventories import node_with as node

if TYPE_CHECKING:
    from hooks.node.inventory import Inventory


def gpu(index: int, *, mig: bool = False, **more: Any) -> Gpu:
    return Gpu(
        index=index,
        minor=index,
        uuid=more.pop("uuid", f"GPU-{index}"),
        bus_id=f"0000:{index + 1:02x}:00.0",
        model="NVIDIA H100",
        mig=mig,
        memory=80 << 30,
        **more,
    )


def part(of: int, index: int, profile: str = "1g.10gb", **more: Any) -> MigDevice:
    return MigDevice(
        gpu=of,
        index=index,
        uuid=more.pop("uuid", f"MIG-{of}-{index}"),
        gpu_instance=index + 1,
        compute_instance=0,
        profile=profile,
        **more,
    )


def shared(*resources: SharedResource, kind: str = TIME_SLICING, **more: Any) -> Settings:
    mig = more.pop("mig_strategy", Mig.NONE)
    return Settings(sharing=Sharing(kind=kind, resources=resources, **more), mig_strategy=mig)


def ids(inventory: Inventory, settings: Settings, **more: Any) -> dict[str, list[str]]:
    return {
        resource.name: [device.id for device in resource.devices]
        for resource in resources_of(inventory, settings, **more)
    }


TWO = node(gpu(0), gpu(1))
CUT = node(
    gpu(0),
    gpu(1, mig=True),
    gpu(2, mig=True),
    mig=(part(1, 1), part(1, 0, "3g.40gb"), part(2, 0, "1g.10gb+me"), part(2, 1)),
)
MIXED = Settings(mig_strategy=Mig.MIXED)
SINGLE = Settings(mig_strategy=Mig.SINGLE)


def test_each_gpu_is_a_device_with_what_is_known_of_it() -> None:
    (resource,) = resources_of(TWO, Settings(), numa={"0000:02:00.0": 1})
    assert resource.name == "nvidia.com/gpu"
    assert (resource.sharing, resource.replicas, resource.one_each) == ("", 1, False)
    first, second = resource.devices
    assert (first.id, first.index, first.minor, first.numa_node) == ("GPU-0", "0", 0, None)
    assert (second.numa_node, second.memory_bytes, second.is_healthy) == (1, 80 << 30, True)


def test_a_node_without_gpus_has_no_resource() -> None:
    assert resources_of(node(), Settings()) == ()
    assert resources_of(node(), SINGLE) == ()
    assert resources_of(node(), MIXED) == ()


def test_what_has_no_uuid_or_is_excluded_is_not_told_of() -> None:
    odd = node(
        gpu(0, uuid=""),
        gpu(1, excluded=True, mig=True),
        gpu(2, mig=True),
        mig=(part(1, 0), part(2, 0, uuid=""), part(2, 1)),
    )
    assert ids(odd, Settings()) == {"nvidia.com/gpu": ["GPU-2"]}
    assert ids(odd, MIXED) == {"nvidia.com/mig-1g.10gb": ["MIG-2-1"]}


def test_a_uuid_that_two_devices_have_is_handed_out_for_neither() -> None:
    twins = node(gpu(0, uuid="GPU-x"), gpu(1, uuid="GPU-x"), gpu(2))
    assert ids(twins, Settings()) == {"nvidia.com/gpu": ["GPU-2"]}
    cut = node(gpu(0, mig=True), mig=(part(0, 0, uuid="MIG-x"), part(0, 1, uuid="MIG-x")))
    assert ids(cut, MIXED) == {}


def test_what_is_out_of_service_is_told_of_and_unhealthy() -> None:
    (whole,) = resources_of(node(gpu(0, drained="fan"), gpu(1)), Settings())
    assert [device.is_healthy for device in whole.devices] == [False, True]
    there = node(gpu(0, mig=True), mig=(part(0, 0, drained="fan"), part(0, 1)))
    (cut,) = resources_of(there, MIXED)
    assert [device.is_healthy for device in cut.devices] == [False, True]
    (none,) = resources_of(replace(there, drained="570 comes"), MIXED)
    assert not any(device.is_healthy for device in none.devices)


# -- MIG ---------------------------------------------------------------------------------------


def test_without_a_strategy_gpus_in_mig_mode_are_gpus() -> None:
    assert ids(CUT, Settings()) == {"nvidia.com/gpu": ["GPU-0", "GPU-1", "GPU-2"]}


def test_mixed_names_mig_devices_by_profile_in_order_of_their_index() -> None:
    assert ids(CUT, MIXED) == {
        "nvidia.com/gpu": ["GPU-0"],
        "nvidia.com/mig-3g.40gb": ["MIG-1-0"],
        "nvidia.com/mig-1g.10gb": ["MIG-1-1", "MIG-2-1"],
        "nvidia.com/mig-1g.10gb.me": ["MIG-2-0"],
    }
    (device,) = next(r for r in resources_of(CUT, MIXED) if "3g" in r.name).devices
    assert (device.index, device.gpu, device.minor) == ("1:0", "GPU-1", 1)


def test_mixed_leaves_out_what_has_no_profile_and_gpus_without_instances() -> None:
    there = node(gpu(0, mig=True), gpu(1, mig=True), mig=(part(1, 0, ""), part(1, 1)))
    assert ids(there, MIXED) == {"nvidia.com/mig-1g.10gb": ["MIG-1-1"]}


def test_mixed_has_a_name_for_an_instance_that_is_cut_further() -> None:
    there = node(gpu(0, mig=True), mig=(part(0, 0, "1c.3g.40gb"),))
    assert list(ids(there, MIXED)) == ["nvidia.com/mig-1c.3g.40gb"]


def test_single_tells_of_mig_devices_as_gpus() -> None:
    there = node(gpu(0, mig=True), gpu(1, mig=True), mig=(part(0, 0), part(0, 1), part(1, 0)))
    assert ids(there, SINGLE) == {"nvidia.com/gpu": ["MIG-0-0", "MIG-0-1", "MIG-1-0"]}
    assert ids(TWO, SINGLE) == {"nvidia.com/gpu": ["GPU-0", "GPU-1"]}


@pytest.mark.parametrize(
    ("there", "words"),
    [
        (node(gpu(0), gpu(1, mig=True), mig=(part(1, 0),)), "MIG mode, 1, and without, 0"),
        (node(gpu(0, mig=True), gpu(1, mig=True), mig=(part(0, 0),)), "GPU 1 in MIG mode without"),
        (node(gpu(0, mig=True), mig=(part(0, 0), part(0, 1, "3g.40gb"))), "3g.40gb (0:1)"),
    ],
)
def test_single_refuses_what_it_cannot_tell(there: Inventory, words: str) -> None:
    with pytest.raises(MigLayoutUnsuitable) as raised:
        resources_of(there, SINGLE)
    assert words in str(raised.value)


def test_single_does_not_ask_a_lost_gpu_for_its_mode() -> None:
    there = node(gpu(0, lost="gone"), gpu(1, mig=True), mig=(part(1, 0),))
    assert ids(there, SINGLE) == {"nvidia.com/gpu": ["MIG-1-0"]}
    (whole,) = resources_of(node(gpu(0, lost="gone"), gpu(1)), SINGLE)
    assert [device.is_healthy for device in whole.devices] == [False, True]


@pytest.mark.parametrize("settings", [SINGLE, MIXED])
def test_nothing_is_known_of_mig_devices_while_nvml_does_not_answer(settings: Settings) -> None:
    there = node(gpu(0, mig=True), nvml_failure="it hangs")
    with pytest.raises(MigDevicesUnknown, match="it hangs"):
        resources_of(there, settings)
    assert ids(there, Settings()) == {"nvidia.com/gpu": ["GPU-0"]}
    assert ids(node(gpu(0), nvml_failure="it hangs"), settings) == {"nvidia.com/gpu": ["GPU-0"]}


# -- health ------------------------------------------------------------------------------------


def test_what_is_lost_or_has_no_node_stays_and_is_unhealthy() -> None:
    there = node(
        gpu(0, lost="gone"),
        gpu(1),
        gpu(2),
        nodes=Nodes({}, {"/dev/nvidia1": "no such file"}, frozenset()),
    )
    (resource,) = resources_of(there, Settings())
    assert [device.is_healthy for device in resource.devices] == [False, False, True]


@pytest.mark.parametrize(
    ("of_gpu", "of_part", "expected"),
    [
        (State.HEALTHY, State.UNHEALTHY, State.UNHEALTHY),
        (State.UNHEALTHY, State.HEALTHY, State.UNHEALTHY),
        (State.RECOVERING, State.SUSPECT, State.RECOVERING),
        (State.SUSPECT, State.HEALTHY, State.SUSPECT),
    ],
)
def test_a_mig_device_is_as_healthy_as_the_worse_of_it_and_its_gpu(
    of_gpu: State, of_part: State, expected: State
) -> None:
    there = node(gpu(0, mig=True), mig=(part(0, 0),))
    health = {
        "GPU-0": Condition(of_gpu),
        "MIG-0-0": Condition(of_part),
    }
    (resource,) = resources_of(there, MIXED, health)
    assert resource.devices[0].state is expected


def test_every_share_of_an_unhealthy_gpu_is_unhealthy() -> None:
    health = {"GPU-1": Condition(State.UNHEALTHY)}
    (resource,) = resources_of(TWO, shared(SharedResource("nvidia.com/gpu", 2)), health)
    assert [device.is_healthy for device in resource.devices] == [True, True, False, False]


# -- sharing -----------------------------------------------------------------------------------


def test_a_shared_device_has_an_id_for_each_share() -> None:
    settings = shared(SharedResource("nvidia.com/gpu", 3), fail_requests_greater_than_one=True)
    (resource,) = resources_of(node(gpu(0)), settings)
    assert [device.id for device in resource.devices] == ["GPU-0::0", "GPU-0::1", "GPU-0::2"]
    assert {device.uuid for device in resource.devices} == {"GPU-0"}
    assert (resource.sharing, resource.replicas, resource.one_each) == (TIME_SLICING, 3, True)


def test_a_shared_resource_may_have_another_name() -> None:
    by_default = shared(SharedResource("nvidia.com/gpu", 2), rename_by_default=True)
    assert list(ids(TWO, by_default)) == ["nvidia.com/gpu.shared"]
    renamed = shared(
        SharedResource("nvidia.com/gpu", 2, "nvidia.com/slice"), rename_by_default=True
    )
    assert list(ids(TWO, renamed)) == ["nvidia.com/slice"]
    assert resources_of(TWO, renamed)[0].original == "nvidia.com/gpu"


@pytest.mark.parametrize(
    "share",
    [
        SharedResource("nvidia.com/gpu", 2, devices=("1",)),
        SharedResource("nvidia.com/gpu", 2, devices=("GPU-1", "GPU-7")),
    ],
)
def test_what_is_not_shared_keeps_its_name_and_the_rest_gets_another(share: SharedResource) -> None:
    assert ids(TWO, shared(share)) == {
        "nvidia.com/gpu": ["GPU-0"],
        "nvidia.com/gpu.shared": ["GPU-1::0", "GPU-1::1"],
    }


def test_so_many_are_shared_as_are_wanted_and_there() -> None:
    assert ids(TWO, shared(SharedResource("nvidia.com/gpu", 2, "nvidia.com/s", count=1))) == {
        "nvidia.com/gpu": ["GPU-1"],
        "nvidia.com/s": ["GPU-0::0", "GPU-0::1"],
    }
    all_of_them = shared(SharedResource("nvidia.com/gpu", 2, count=9))
    assert len(ids(TWO, all_of_them)["nvidia.com/gpu"]) == 4


@pytest.mark.parametrize("name", ["1:0", "MIG-1-0", "MIG-GPU-1/1/0"])
def test_mig_devices_are_shared_by_any_of_their_names(name: str) -> None:
    share = SharedResource("nvidia.com/mig-3g.40gb", 2, devices=(name,))
    found = ids(CUT, shared(share, mig_strategy=Mig.MIXED))
    assert found["nvidia.com/mig-3g.40gb"] == ["MIG-1-0::0", "MIG-1-0::1"]


def test_a_name_that_is_taken_is_refused() -> None:
    share = SharedResource("nvidia.com/gpu", 2, "nvidia.com/mig-1g.10gb")
    with pytest.raises(SettingsConflict, match=r"nvidia.com/mig-1g.10gb"):
        resources_of(CUT, shared(share, mig_strategy=Mig.MIXED))


def test_mps_is_for_whole_gpus_and_for_as_many_as_they_can_have() -> None:
    old, new = gpu(0, compute_capability="6.1"), gpu(0, compute_capability="7.0")
    many = shared(SharedResource("nvidia.com/gpu", 17), kind=MPS)
    with pytest.raises(SharingUnsuitable, match=r"16 clients"):
        resources_of(node(old), many)
    assert len(ids(node(new), many)["nvidia.com/gpu"]) == 17
    assert len(ids(TWO, many)["nvidia.com/gpu"]) == 34
    cut = node(gpu(0, mig=True), mig=(part(0, 0),))
    with pytest.raises(SharingUnsuitable, match=r"MIG device 0:0"):
        resources_of(cut, shared(many.sharing.resources[0], kind=MPS, mig_strategy=Mig.SINGLE))


def test_what_is_to_be_shared_and_is_not_there_is_said() -> None:
    settings = shared(
        SharedResource("nvidia.com/gpu", 2, devices=("0", "5")),
        SharedResource("nvidia.com/mig-1g.5gb", 2),
    )
    (line,) = unmatched(TWO, settings)
    assert "device 5" in line
    assert unmatched(TWO, shared(SharedResource("nvidia.com/gpu", 2, count=3)))
    assert unmatched(TWO, shared(SharedResource("nvidia.com/gpu", 2))) == ()


def test_no_share_is_there_twice_on_the_largest_node() -> None:
    there = node(
        *(gpu(index, mig=True) for index in range(16)),
        mig=tuple(part(index, number) for index in range(16) for number in range(7)),
    )
    settings = shared(SharedResource("nvidia.com/mig-1g.10gb", 48), mig_strategy=Mig.MIXED)
    (resource,) = resources_of(there, settings)
    found = {device.id for device in resource.devices}
    assert len(found) == len(resource.devices) == 16 * 7 * 48
