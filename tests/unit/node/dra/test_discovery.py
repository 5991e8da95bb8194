"""Discovering a simulated node's devices for claims, with its NVML."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest

from hooks.config import load_config
from integration.node.options import Options
from integration.node.service import Context
from integration.node.services.dra.discovery import DeviceDiscovery
from integration.node.state.store import State
from integration.nvml.inventory import inventory_of
from integration.nvml.values import Fabric, GpuSample, Sample
from integration.simulated import Scenario, SimulatedNode
from tests.harness.node_state import publish
from tests.harness.pynvml_calls import needs

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from integration.node.services.dra.devices import Device

pytestmark = pytest.mark.anyio

SCENARIO: Final = {"gpus": 5, "model": "h100", "gpu": [{"index": 4, "mig": ["1g.10gb"]}]}


@pytest.fixture
def node(tmp_path: Path) -> Iterator[SimulatedNode]:
    with SimulatedNode.create(str(tmp_path / "node"), Scenario.parse(SCENARIO)) as node:
        yield node


def write(node: SimulatedNode, name: str, text: str) -> None:
    with open(f"{node.state}/{name}", "w", encoding="ascii") as file:
        file.write(text)


class Place:
    """A discovery, and its faults."""

    def __init__(self, node: SimulatedNode, *, dra_mig: bool = False) -> None:
        self.faults: dict[str, str] = {}
        self.state = State()
        self.config = load_config(node.config_path)
        options = Options("", 60, dra=True, dra_mig=dra_mig)
        context = Context(self.config, options, lambda *_, **__: None, self.state)
        self.looking = DeviceDiscovery(context, self.faults.__setitem__)

    async def look(self, **more: Any) -> dict[str, Device] | None:
        found = await self.looking.discover(inventory_of(self.config, fresh=True), {}, **more)
        return None if found is None else dict(found.devices)


def attribute(devices: dict[str, Device], name: str) -> list[Any]:
    """Return an attribute of each whole GPU, by index; None where it is missing."""
    whole = sorted(
        (each for each in devices.values() if each.uuid == each.gpu),
        key=lambda each: int(each.attributes["index"]["int"]),
    )
    return [next(iter(each.attributes.get(name, {"": None}).values())) for each in whole]


async def test_gpus_say_which_of_them_nvlinks_connect(node: SimulatedNode) -> None:
    write(node, "nvml-nvlinks", "0 1 4\n1 3 2\n")
    devices = await Place(node).look()
    assert devices is not None
    assert attribute(devices, "nvlinkPeers") == ["1", "0,3", None, "1"]
    assert attribute(devices, "nvlinkGroup") == [0, 0, None, 0], "by way of another, too"


@needs("nvmlDeviceGetAddressingMode")
async def test_gpus_say_how_they_see_the_hosts_memory(node: SimulatedNode) -> None:
    write(node, "nvml-facts", "0 addressing-mode 1\n1 addressing-mode 2\n")
    devices = await Place(node).look()
    assert devices is not None
    assert attribute(devices, "gpu.nvidia.com/addressingMode") == ["HMM", "ATS", None, None]
    assert attribute(devices, "gpu.nvidia.com/architecture") == ["Hopper"] * 4


async def test_gpus_say_their_fabric_and_what_a_reset_would_repair(node: SimulatedNode) -> None:
    place = Place(node)
    assert attribute(await place.look() or {}, "fabricClique") == [None] * 4
    uuids = [gpu.uuid for gpu in inventory_of(place.config).gpus]
    cluster = "0d7a1f52-7d4f-4d0c-b1de-0f1e2d3c4b5a"
    fabric = Fabric("completed", cluster, 5, "healthy")
    gpus = (
        GpuSample(uuids[0], fabric=fabric),
        GpuSample(uuids[1], fabric=Fabric("in-progress"), rows_pending=True),
        GpuSample(uuids[2], rows_pending=False, tpc_repair_pending=True),
        GpuSample(uuids[4], fabric=fabric),
    )
    publish(place.state.sample, Sample(1, gpus=gpus))
    devices = await place.look()
    assert devices is not None
    assert attribute(devices, "fabricClique") == [f"{cluster}.5", None, None, None]
    assert attribute(devices, "fabricClusterUUID") == [cluster, None, None, None]
    assert attribute(devices, "repairPending") == [None, True, True, None]
    of_parts = [each for each in devices.values() if each.uuid != each.gpu]
    assert not [each for each in of_parts if "fabricClique" in each.attributes]
    # While NVML does not answer, nothing changes.
    publish(place.state.sample, Sample(2, failure="it hangs"))
    assert await place.look() is None
    publish(place.state.sample, Sample(3, gpus=(GpuSample(uuids[1]),)))
    assert attribute(await place.look() or {}, "repairPending") == [None, None, True, None]


async def test_the_same_node_is_looked_at_once(node: SimulatedNode) -> None:
    place = Place(node)
    assert await place.look()
    assert await place.look() is None


async def test_without_nvmls_word_nothing_can_be_made_and_it_is_asked_again(
    node: SimulatedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(node, dra_mig=True)
    there = inventory_of(place.config, fresh=True)
    write(node, "nvml-faults", "nvmlDeviceGetCount=error:999")
    found = await place.looking.discover(there, {})
    assert found is not None
    assert not any(each.part for each in found.devices.values())
    assert "NVML does not report MIG" in place.faults["parts"]
    assert await place.looking.discover(there, {}) is None, "it is not asked each time"
    monkeypatch.setattr("integration.node.services.dra.discovery._RETRY_AFTER", -1.0)
    write(node, "nvml-faults", "")
    devices = await place.look()
    assert devices is not None
    # Those of four whole GPUs, and of the free part of a partitioned one.
    assert sum(each.part is not None for each in devices.values()) == 4 * 25 + 18


async def test_nvml_is_not_asked_while_it_is_let_go_of(node: SimulatedNode) -> None:
    place = Place(node, dra_mig=True)
    publish(place.state.nvml_pause, "a GPU is reset")
    devices = await place.look()
    assert devices is not None
    assert not any(each.part for each in devices.values())
    publish(place.state.nvml_pause, "")
    devices = await place.look()
    assert devices is not None
    assert any(each.part for each in devices.values())


async def test_a_gpu_that_nvml_leaves_out_is_asked_about_again(
    node: SimulatedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(node, dra_mig=True)
    there = inventory_of(place.config, fresh=True)
    write(node, "nvml-faults", "gpu4.nvmlDeviceGetGpuInstances=error:999")
    found = await place.looking.discover(there, {})
    assert found is not None
    last = there.gpus[4].uuid
    assert not [each for each in found.devices.values() if each.gpu == last]
    assert any(each.part for each in found.devices.values()), "of the others"
    assert last in place.faults["parts"]
    write(node, "nvml-faults", "")
    monkeypatch.setattr("integration.node.services.dra.discovery._RETRY_AFTER", -1.0)
    found = await place.looking.discover(there, {})
    assert found is not None
    assert [each for each in found.devices.values() if each.gpu == last]
    assert not place.faults["parts"]
