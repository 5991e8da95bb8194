"""The possible MIG devices of a GPU, and which exclude each other."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING, Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hooks.node.inventory import Inventory
from hooks.node.nvml import BRANDS
from hooks.words import Node
from integration.node.services.dra.devices import Device, GpuLocation, devices_of, publishable
from integration.node.services.dra.mig_layout import (
    Counters,
    Part,
    all_of,
    can_switch,
    parse_name,
    part_named,
    possible,
)
from integration.node.services.dra.slices import Counting, changes, contents
from integration.node.values.claims import parse_quantity, uuid_of
from integration.nvml.mig_parts import (
    GpuParts,
    Instance,
    Parts,
    Profile,
    overlaps,
    parse_parts,
)
from integration.simulated.catalogue import MODELS
from tests.harness.slice_rules import faults
from tests.unit.node.dra.test_slices import GPUS, NODE, OWNER, PARTS

if TYPE_CHECKING:
    from collections.abc import Iterable

GPU: Final = GPUS[2]
CUT_MODELS: Final = sorted(key for key, model in MODELS.items() if model.profiles)


def profiles_of(model: str) -> tuple[Profile, ...]:
    return tuple(
        Profile(
            each.id, each.name, each.instances,
            tuple((start, each.memory_slices) for start in each.starts),
            (each.memory, each.multiprocessors, each.copy_engines, each.decoders, 0, each.jpeg,
             each.ofa),
        )
        for each in MODELS[model].profiles
    )  # fmt: skip


def parts_of(model: str, *instances: Instance, made: Iterable[Part] = ()) -> dict[Part, Counters]:
    cut = GpuParts(profiles_of(model), instances)
    return {part: counters for part, _, counters in possible(GPU, 3, cut, made)}


def at(parts: Iterable[Part], shape: str, start: int) -> Part:
    return next(each for each in parts if (each.shape, each.start) == (shape, start))


def fits(counters: Iterable[Counters]) -> bool:
    """Return whether the counters let the scheduler allocate devices together."""
    used: dict[str, int] = {}
    left: dict[str, str] = {}
    for each in counters:
        left = dict(each.left)
        for name, value in each.takes.items():
            used[name] = used.get(name, 0) + (parse_quantity(value) or 0)
    return all(value <= (parse_quantity(left[name]) or 0) for name, value in used.items())


def test_a_part_says_where_it_is_by_its_name() -> None:
    parts = parts_of("h100")
    assert len(parts) == 7 + 7 + 4 + 3 + 2 + 1 + 1
    assert at(parts, "3g.40gb", 4).name == f"{GPU.lower()}-mig-3g40gb-9-4"
    assert at(parts, "1g.10gb+me", 6).name == f"{GPU.lower()}-mig-1g10gb-me-20-6"
    for model in CUT_MODELS:
        for part in parts_of(model):
            assert len(part.name) <= 63
            assert re.fullmatch("[a-z0-9]([-a-z0-9]*[a-z0-9])?", part.name)
            assert parse_name(part.name) == replace(part, size=0, shape="", gpu=part.gpu)
            assert uuid_of(part.name) == part.name
    long = Part(GPU, 131, 10, 1, "1g.24gb+me.all+gfx")
    assert long.name == f"{GPU.lower()}-mig-131-10"
    assert parse_name(long.name) == Part(GPU, 131, 10, 0)
    for other in (GPU.lower(), PARTS[0].lower(), "gpu-mig-1-0", ""):
        assert parse_name(other) is None


def test_a_part_takes_from_the_counters_of_its_gpu() -> None:
    parts = parts_of("h100")
    counters = parts[at(parts, "1g.20gb", 2)]
    assert counters.of == "gpu-3-counter-set"
    assert counters.takes == {
        "memory": "20096Mi", "multiprocessors": "26", "copy-engines": "1", "decoders": "1",
        "jpeg-engines": "1", "memory-slice-2": "1", "memory-slice-3": "1",
    }  # fmt: skip
    assert counters.left == {
        "memory": "79Gi", "multiprocessors": "132", "copy-engines": "8", "decoders": "7",
        "jpeg-engines": "7", "ofa-engines": "1", **{f"memory-slice-{n}": "1" for n in range(8)},
    }  # fmt: skip


@pytest.mark.parametrize("model", CUT_MODELS)
def test_what_a_gpu_can_be_at_once_has_room(model: str) -> None:
    parts = parts_of(model)
    small, _, double, two, three, four, whole = MODELS[model].profiles
    for layout in (
        [(small, n) for n in range(7)],
        [(double, n) for n in (0, 2, 4, 6)],
        [(two, 0), (two, 2), (two, 4), (small, 6)],
        [(three, 0), (three, 4)],
        [(four, 0), (three, 4)],
        [(four, 0), (double, 4), (double, 6)],
        [(whole, 0)],
    ):
        chosen = [at(parts, profile.name, start) for profile, start in layout]
        assert fits(parts[each] for each in chosen), layout
        assert not any(overlaps(*pair) for pair in combinations(chosen, 2))


@given(model=st.sampled_from(CUT_MODELS), data=st.data())
def test_what_overlaps_excludes_each_other(model: str, data: st.DataObject) -> None:
    parts = parts_of(model)
    one, other = data.draw(st.permutations(sorted(parts, key=lambda each: each.name)))[:2]
    if overlaps(one, other):
        assert not fits([parts[one], parts[other]])
    media = [each for each in (one, other) if each.shape.endswith("+me")]
    assert len(media) < 2 or not fits([parts[one], parts[other]])


def test_an_instance_that_is_there_stays() -> None:
    parts = parts_of("h100", Instance(7, 20, 3, 1))
    there = Part(GPU, 20, 3, 1)
    assert parts
    assert not any(overlaps(there, each) for each in parts)
    assert not any(each.shape in {"1g.10gb+me", "7g.80gb"} for each in parts), "its engine is taken"
    assert {each.left["ofa-engines"] for each in parts.values() if "ofa-engines" in each.left} == (
        set()
    )
    assert {each.left["multiprocessors"] for each in parts.values()} == {"116"}


def test_what_is_made_for_a_claim_changes_nothing_that_is_published() -> None:
    before = parts_of("h100")
    part = at(before, "3g.40gb", 4)
    assert parts_of("h100", Instance(2, 9, 4, 4), made=[part]) == before


@pytest.mark.parametrize("model", CUT_MODELS)
def test_a_whole_gpu_excludes_all_its_parts(model: str) -> None:
    cut = GpuParts(profiles_of(model), mode=False)
    whole = all_of(3, cut)
    assert fits([whole])
    for counters in parts_of(model).values():
        assert (counters.of, counters.left) == (whole.of, whole.left)
        assert not fits([whole, counters])


def test_the_mode_of_hopper_and_newer_is_switched_without_a_reset() -> None:
    cut = GpuParts(profiles_of("h100"), mode=False)
    assert [can_switch(each, cut) for each in ("8.0", "9.0", "10.0", "")] == [
        False, True, True, False,
    ]  # fmt: skip
    assert not can_switch("9.0", GpuParts(mode=False))


def test_a_gpu_is_whole_or_cut_whatever_its_mode_is() -> None:
    def named(*instances: Instance, mode: bool, **more: Any) -> tuple[int, int]:
        node, parts = node_of(*instances)
        gpu = replace(node.gpus[2], mig=mode)
        node = replace(node, gpus=(gpu,), mig_devices=())
        cut = replace(parts.gpus[GPU], mode=mode)
        found = devices_of(node, None, replace(parts, gpus={GPU: cut}), on_demand=True, **more)
        counted = sum(each.counters is not None for each in found)
        return sum(each.uuid == GPU for each in found), counted

    ours, theirs = Instance(1, 19, 0, 1), Instance(2, 19, 1, 1)
    made = {Part(GPU, 19, 0, 1, "1g.10gb"): "MIG-made"}
    assert named(mode=False, switches=True) == (1, 1 + 25)
    assert named(mode=False) == (1, 0)
    assert named(ours, mode=True, made=made, switches=True, switched={GPU}) == (1, 1 + 25)
    # The record of the switch counts until it is deleted, also without dynamic MIG mode.
    assert named(mode=False, switched={GPU}) == (1, 1 + 25)
    # An admin has set the mode, or created another instance.
    assert named(mode=True, switches=True) == (0, 25)
    assert named(ours, theirs, mode=True, made=made, switches=True, switched={GPU})[0] == 0


# -- as devices --------------------------------------------------------------------------------


def node_of(*instances: Instance, model: str = "h100", gpus: int = 1) -> tuple[Inventory, Parts]:
    cut = GpuParts(profiles_of(model), instances)
    figures = profiles_of(model)[0].figures
    every = [NODE.gpus[2]] + [
        replace(NODE.gpus[2], index=n, uuid=f"GPU-{n:08}-0000-4000-8000-00000000000c", minor=n + 4)
        for n in range(3, gpus + 2)
    ]
    parts = Parts(
        {gpu.uuid: cut for gpu in every},
        {GPU: "HMM"},
        dict.fromkeys(PARTS, figures),
        {uuid: (GPU, n + 1) for n, uuid in enumerate(PARTS)},
    )
    usable = {f"/dev/nvidia{gpu.minor}": Node("", 195, gpu.minor, 0o666, 0, 0, "") for gpu in every}
    nodes = replace(NODE.nodes, usable={**NODE.nodes.usable, **usable})
    return replace(NODE, gpus=(*NODE.gpus[:2], *every), nodes=nodes), parts


THERE: Final = (Instance(1, 19, 0, 1), Instance(2, 19, 1, 1))


def test_mig_devices_have_nvidias_capacities() -> None:
    node, parts = node_of(*THERE)
    found = {each.name: each for each in devices_of(node, parts=parts)}
    assert found[PARTS[1].lower()].capacity == {
        "gpu.nvidia.com/memory": "9984Mi", "gpu.nvidia.com/multiprocessors": "16",
        "gpu.nvidia.com/copyEngines": "1", "gpu.nvidia.com/decoders": "1",
        "gpu.nvidia.com/encoders": "0", "gpu.nvidia.com/jpegEngines": "1",
        "gpu.nvidia.com/ofaEngines": "0", "gpu.nvidia.com/memorySlice1": "1",
    }  # fmt: skip
    assert found[PARTS[0].lower()].attributes["gpu.nvidia.com/addressingMode"] == {"string": "HMM"}
    assert not any(each.part for each in found.values()), "none is made unless that is wanted"


# What NVIDIA's driver publishes, except for GPUs that are passed to virtual machines. A MIG device
# has the attributes of its GPU, and some of its own. Attributes without a domain have the standard
# one.
OF_BOTH: Final = {
    "gpu.nvidia.com/type": "string", "gpu.nvidia.com/productName": "string",
    "gpu.nvidia.com/brand": "string", "gpu.nvidia.com/architecture": "string",
    "gpu.nvidia.com/cudaComputeCapability": "version", "gpu.nvidia.com/driverVersion": "version",
    "gpu.nvidia.com/cudaDriverVersion": "version", "gpu.nvidia.com/addressingMode": "string",
    "resource.kubernetes.io/pciBusID": "string", "resource.kubernetes.io/pcieRoot": "string",
    "resource.kubernetes.io/numaNode": "int",
}  # fmt: skip
UUID: Final = {"gpu.nvidia.com/uuid": "string"}
OF_MIG: Final = {"gpu.nvidia.com/parentUUID": "string", "gpu.nvidia.com/profile": "string"}
OUR_OWN: Final = {"index": "int", "minor": "int", "health": "string"}
MIG_CAPACITY: Final = {
    f"gpu.nvidia.com/{name}"
    for name in ("memory", "multiprocessors", "copyEngines", "decoders", "encoders", "jpegEngines",
                 "ofaEngines")
}  # fmt: skip


def test_all_that_nvidias_driver_tells_has_its_names_and_types() -> None:
    node, parts = node_of(*THERE)
    addressing = {gpu.uuid: "ATS" for gpu in node.gpus}
    places = {gpu.bus_id: GpuLocation(0, "pci0000:00", (1,), 0) for gpu in node.gpus}
    found = publishable(
        devices_of(node, places, replace(parts, addressing=addressing), on_demand=True), {}
    )
    for device in found:
        kinds = {name: next(iter(value)) for name, value in device.attributes.items()}
        capacity = set(device.capacity)
        slices = {name for name in capacity if re.search(r"/memorySlice[0-7]$", name)}
        if device.uuid == device.gpu:
            assert kinds == OF_BOTH | UUID | OUR_OWN | {
                "nvlinkPeers": "string", "nvlinkGroup": "int",
            }  # fmt: skip
            assert capacity == {"gpu.nvidia.com/memory"}
        elif device.part is None:
            assert kinds == OF_BOTH | UUID | OF_MIG | OUR_OWN
            assert (capacity - slices, len(slices)) == (MIG_CAPACITY, 1)
        else:  # it has no UUID, and NVIDIA's driver gives its placement only in the name
            assert kinds == OF_BOTH | OF_MIG | OUR_OWN
            assert capacity == MIG_CAPACITY
    kinds_of_devices = {(each.uuid == each.gpu, each.part is None) for each in found}
    assert kinds_of_devices == {(True, True), (False, True), (False, False)}


def test_brands_and_architectures_are_nvidias_words() -> None:
    def told(**facts: Any) -> dict[str, Any]:
        gpu = replace(NODE.gpus[0], **facts)
        (device,) = devices_of(replace(NODE, gpus=(gpu,), mig_devices=()))
        return {name.rpartition("/")[2]: value for name, value in device.attributes.items()}

    brands = [told(brand=brand)["brand"]["string"] for brand in BRANDS]
    assert brands == [
        "Unknown", "Quadro", "Tesla", "NVS", "Grid", "GeForce", "Titan", "NvidiaVApps",
        "NvidiaVPC", "NvidiaVCS", "NvidiaVWS", "NvidiaCloudGaming", "QuadroRTX", "NvidiaRTX",
        "Nvidia", "GeForceRTX", "TitanRTX",
    ]  # fmt: skip
    assert told(architecture="Rubin")["architecture"] == {"string": "Rubin"}
    # Not derived from the compute capability: 10.7 is not Blackwell.
    assert "architecture" not in told(architecture="", compute_capability="10.7")


def test_no_device_has_more_than_the_api_takes() -> None:
    whole = Instance(1, 0, 0, 8)
    node, parts = node_of(whole)
    (device,) = (
        each for each in devices_of(replace(node, mig_devices=NODE.mig_devices[:1]), parts=parts)
        if each.uuid == PARTS[0]
    )  # fmt: skip
    assert len(device.attributes) + len(device.capacity) + 1 <= 32


def test_what_could_be_made_is_published_beside_what_is_there() -> None:
    node, parts = node_of(*THERE)
    found = {each.name: each for each in devices_of(node, parts=parts, on_demand=True)}
    assert {PARTS[0].lower(), PARTS[1].lower()} < found.keys()
    made = [each for each in found.values() if each.part is not None]
    assert made
    assert all(each.part and each.part.start >= 2 for each in made)
    (one,) = (each for each in made if each.part and each.part.name.endswith("-9-4"))
    assert one.attributes["gpu.nvidia.com/profile"] == {"string": "3g.40gb"}
    assert one.attributes["gpu.nvidia.com/parentUUID"] == {"string": GPU}
    assert "gpu.nvidia.com/uuid" not in one.attributes
    assert one.capacity["gpu.nvidia.com/multiprocessors"] == "60"


def test_a_device_that_is_made_for_a_claim_can_be_out_of_service() -> None:
    node, parts = node_of(*THERE)
    made = {Part(GPU, 19, 1, 1, "1g.10gb"): PARTS[1]}
    drained = tuple(
        replace(mig, drained="since today" if mig.uuid == PARTS[1] else "")
        for mig in node.mig_devices
    )
    node = replace(node, mig_devices=drained)
    found = devices_of(node, None, parts, made, on_demand=True)
    assert {each.uuid for each in found if each.drained} == {PARTS[1]}
    tainted = [each for each in publishable(found, {}, (), "a", "NoSchedule") if each.taints]
    assert [each.taints[0].key for each in tainted] == ["a/out-of-service"]


def test_a_device_that_is_made_for_a_claim_is_told_of_once() -> None:
    node, parts = node_of(*THERE)
    part = Part(GPU, 19, 1, 1, "1g.10gb")
    for uuid in ("", PARTS[1]):  # NVML reports it before we know it
        made = {part: uuid}
        found = {each.name: each for each in devices_of(node, None, parts, made, on_demand=True)}
        assert PARTS[1].lower() not in found
        assert found[part.name].uuid == (uuid or part.name)
    # The inventory has it, but NVML was not queried yet.
    old = replace(parts, figures={}, instance_of={})
    assert not {each.uuid for each in devices_of(node, None, old, on_demand=True)} & {*PARTS}
    # An agent without dynamic MIG still has the devices of its claims.
    kept = [each for each in devices_of(node, None, parts, {part: PARTS[1]}) if each.part]
    assert [each.uuid for each in kept] == [PARTS[1]]


def test_what_could_be_made_of_a_gpu_that_is_not_well_is_not_published() -> None:
    node, parts = node_of()
    lost = (*node.gpus[:2], replace(node.gpus[2], lost="it fell off the bus"))
    out = (*node.gpus[:2], replace(node.gpus[2], drained="since noon"))
    for gpus in (lost, out):
        found = devices_of(replace(node, gpus=gpus), parts=parts, on_demand=True)
        assert not any(each.part for each in publishable(found, {}))
    found = devices_of(node, parts=parts, on_demand=True)
    assert not any(each.part for each in publishable(found, {}, {GPU}))


# -- as slices ---------------------------------------------------------------------------------


def published(gpus: int) -> list[Device]:
    node, parts = node_of(gpus=gpus)
    return list(publishable(devices_of(node, None, parts, on_demand=True), {}))


@pytest.mark.parametrize("gpus", [1, 3, 8, 17])
def test_a_server_takes_counters_in_slices_of_their_own(gpus: int) -> None:
    every = published(gpus)
    due = changes((), contents(every, "v1", Counting.APART), OWNER)
    bodies = [each.body["spec"] for each in due if each.method == "POST"]
    assert [faults(body) for body in bodies] == [[] for _ in bodies]
    sets = [each["name"] for body in bodies for each in body.get("sharedCounters", ())]
    devices = [each for body in bodies for each in body.get("devices", ())]
    assert len(devices) == len(every)
    consumed = {each["counterSet"] for one in devices for each in one.get("consumesCounters", ())}
    assert consumed == set(sets)
    is_set = ["sharedCounters" in body for body in bodies]
    assert is_set == sorted(is_set, reverse=True), "they are written first"


def test_an_older_server_has_counters_beside_the_devices() -> None:
    lists = contents(published(3), "v1", Counting.BESIDE)
    for content in lists:
        sets = {each["name"] for each in content.get("sharedCounters", ())}
        assert len(content["devices"]) <= 64
        assert len(sets) <= 1
        for device in content["devices"]:
            assert {each["counterSet"] for each in device.get("consumesCounters", ())} == sets


def test_a_server_without_counters_is_told_of_what_is_there_alone() -> None:
    either = replace(published(1)[0], counters=all_of(3, GpuParts(profiles_of("h100"))))
    for devices in (published(3), [either, *published(3)[1:]]):
        (content,) = contents(devices, "v1")
        assert content.keys() == {"devices"}
        assert {each["name"] for each in content["devices"]} == {each.lower() for each in GPUS[:2]}
        assert not any("consumesCounters" in each for each in content["devices"])


# -- NVML --------------------------------------------------------------------------------------


HAS: Final = [1, 2, 3, 4, 5, 6, 7]
TOLD: Final[dict[str, Any]] = {
    "uuid": GPU.upper(), "addressing": 2, "mode": True, "pending": True,
    "instances": [[7, 19, 0, 1]],
    "profiles": [{"id": 19, "name": "1g.10gb", "most": 7, "places": [[0, 1]], "figures": HAS}],
    "devices": [{"uuid": PARTS[0].lower(), "instance": 7, "slices": 1, "figures": HAS}],
}  # fmt: skip


def answer(**change: Any) -> bytes:
    return json.dumps({"gpus": [{**TOLD, **change}]}).encode()


def test_nvmls_answer_is_understood() -> None:
    parts = parse_parts(answer())
    assert parts.addressing == {GPU: "ATS"}
    assert parts.instance(PARTS[0]) == Instance(7, 19, 0, 1)
    assert parts.device_at(Part(GPU, 19, 0, 1)) == PARTS[0]
    assert parts.device_at(Part(GPU, 19, 1, 1)) == ""
    assert part_named(parts, f"{GPU.lower()}-mig-1g10gb-19-0") == Part(GPU, 19, 0, 1, "1g.10gb")
    assert part_named(parts, f"{GPU.lower()}-mig-1g10gb-19-1") is None
    assert parse_parts(answer(addressing=9)).addressing == {}
    # Each GPU counts its instances for itself.
    other = {**TOLD, "uuid": GPUS[1], "devices": [{**TOLD["devices"][0], "uuid": PARTS[1]}]}
    both = parse_parts(json.dumps({"gpus": [other, TOLD]}).encode())
    assert both.device_at(Part(GPU, 19, 0, 1)) == PARTS[0]
    assert both.device_at(Part(GPUS[1], 19, 0, 1)) == PARTS[1]


@pytest.mark.parametrize(
    "told",
    [
        None, b"", b"nonsense", b"[]", b'{"error": "it is gone"}', b'{"gpus": 1}',
        answer(uuid=None, instances=[[1]]), answer(profiles=[{}]), answer(devices=[{"uuid": "x"}]),
        answer(instances=[[7, 19, -1, 1]]), b"1" * (1 << 21),
        answer(profiles=[{**TOLD["profiles"][0], "figures": [1]}]),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_no_answer(told: bytes | None) -> None:
    parts = parse_parts(told)
    assert parts.failure
    assert not parts.gpus
