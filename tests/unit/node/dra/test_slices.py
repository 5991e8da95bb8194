"""The slices of a node, and the writes that publish them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hooks.node.gpus import Gpu, MigDevice, Nodes
from hooks.node.inventory import Inventory
from hooks.words import Node
from integration.node.device_health.device_state import Condition
from integration.node.options import DRA_DRIVER
from integration.node.services.dra.devices import (
    Device,
    GpuLocation,
    devices_of,
    publishable,
    semantic_version,
)
from integration.node.services.dra.slices import (
    MOST_DEVICES,
    Counting,
    Owner,
    changes,
    content_of,
    contents,
    key_of,
)
from integration.node.values.health import HealthState
from tests.harness.recorded import recorded_lines
from tests.harness.slice_rules import faults

if TYPE_CHECKING:
    from collections.abc import Iterable

    from integration.node.services.dra.slices import Write

GPUS: Final = tuple(f"GPU-{n}0000000-0000-4000-8000-00000000000a" for n in range(3))
PARTS: Final = tuple(f"MIG-{n}0000000-0000-4000-8000-00000000000b" for n in range(2))
OWNER: Final = Owner(DRA_DRIVER, "node-1", "uid of node-1")
USABLE: Final = {f"/dev/nvidia{n}": Node("", 195, n, 0o666, 0, 0, "") for n in (4, 5, 6)}
NODE: Final = Inventory(
    driver=cast("Any", SimpleNamespace(version="580.65.06")),
    gpus=tuple(
        Gpu(
            n, n + 4, uuid, f"0000:0{n}:00.0", "NVIDIA H100", mig=n == 2, memory=80 << 30,
            compute_capability="9.0", brand="nvidia", architecture="Hopper",
        )
        for n, uuid in enumerate(GPUS)
    ),
    mig_devices=tuple(MigDevice(2, n, uuid, n + 1, 0, "1g.10gb") for n, uuid in enumerate(PARTS)),
    nodes=Nodes(USABLE, {}, frozenset()),
    sockets={},
    cuda_version="13.0",
)  # fmt: skip
DEVICES: Final = devices_of(NODE, {"0000:01:00.0": GpuLocation(1, "pci0000:00")})


def named(*uuids: str) -> set[str]:
    return {uuid.lower() for uuid in uuids}


def test_gpus_and_mig_devices_have_nvidias_attributes_and_our_own() -> None:
    by_name = {each.name: each for each in DEVICES}
    assert set(by_name) == named(GPUS[0], GPUS[1], *PARTS)
    gpu, part = by_name[GPUS[1].lower()], by_name[PARTS[0].lower()]
    assert gpu.attributes == {
        "gpu.nvidia.com/type": {"string": "gpu"},
        "gpu.nvidia.com/uuid": {"string": GPUS[1]},
        "gpu.nvidia.com/productName": {"string": "NVIDIA H100"},
        "gpu.nvidia.com/brand": {"string": "Nvidia"},
        "gpu.nvidia.com/architecture": {"string": "Hopper"},
        "gpu.nvidia.com/cudaComputeCapability": {"version": "9.0.0"},
        "gpu.nvidia.com/cudaDriverVersion": {"version": "13.0.0"},
        "gpu.nvidia.com/driverVersion": {"version": "580.65.6"},
        "resource.kubernetes.io/pciBusID": {"string": "0000:01:00.0"},
        "resource.kubernetes.io/pcieRoot": {"string": "pci0000:00"},
        "resource.kubernetes.io/numaNode": {"int": 1},
        "index": {"int": 1},
        "minor": {"int": 5},
    }
    assert gpu.capacity == {"gpu.nvidia.com/memory": "80Gi"}
    own = {"type": "mig", "uuid": PARTS[0], "parentUUID": GPUS[2], "profile": "1g.10gb"}
    for name, value in own.items():
        assert part.attributes[f"gpu.nvidia.com/{name}"] == {"string": value}
    assert part.attributes["index"] == {"int": 2}


def test_what_is_not_known_is_no_attribute() -> None:
    bare = tuple(Gpu(0, 0, GPUS[0], "0000:00:00.0", "H100") for _ in range(1))
    driver = cast("Any", SimpleNamespace(version="a test"))
    (device,) = devices_of(replace(NODE, driver=driver, gpus=bare, mig_devices=(), cuda_version=""))
    assert {name.rpartition("/")[2] for name in device.attributes} == {
        "type", "uuid", "productName", "pciBusID", "index", "minor",
    }  # fmt: skip
    assert device.capacity == {}


@pytest.mark.parametrize(
    ("change", "left"),
    [
        ({"excluded": True}, named(GPUS[1], *PARTS)),
        ({"uuid": ""}, named(GPUS[1], *PARTS)),
        ({"uuid": GPUS[1]}, named(*PARTS)),  # two with the same name
        ({"lost": "it fell off the bus"}, named(GPUS[1], *PARTS)),
        ({"drained": "since noon"}, named(GPUS[1], *PARTS)),
        ({"minor": 9}, named(GPUS[1], *PARTS)),  # it has no device node
    ],
)
def test_what_cannot_be_given_is_not_published(change: dict[str, Any], left: set[str]) -> None:
    gpus = (replace(NODE.gpus[0], **change), *NODE.gpus[1:])
    devices = devices_of(replace(NODE, gpus=gpus))
    assert {each.name for each in publishable(devices, {})} == left
    assert {each.name for each in devices if each.can_be_given} == left


def test_what_is_out_of_service_is_not_published() -> None:
    one = tuple(replace(each, drained="since noon") for each in NODE.mig_devices[:1])
    node = replace(NODE, mig_devices=(*one, *NODE.mig_devices[1:]))
    assert {each.name for each in publishable(devices_of(node), {})} == named(*GPUS[:2], PARTS[1])
    assert publishable(devices_of(replace(NODE, drained="since noon")), {}) == ()


def test_an_unhealthy_gpu_and_its_parts_are_not_published_and_come_back() -> None:
    def published(state: HealthState, uuid: str) -> dict[str, str]:
        found = publishable(DEVICES, {uuid: Condition(state)})
        return {each.name: str(each.attributes["health"]["string"]) for each in found}

    assert published(HealthState.UNHEALTHY, GPUS[0]).keys() == named(GPUS[1], *PARTS)
    assert published(HealthState.RECOVERING, GPUS[2]).keys() == named(*GPUS[:2])
    assert published(HealthState.UNHEALTHY, PARTS[0]).keys() == named(*GPUS[:2], PARTS[1])
    suspect = published(HealthState.SUSPECT, GPUS[2])
    assert [suspect[each.lower()] for each in PARTS] == ["suspect", "suspect"]
    assert suspect[GPUS[0].lower()] == "healthy"


def test_what_a_device_plugin_gave_is_not_published() -> None:
    assert {each.name for each in publishable(DEVICES, {}, {GPUS[0]})} == named(GPUS[1], *PARTS)
    # A GPU in MIG mode, which migStrategy none publishes as a whole GPU.
    assert {each.name for each in publishable(DEVICES, {}, {GPUS[2]})} == named(*GPUS[:2])
    assert {each.name for each in publishable(DEVICES, {}, {PARTS[1]})} == named(
        *GPUS[:2], PARTS[0]
    )


@pytest.mark.parametrize(
    ("text", "version"),
    [("580.65.06", "580.65.6"), ("12.4", "12.4.0"), ("9", "9.0.0"), ("", ""), ("1.2.3.4", ""),
     ("1.x", ""), ("-1.0", "")],
)  # fmt: skip
def test_versions_are_semantic_ones(text: str, version: str) -> None:
    assert semantic_version(text) == version


# -- limits of a server ------------------------------------------------------------------------


@pytest.mark.parametrize("each", recorded_lines("dra/slices.jsonl"), ids=lambda each: each["case"])
def test_the_rules_of_the_tests_are_those_of_a_real_server(each: dict[str, Any]) -> None:
    assert bool(faults(each["sent"])) == (each["status"] == 422), each.get("message")


def many(count: int) -> list[Device]:
    return [replace(DEVICES[0], name=f"gpu-{n:04}") for n in range(count)]


def bodies(due: Iterable[Write]) -> list[dict[str, Any]]:
    return [each.body for each in due if each.method != "DELETE"]


@example(count=2 * MOST_DEVICES + 1, model="H100", version="580", driver=DRA_DRIVER, memory=1 << 36)
@given(
    count=st.integers(0, 3),
    model=st.text(max_size=100),
    version=st.text(max_size=20),
    driver=st.sampled_from([DRA_DRIVER, "gpu.nvidia.com"]),
    memory=st.one_of(st.none(), st.integers(0, 1 << 44)),
)
def test_whatever_a_node_has_a_server_takes_its_slices(
    count: int, model: str, version: str, driver: str, memory: int | None
) -> None:
    node = replace(
        NODE,
        driver=cast("Any", SimpleNamespace(version=version)),
        gpus=tuple(replace(gpu, model=model, memory=memory) for gpu in NODE.gpus),
    )
    found = publishable(devices_of(node, {"0000:00:00.0": GpuLocation(0, "pci0000:00")}), {})
    every = [replace(found[n % len(found)], name=f"{found[0].name[:50]}-{n}") for n in range(count)]
    made = bodies(changes((), contents(every, "v1"), replace(OWNER, driver=driver)))
    assert all(not faults(body["spec"]) for body in made)
    assert sum(len(body["spec"].get("devices", [])) for body in made) == count
    assert {body["spec"]["pool"]["resourceSliceCount"] for body in made} == {len(made)}


def test_an_older_api_has_attributes_below_basic() -> None:
    ((first, *_),) = (each["devices"] for each in contents(DEVICES, "v1beta1"))
    assert set(first) == {"name", "basic"}
    assert set(first["basic"]) == {"attributes", "capacity"}
    (made,) = bodies(changes((), [{"devices": [first]}], replace(OWNER, version="v1beta1")))
    assert made["apiVersion"] == "resource.k8s.io/v1beta1"


# -- writes ------------------------------------------------------------------------------------


class Server:
    """Applies the writes to slices."""

    def __init__(self) -> None:
        self.slices: dict[str, dict[str, Any]] = {}
        self.made = 0

    def make(
        self, devices: list[Device], counting: Counting = Counting.NONE, **more: Any
    ) -> list[Write]:
        """Publish devices; return the necessary writes."""
        due = changes(self.slices.values(), contents(devices, "v1", counting), OWNER, **more)
        for each in due:
            if each.method == "DELETE":
                gone = self.slices.pop(each.name)
                seen = {key: gone["metadata"][key] for key in ("uid", "resourceVersion")}
                assert each.body["preconditions"] == seen
                continue
            self.made += 1
            metadata = dict(each.body["metadata"])
            if each.method == "POST":
                metadata["name"] = f"{metadata.pop('generateName')}{self.made:05}"
                metadata["uid"] = f"uid-{self.made}"
            else:
                seen = self.slices[each.name]["metadata"]
                assert metadata["resourceVersion"] == seen["resourceVersion"]
            metadata["resourceVersion"] = str(self.made)
            self.slices[metadata["name"]] = {**each.body, "metadata": metadata}
        return due

    @property
    def generations(self) -> set[int]:
        return {each["spec"]["pool"]["generation"] for each in self.slices.values()}


def test_nothing_is_written_when_nothing_has_changed() -> None:
    server = Server()
    (made,) = bodies(server.make(many(3)))
    assert made["spec"]["pool"] == {"name": "node-1", "generation": 1, "resourceSliceCount": 1}
    assert made["spec"]["nodeName"] == "node-1"
    (owner,) = made["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"], owner["controller"]) == ("Node", "uid of node-1", True)
    assert server.make(many(3)) == []
    assert server.make(list(reversed(many(3)))) == []


def test_each_change_writes_the_whole_pool_with_the_next_generation() -> None:
    server = Server()
    server.make(many(MOST_DEVICES + 1))
    assert len(server.slices) == 2
    due = server.make(many(MOST_DEVICES + 2))
    assert [each.method for each in due] == ["PUT", "PUT"]
    assert server.generations == {2}
    due = server.make(many(5))  # now one slice is enough
    assert sorted(each.method for each in due) == ["DELETE", "PUT"]
    assert server.generations == {3}
    due = server.make([])
    assert [each.method for each in due] == ["PUT"]
    ((only,),) = [server.slices.values()]
    assert "devices" not in only["spec"]
    assert server.make([]) == []


def test_a_slice_that_somebody_deletes_is_made_again() -> None:
    server = Server()
    server.make(many(MOST_DEVICES + 1))
    del server.slices[min(server.slices)]
    due = server.make(many(MOST_DEVICES + 1))
    assert sorted(each.method for each in due) == ["POST", "PUT"]
    assert server.generations == {2}
    server.slices.clear()
    assert [each.method for each in server.make(many(1))] == ["POST"]


def test_a_write_that_failed_half_way_is_made_good() -> None:
    server = Server()
    server.make(many(MOST_DEVICES + 1))
    half = next(iter(server.slices.values()))
    half["spec"]["pool"] = {**half["spec"]["pool"], "generation": 7}
    server.make(many(MOST_DEVICES + 1))
    assert server.generations == {8}
    assert server.make(many(MOST_DEVICES + 1)) == []


def test_slices_of_another_pool_or_owner_are_put_right() -> None:
    server = Server()
    server.make(many(1))
    (name,) = server.slices
    old = {**server.slices[name], "metadata": {**server.slices[name]["metadata"], "name": "old"}}
    old["spec"] = {**old["spec"], "pool": {**old["spec"]["pool"], "name": "node-0"}}
    server.slices["old"] = old
    assert [each.method for each in server.make(many(1))] == ["DELETE"]
    server.slices[name]["metadata"]["ownerReferences"] = []
    assert [each.method for each in server.make(many(1))] == ["PUT"]
    assert server.make(many(1)) == []


def test_what_a_server_does_not_keep_is_not_written_for_ever() -> None:
    server = Server()
    server.make(many(1))
    (only,) = server.slices.values()
    sent = content_of(only["spec"])
    has = {"devices": [{"name": sent["devices"][0]["name"]}]}
    only["spec"] |= has
    assert server.make(many(1), kept={key_of(sent): has}) == []
    assert server.make(many(1)) != []
