from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from hooks.node.gpus import Gpu, MigDevice, Nodes
from integration.agent_errors import (
    MigDevicesUnknown,
    MigLayoutUnsuitable,
    SettingsConflict,
    SharingUnsuitable,
)
from integration.node.device_health.device_state import Condition
from integration.node.services.plugin.resources import (
    resources_of,
    unannounced,
    unhealthy,
    unmatched,
)
from integration.node.services.plugin.server import _list_of
from integration.node.values.health import HealthState
from integration.node.values.resources import (
    MPS,
    TIME_SLICING,
    Mig,
    Settings,
    SharedResource,
    Sharing,
)
from tests.harness.raising import raises
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
        caps=more.pop("caps", (of * 100 + index * 2, of * 100 + index * 2 + 1)),
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


ONE = node(gpu(0, mig=True), mig=(part(0, 0),))
CUTS = node(gpu(0, mig=True), gpu(1, mig=True), mig=(part(0, 0), part(0, 1), part(1, 0)))
ODD = node(
    gpu(0, uuid=""),
    gpu(1, excluded=True, mig=True),
    gpu(2, mig=True),
    mig=(part(1, 0), part(2, 0, uuid=""), part(2, 1)),
)
LOST = node(gpu(0, lost="gone"), gpu(1, mig=True), mig=(part(1, 0),))
SILENT = node(gpu(0, mig=True), nvml_failure="it hangs")
GPU = "nvidia.com/gpu"
HALVES = SharedResource(GPU, 2)
THIRDS = SharedResource("nvidia.com/mig-3g.40gb", 2)


def halves(**more: Any) -> Settings:
    return shared(replace(HALVES, **more))


