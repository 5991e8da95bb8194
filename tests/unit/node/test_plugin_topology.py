from __future__ import annotations

import json
import os
import threading
from typing import TYPE_CHECKING, Any

import pytest

from hooks.config import Config, load_config
from hooks.node.gpus import Gpu
from integration.node.services.plugin.preferred import preferred
from integration.node.services.plugin.resources import resources_of
from integration.node.values.resources import Settings
from integration.nvml.inventory import inventory_of
from integration.nvml.topology import (
    Between,
    Links,
    Topologies,
    between,
    numa_nodes,
    parse_links,
    topology_of,
)
from integration.simulated import Scenario, SimulatedNode
from tests.harness.waiting import eventually
from tests.unit.node.inventories import node_with

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def gpu(index: int, bus_id: str) -> Gpu:
    return Gpu(index=index, minor=index, uuid=f"GPU-{index}", bus_id=bus_id, model="H100")


ROOT = "pci0000:00"
PORT = "0000:00:01.0"
UP = "0000:01:00.0"


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        # two ports of one switch
        ((ROOT, PORT, UP, "0000:02:00.0", "a"), (ROOT, PORT, UP, "0000:02:01.0", "b"),
         Between.SWITCH),
        # a switch behind another switch's port
        ((ROOT, PORT, UP, "0000:02:00.0", "0000:03:00.0", "0000:04:00.0", "a"),
         (ROOT, PORT, UP, "0000:02:01.0", "b"), Between.SWITCHES),
        ((ROOT, PORT, "a"), (ROOT, "0000:00:02.0", "b"), Between.HOST_BRIDGE),
        # as in a virtual machine
        ((ROOT, "a"), (ROOT, "b"), Between.HOST_BRIDGE),
        ((ROOT, "a"), ("pci0000:80", "b"), Between.SYSTEM),
        ((), (), Between.SYSTEM),
    ],
)  # fmt: skip
def test_what_is_between_two_gpus_is_in_their_paths(
    one: tuple[str, ...], other: tuple[str, ...], expected: Between
) -> None:
    assert between(one, other, 0, 1) is expected
    assert between(other, one, 1, 0) is expected


def test_host_bridges_of_one_socket_are_nearer_than_those_of_two() -> None:
    assert between((ROOT, "a"), ("pci0000:80", "b"), 1, 1) is Between.NODE
    assert between((ROOT, "a"), ("pci0000:80", "b"), None, None) is Between.NODE


@pytest.fixture
def sys_tree(tmp_path: Path) -> Config:
    """Make a sysfs of three GPUs, the first two behind one switch."""
    os.makedirs(tmp_path / "bus/pci/devices")
    for bus_id, path, numa in (
        ("0000:03:00.0", f"{ROOT}/{PORT}/{UP}/0000:02:00.0/0000:03:00.0", "0"),
        ("0000:04:00.0", f"{ROOT}/{PORT}/{UP}/0000:02:01.0/0000:04:00.0", "0"),
        ("0000:81:00.0", "pci0000:80/0000:80:01.0/0000:81:00.0", "-1"),
    ):
        os.makedirs(tmp_path / "devices" / path)
        (tmp_path / "devices" / path / "numa_node").write_text(f"{numa}\n")
        os.symlink(f"../../../devices/{path}", tmp_path / "bus/pci/devices" / bus_id)
    return Config(sys=str(tmp_path))


GPUS = (gpu(0, "0000:03:00.0"), gpu(1, "0000:04:00.0"), gpu(2, "0000:81:00.0"))


def test_without_nvml_there_is_what_sysfs_says(sys_tree: Config) -> None:
    found = topology_of(sys_tree, GPUS, Links(failure="it hangs"))
    assert found.nearness == {
        ("GPU-0", "GPU-1"): Between.SWITCH,
        ("GPU-0", "GPU-2"): Between.SYSTEM,
        ("GPU-1", "GPU-2"): Between.SYSTEM,
    }
    assert numa_nodes(sys_tree, GPUS) == {"0000:03:00.0": 0, "0000:04:00.0": 0}
    assert (found.score("GPU-1", "GPU-0"), found.score("GPU-0", "GPU-9")) == (50, 0)
    assert found.failure == "it hangs"


def report(*gpus: tuple[str, Sequence[tuple[str, int | None]]], levels: Any = ()) -> bytes:
    entries = [
        {"bus_id": bus_id, "links": [[*link, n] for n, link in enumerate(links)]}
        for bus_id, links in gpus
    ]
    return json.dumps({"gpus": entries, "between": list(levels)}).encode()


