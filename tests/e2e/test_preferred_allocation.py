"""Which devices the plugin prefers, by NVLink and by existing allocations."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Final

import grpc  # type: ignore[import-untyped] # it ships no types
import pytest

from integration.simulated import Scenario, SimulatedNode
from tests.harness.kubelet_plugins import KubeletPlugins
from tests.harness.node_agent import NodeAgent
from tests.harness.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

GPU: Final = "nvidia.com/gpu"

# Pairs without adjacent numbers: sorting by number or NUMA node does not find them.
PARTNERS: Final = {0: 5, 1: 4, 2: 7, 3: 6}


@pytest.fixture
def kubelet(tmp_path: Path) -> Iterator[KubeletPlugins]:
    kubelet = KubeletPlugins(str(tmp_path / "kubelet"))
    kubelet.start()
    yield kubelet
    kubelet.stop()


def test_gpus_with_nvlinks_between_them_are_advised(
    tmp_path: Path, kubelet: KubeletPlugins
) -> None:
    with SimulatedNode.create(str(tmp_path / "node"), Scenario.load("eight")) as node:
        with open(node.config_path, "a", encoding="utf-8") as file:
            file.write(f'\n[cdi]\nspec-dirs = ["{tmp_path}/cdi"]\n')
        links = "".join(f"{one} {other} 4\n" for one, other in PARTNERS.items())
        Path(node.state, "nvml-nvlinks").write_text(links, encoding="ascii")
        ids = [gpu.uuid for gpu in node.scenario.gpus]
        with NodeAgent(node, str(tmp_path), kubelet.socket) as agent:
            kubelet.wait_for(GPU, 8)
            plugin = kubelet.plugins[GPU]
            one, other = ids[2], ids[PARTNERS[2]]
            # A separate NVML query gets the NVLinks.
            eventually(
                lambda: plugin.preferred(ids, 2, required=[one]) == [one, other],
                "the links are known",
            )
            chosen = {ids.index(each) for each in plugin.preferred(ids, 4)}
            assert len(chosen) == 4
            assert all(PARTNERS[each] in chosen for each in chosen & PARTNERS.keys())
            # A single GPU comes from a pair that is already split.
            assert plugin.preferred([each for each in ids if each != one], 1) == [other]
            with pytest.raises(grpc.RpcError, match="NVSHIM-E2731"):
                plugin.preferred(ids[:3], 4)
            with pytest.raises(grpc.RpcError, match="NVSHIM-E2732"):
                plugin.preferred(ids[:3], 2, required=ids[5:6])

            # NVIDIA's plugin needs this signal; ours notices the change anyway.
            assert agent.process is not None
            agent.process.send_signal(signal.SIGHUP)
            share = {"name": GPU, "rename": "nvidia.com/pair", "devices": [2, other], "replicas": 3}
            agent.configure(
                flags={"plugin": {"sharedDevicesAllocationPolicy": "packed"}},
                sharing={"timeSlicing": {"resources": [share]}},
            )
            shares = kubelet.wait_for("nvidia.com/pair", 6)
            kubelet.wait_for(GPU, 6)
            assert {each.partition("::")[0] for each in shares} == {one, other}
            packed = kubelet.plugins["nvidia.com/pair"].preferred(sorted(shares), 3)
            assert packed == [f"{one}::{number}" for number in range(3)]
            assert agent.process.poll() is None