TOLD: dict[str, tuple[Inventory, Settings, dict[str, list[str]]]] = {
    "no GPU": (node(), Settings(), {}),
    "no GPU, single": (node(), SINGLE, {}),
    "no GPU, mixed": (node(), MIXED, {}),
    "no UUID, or excluded": (
        node(gpu(0, uuid=""), gpu(1, excluded=True), gpu(2)), Settings(), {GPU: ["GPU-2"]},
    ),
    "no UUID, or excluded, mixed": (ODD, MIXED, {"nvidia.com/mig-1g.10gb": ["MIG-2-1"]}),
    "two of one UUID": (
        node(gpu(0, uuid="GPU-x"), gpu(1, uuid="GPU-x"), gpu(2)), Settings(), {GPU: ["GPU-2"]},
    ),
    "two MIG devices of one UUID": (
        node(gpu(0, mig=True), mig=(part(0, 0, uuid="MIG-x"), part(0, 1, uuid="MIG-x"))), MIXED, {},
    ),
    "GPUs in MIG mode without a strategy": (CUT, Settings(), {GPU: ["GPU-0"]}),
    "MIG mode without MIG devices and a strategy": (
        node(gpu(0, mig=True), gpu(1)), Settings(), {GPU: ["GPU-1"]},
    ),
    "nothing but GPUs in MIG mode without a strategy": (CUTS, Settings(), {}),
    "MIG mode without MIG devices, mixed": (
        node(gpu(0, mig=True), gpu(1)), MIXED, {GPU: ["GPU-1"]},
    ),
    "MIG devices by profile, in order of their index": (
        CUT, MIXED,
        {
            GPU: ["GPU-0"],
            "nvidia.com/mig-3g.40gb": ["MIG-1-0"],
            "nvidia.com/mig-1g.10gb": ["MIG-1-1", "MIG-2-1"],
            "nvidia.com/mig-1g.10gb.me": ["MIG-2-0"],
        },
    ),
    "one without a profile, and a GPU without instances": (
        node(gpu(0, mig=True), gpu(1, mig=True), mig=(part(1, 0, ""), part(1, 1))), MIXED,
        {"nvidia.com/mig-1g.10gb": ["MIG-1-1"]},
    ),
    "an instance that is cut further": (
        node(gpu(0, mig=True), mig=(part(0, 0, "1c.3g.40gb"),)), MIXED,
        {"nvidia.com/mig-1c.3g.40gb": ["MIG-0-0"]},
    ),
    "MIG devices as GPUs": (CUTS, SINGLE, {GPU: ["MIG-0-0", "MIG-0-1", "MIG-1-0"]}),
    "no MIG devices, single": (TWO, SINGLE, {GPU: ["GPU-0", "GPU-1"]}),
    "a lost GPU is not asked for its mode": (LOST, SINGLE, {GPU: ["MIG-1-0"]}),
    "NVML is silent, without a strategy": (SILENT, Settings(), {}),
    **{
        f"NVML is silent of a whole GPU, {settings.mig_strategy}": (
            node(gpu(0), nvml_failure="it hangs"), settings, {GPU: ["GPU-0"]},
        )
        for settings in (SINGLE, MIXED)
    },
    "shares have another name by default": (
        node(gpu(0)), shared(HALVES, rename_by_default=True),
        {"nvidia.com/gpu.shared": ["GPU-0::0", "GPU-0::1"]},
    ),
    "shares have the configured name": (
        node(gpu(0)), shared(replace(HALVES, rename="nvidia.com/s"), rename_by_default=True),
        {"nvidia.com/s": ["GPU-0::0", "GPU-0::1"]},
    ),
    **{
        f"what is not shared keeps its name: {names}": (
            TWO, halves(devices=names),
            {GPU: ["GPU-0"], "nvidia.com/gpu.shared": ["GPU-1::0", "GPU-1::1"]},
        )
        for names in (("1",), ("GPU-1", "GPU-7"))
    },
    "as many are shared as are wanted": (
        TWO, halves(rename="nvidia.com/s", count=1),
        {GPU: ["GPU-1"], "nvidia.com/s": ["GPU-0::0", "GPU-0::1"]},
    ),
    "as many are shared as are there": (
        TWO, halves(count=9), {GPU: ["GPU-0::0", "GPU-0::1", "GPU-1::0", "GPU-1::1"]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TOLD)
def test_what_the_kubelet_is_told_of_a_node(case: str) -> None:
    there, settings, expected = TOLD[case]
    assert ids(there, settings) == expected


@pytest.mark.parametrize("name", ["1:0", "MIG-1-0", "MIG-GPU-1/1/0"])
def test_mig_devices_are_shared_by_any_of_their_names(name: str) -> None:
    found = ids(CUT, shared(replace(THIRDS, devices=(name,)), mig_strategy=Mig.MIXED))
    assert found["nvidia.com/mig-3g.40gb"] == ["MIG-1-0::0", "MIG-1-0::1"]


def test_a_mig_device_is_known_with_its_gpu() -> None:
    (device,) = next(r for r in resources_of(CUT, MIXED) if "3g" in r.name).devices
    assert (device.index, device.gpu, device.minor) == ("1:0", "GPU-1", 1)


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


@pytest.mark.parametrize("settings", [SINGLE, MIXED])
def test_nothing_is_known_of_mig_devices_while_nvml_does_not_answer(settings: Settings) -> None:
    with pytest.raises(MigDevicesUnknown, match="it hangs"):
        resources_of(SILENT, settings)


# -- health ------------------------------------------------------------------------------------

DRAINED = node(gpu(0, mig=True), mig=(part(0, 0, drained="fan"), part(0, 1)))
NODELESS = Nodes({}, {"/dev/nvidia1": "no such file"}, frozenset())
UNCONTROLLED = Nodes({}, {"/dev/nvidiactl": "no such file"}, frozenset())


@pytest.mark.parametrize(
    ("there", "settings", "healthy"),
    [
        (node(gpu(0, drained="fan"), gpu(1)), Settings(), [False, True]),
        (DRAINED, MIXED, [False, True]),
        (replace(DRAINED, drained="570 comes"), MIXED, [False, False]),
        (node(gpu(0, lost="gone"), gpu(1)), SINGLE, [False, True]),
        (
            node(gpu(0, lost="gone"), gpu(1), gpu(2), nodes=NODELESS), Settings(),
            [False, False, True],
        ),
        (node(gpu(0, lost="gone"), gpu(1)), shared(HALVES), [False, False, True, True]),
        (node(gpu(0), gpu(1), nodes=UNCONTROLLED), Settings(), [False, False]),
        (
            node(gpu(0, mig=True), mig=(part(0, 0, caps=()), part(0, 1)), nodes=NODELESS), MIXED,
            [False, True],
        ),
    ],
    ids=[
        "drained", "a drained part", "a drained driver", "lost", "no node", "shares",
        "no control node", "a part without capabilities",
    ],
)  # fmt: skip
def test_what_is_lost_or_out_of_service_stays_and_is_unhealthy(
    there: Inventory, settings: Settings, healthy: list[bool]
) -> None:
    (resource,) = resources_of(there, settings)
    assert [device.is_healthy for device in resource.devices] == healthy


@pytest.mark.parametrize(
    ("of_gpu", "of_part", "expected"),
    [
        (HealthState.HEALTHY, HealthState.UNHEALTHY, HealthState.UNHEALTHY),
        (HealthState.UNHEALTHY, HealthState.HEALTHY, HealthState.UNHEALTHY),
        (HealthState.RECOVERING, HealthState.SUSPECT, HealthState.RECOVERING),
        (HealthState.SUSPECT, HealthState.HEALTHY, HealthState.SUSPECT),
    ],
)
def test_a_mig_device_is_as_healthy_as_the_worse_of_it_and_its_gpu(
    of_gpu: HealthState, of_part: HealthState, expected: HealthState
) -> None:
    health = {"GPU-0": Condition(of_gpu), "MIG-0-0": Condition(of_part)}
    (resource,) = resources_of(ONE, MIXED, health)
    assert resource.devices[0].state is expected


# -- sharing -----------------------------------------------------------------------------------


def test_a_share_is_of_its_device_and_its_resource_of_another() -> None:
    settings = shared(
        SharedResource(GPU, 3, "nvidia.com/slice"), fail_requests_greater_than_one=True
    )
    (resource,) = resources_of(node(gpu(0)), settings)
    assert {device.uuid for device in resource.devices} == {"GPU-0"}
    assert (resource.sharing, resource.replicas, resource.one_each) == (TIME_SLICING, 3, True)
    assert resource.original == GPU


def test_a_name_that_is_taken_is_refused() -> None:
    share = replace(HALVES, rename="nvidia.com/mig-1g.10gb")
    with raises(SettingsConflict, match=r"nvidia.com/mig-1g.10gb"):
        resources_of(CUT, shared(share, mig_strategy=Mig.MIXED))


def test_mps_is_for_whole_gpus_and_for_as_many_as_they_can_have() -> None:
    old, new = gpu(0, compute_capability="6.1"), gpu(0, compute_capability="7.0")
    many = shared(SharedResource(GPU, 17), kind=MPS)
    with raises(SharingUnsuitable, match=r"at most 16 replicas"):
        resources_of(node(old), many)
    assert len(ids(node(new), many)[GPU]) == 17
    assert len(ids(TWO, many)[GPU]) == 34
    with raises(SharingUnsuitable, match=r"MIG device 0:0"):
        resources_of(ONE, shared(many.sharing.resources[0], kind=MPS, mig_strategy=Mig.SINGLE))


LIGHT = SharedResource(GPU, 2, "nvidia.com/light", ("0",))
HEAVY = SharedResource(GPU, 3, "nvidia.com/heavy", ("1",))


def test_devices_of_one_resource_are_shared_differently() -> None:
    shares = {
        "nvidia.com/light": ["GPU-0::0", "GPU-0::1"],
        "nvidia.com/heavy": ["GPU-1::0", "GPU-1::1", "GPU-1::2"],
    }
    assert ids(TWO, shared(LIGHT, HEAVY)) == shares
    assert ids(node(gpu(0), gpu(1), gpu(2)), shared(LIGHT, HEAVY)) == {GPU: ["GPU-2"], **shares}
    assert ids(node(gpu(0)), shared(LIGHT, HEAVY)) == {
        "nvidia.com/light": shares["nvidia.com/light"]
    }
    with raises(SettingsConflict, match=r"two entries share device 0 \(GPU-0\)"):
        resources_of(TWO, shared(LIGHT, replace(HEAVY, devices=("GPU-0",))))


def test_devices_of_one_resource_have_replicas_of_their_own() -> None:
    models = {1: "NVIDIA H200", 2: "NVIDIA A100"}
    there = node(*(replace(gpu(n), model=models.get(n, "NVIDIA L4")) for n in range(4)))
    two, three = SharedResource(GPU, 2, "", ("2",)), SharedResource(GPU, 3, "", ("*H?00*",))
    both = ["GPU-1::0", "GPU-1::1", "GPU-1::2", "GPU-2::0", "GPU-2::1"]
    assert ids(there, shared(two, three)) == {GPU: ["GPU-0", "GPU-3"], f"{GPU}.shared": both}
    ends = SharedResource(GPU, 2, "", ("0", "*L4*"))
    (whole,) = resources_of(there, shared(two, three, ends))
    assert (whole.name, whole.replicas) == (GPU, 3)
    assert [each.id for each in whole.devices] == [
        "GPU-0::0", "GPU-0::1", *both, "GPU-3::0", "GPU-3::1",
    ]  # fmt: skip
    # Many nodes share a configuration, so a model that this one lacks is not a fault.
    assert unmatched(node(gpu(0)), shared(three)) == ()
    with raises(SettingsConflict, match="two entries share device 1"):
        resources_of(there, shared(three, replace(two, devices=("*",))))


def test_16384_shares_of_a_gpu_are_a_message_and_more_gpus_have_fewer() -> None:
    many = shared(replace(HALVES, replicas=16384))
    uuids = [f"{LONG[:-2]}{number:02}" for number in range(8)]
    there = [gpu(number, uuid=uuid) for number, uuid in enumerate(uuids)]
    (resource,) = resources_of(node(there[0]), many)
    assert len(resource.devices) == 16384
    assert _list_of(resource).ByteSize() < 4 << 20
    with raises(SharingUnsuitable, match=r"8 devices have 131072 shares .* at most \d+ replicas"):
        resources_of(node(*there), many)
    some = [SharedResource(GPU, 4096, "", (str(number),)) for number in range(8)]
    assert len(resources_of(node(*there), shared(*some))[0].devices) == 32768
    with raises(SharingUnsuitable, match="94208 shares"):
        resources_of(node(*there), shared(*some[:7], replace(some[7], replicas=65536)))


LONG = "GPU-b1028956-cfa2-0990-bf4a-5da9abb51763"


@pytest.mark.parametrize("count", [1, 2, 16])
def test_there_are_as_many_shares_as_one_message_to_a_kubelet_holds(count: int) -> None:
    uuids = [f"{LONG[:-2]}{number:02}" for number in range(count)]
    there = node(*(gpu(number, uuid=uuid) for number, uuid in enumerate(uuids)))
    with raises(SharingUnsuitable, match=r"Set at most \d+ replicas") as raised:
        resources_of(there, shared(replace(HALVES, replicas=1 << 16)))
    most = int(re.findall(r"Set at most (\d+) replicas", str(raised.value))[0])
    places = {each.bus_id: 7 for each in there.gpus}
    (resource,) = resources_of(there, shared(replace(HALVES, replicas=most)), None, places)
    message = _list_of(unhealthy((resource,))[0]).ByteSize()
    # The message is just below the size limit.
    assert 0.9 * (4 << 20) < message <= 4 << 20
    with raises(SharingUnsuitable):
        resources_of(there, shared(replace(HALVES, replicas=most + most // 20)))


def test_what_is_to_be_shared_and_is_not_there_is_said() -> None:
    settings = shared(
        replace(HALVES, devices=("0", "5")), SharedResource("nvidia.com/mig-1g.5gb", 2)
    )
    (line,) = unmatched(TWO, settings)
    assert "device 5" in line
    assert unmatched(TWO, halves(count=3))
    assert unmatched(TWO, halves()) == ()


def test_a_gpu_in_mig_mode_that_is_in_no_resource_is_said() -> None:
    (line,) = unannounced(node(gpu(0), gpu(1, mig=True), mig=(part(1, 0),)), Settings())
    assert line.startswith("GPU 1 is in MIG mode")
    assert "mixed or single" in line
    assert unannounced(CUT, MIXED) == ()
    (line,) = unannounced(node(gpu(0, mig=True), gpu(1)), MIXED)
    assert line.startswith("GPU 0 is in MIG mode without MIG devices")


def test_no_share_is_there_twice_on_the_largest_node() -> None:
    there = node(
        *(gpu(index, mig=True) for index in range(16)),
        mig=tuple(part(index, number) for index in range(16) for number in range(7)),
    )
    settings = shared(SharedResource("nvidia.com/mig-1g.10gb", 48), mig_strategy=Mig.MIXED)
    (resource,) = resources_of(there, settings)
    found = {device.id for device in resource.devices}
    assert len(found) == len(resource.devices) == 16 * 7 * 48