def test_nvml_says_how_many_links_there_are_and_who_shares_a_board(sys_tree: Config) -> None:
    links = parse_links(
        report(
            ("00000000:03:00.0", [("00000000:04:00.0", 0)] * 2 + [("00000000:C0:00.0", 2)] * 3),
            ("00000000:04:00.0", [("00000000:03:00.0", 0)] * 2),
            ("00000000:81:00.0", [("00000000:C0:00.0", 2), ("00000000:C1:00.0", 2)]),
            levels=[(0, 1, 0), (0, 2, 40), (1, 2, 77)],
        )
    )
    found = topology_of(sys_tree, GPUS, links)
    assert found.nvlinks == {("GPU-0", "GPU-1"): 2, ("GPU-0", "GPU-2"): 1}
    assert found.nearness[("GPU-0", "GPU-1")] is Between.BOARD
    assert found.nearness[("GPU-0", "GPU-2")] is Between.NODE
    assert found.nearness[("GPU-1", "GPU-2")] is Between.SYSTEM
    assert found.score("GPU-0", "GPU-1") == 260
    of_first = {("0000:c0:00.0", port): "GPU-0" for port in (3, 4)}
    assert found.ports == {**of_first, ("0000:c0:00.0", 0): "GPU-2", ("0000:c1:00.0", 1): "GPU-2",
                           ("0000:c0:00.0", 2): "GPU-0"}  # fmt: skip


def test_a_place_that_is_no_gpu_is_a_switch_unless_nvml_says_otherwise() -> None:
    addresses = ("0000:03:00.0", "0000:04:00.0")
    silent: list[tuple[str, int | None]] = [("0000:c0:00.0", None)] * 2
    links = parse_links(report((addresses[0], silent), (addresses[1], silent)))
    assert links.count(*addresses) == 2
    processor: list[tuple[str, int | None]] = [("0000:c0:00.0", 1)] * 2
    links = parse_links(report((addresses[0], processor), (addresses[1], processor)))
    assert links.count(*addresses) == 0


def test_a_link_to_something_without_an_address_takes_no_other_with_it() -> None:
    links = parse_links(
        report(
            ("00000000:03:00.0", [("00000000:04:00.0", 0), ("", 0), ("???", 2)]),
            ("00000000:04:00.0", [("00000000:03:00.0", 0)]),
            ("", []),
        )
    )
    assert links.count("0000:03:00.0", "0000:04:00.0") == 1


def test_what_nvml_complains_of_is_said() -> None:
    assert "crashed" in parse_links(b"").failure
    assert "crashed" in parse_links(b'{"gpus": [{"bus_id"').failure
    assert parse_links(b'{"error": "NVMLError: lost\\n"}').failure == "NVMLError: lost"


def test_nvml_is_asked_again_when_there_are_other_gpus(
    sys_tree: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def answer() -> bytes | None:
        asked.append(1)
        return None if len(asked) == 1 else report()

    topologies = Topologies(sys_tree, answer)
    assert topologies.find(node_with(GPUS[0])).failure == ""
    assert asked == []
    assert topologies.find(node_with(*GPUS)).failure
    assert topologies.find(node_with(*GPUS)).failure
    assert len(asked) == 1
    monkeypatch.setattr("integration.nvml.topology._RETRY_AFTER", -1.0)
    assert topologies.find(node_with(*GPUS)).failure == ""
    topologies.find(node_with(*GPUS))
    assert len(asked) == 2
    topologies.find(node_with(*GPUS[:2]))
    assert len(asked) == 3


def test_the_real_probe_finds_the_links_of_a_node(tmp_path: Path) -> None:
    with SimulatedNode.create(str(tmp_path / "node"), Scenario.of(gpus=4)) as node:
        state = tmp_path / "node/state"
        (state / "nvml-nvlinks").write_text("0 3 4\n1 2 36\n0 1 1\n3 s 2\n")
        config = load_config(node.config_path)
        there = inventory_of(config)
        found = Topologies(config).find(there)
        assert found.failure == ""
        first = [gpu.uuid for gpu in there.gpus]
        assert found.score(first[0], first[3]) == 410
        assert found.score(first[0], first[2]) == 10
        assert found.score(first[1], first[2]) == 3610, "as many as a Rubin has"
        ports = {("0000:c0:00.0", 3 * 36 + 4): first[3], ("0000:c1:00.0", 3 * 36 + 5): first[3]}
        assert found.ports == ports
        (resource,) = resources_of(there, Settings(), numa=numa_nodes(config, there.gpus))
        assert [device.numa_node for device in resource.devices] == [0, 0, 1, 1]
        chosen = preferred(resource, first, [], 2, topology=found)
        assert set(chosen) == {first[1], first[2]}

        (state / "nvml-faults").write_text("nvmlInit=error:999\n")
        found = Topologies(config).find(there)
        assert found.failure
        assert found.score(first[0], first[1]) == 20


def test_nvml_is_asked_once_for_all_parts_of_the_agent(sys_tree: Config) -> None:
    asked: list[int] = []
    goes_on = threading.Event()

    def answer() -> bytes | None:
        asked.append(1)
        goes_on.wait(20)
        return None

    topologies = Topologies(sys_tree, answer)
    there = node_with(*GPUS)
    parts = [threading.Thread(target=topologies.find, args=(there,)) for _ in range(2)]
    for part in parts:
        part.start()
    eventually(lambda: asked, "one asks")
    assert topologies.at_once(there).failure == "NVML has not answered yet"
    goes_on.set()
    for part in parts:
        part.join()
    assert len(asked) == 1
