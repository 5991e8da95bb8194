"""An agent that starts on a full disk works like a running one, and reports the full disk."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.request import urlopen

import pytest

from integration.simulated import Scenario, SimulatedNode
from shim import syscalls
from tests.harness.exposition import read_told
from tests.harness.kubelet_plugins import KubeletPlugins
from tests.harness.node_agent import NodeAgent
from tests.harness.nvshim import nvshim
from tests.harness.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

GPU: Final = "nvidia.com/gpu"
POD: Final = "0f1e2d3c"

FULL: Final = "No space left on device"
_SIZES: Final = {"space": "size=64k", "inodes": "nr_inodes=16", "read-only": "size=1m"}
_WHY: Final = {"space": FULL, "inodes": FULL, "read-only": "Read-only file system"}


class Place:
    """A node whose state directory is a separate, full file system.

    Args:
        kind: what has run out, one of :data:`_SIZES`.
    """

    def __init__(self, node: SimulatedNode, kind: str) -> None:
        self.node, self.kind = node, kind

    def fill(self) -> None:
        if self.kind == "read-only":
            subprocess.run(["mount", "-o", "remount,ro", self.node.state], check=True)
            return
        fill = self._take_inodes if self.kind == "inodes" else self._take_space
        with pytest.raises(OSError, match=FULL):
            fill()

    def _take_inodes(self) -> None:
        for n in range(1000):
            Path(self.node.state, f"full-{n}").touch()

    def _take_space(self) -> None:
        with open(f"{self.node.state}/full-0", "wb", buffering=0) as file:
            while True:
                file.write(bytes(512))

    def make_room(self) -> None:
        if self.kind == "read-only":
            subprocess.run(["mount", "-o", "remount,rw", self.node.state], check=True)
        for path in Path(self.node.state).glob("full-*"):
            path.unlink()

    def is_ready(self) -> bool:
        return nvshim("node", "--ready", "--config", self.node.config_path, check=False).code == 0


@pytest.fixture(params=sorted(_SIZES))
def place(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Place]:
    with SimulatedNode.create(str(tmp_path / "node"), Scenario.load("two")) as node:
        with open(node.config_path, "a", encoding="utf-8") as file:
            file.write(f'\n[cdi]\nspec-dirs = ["{tmp_path}/cdi"]\n')
        syscalls.mount("tmpfs", node.state, "tmpfs", 0, f"mode=711,{_SIZES[request.param]}")
        try:
            yield Place(node, request.param)
        finally:
            syscalls.umount(node.state, syscalls.MNT_DETACH)


def test_an_agent_starts_on_a_full_directory(place: Place, tmp_path: Path) -> None:
    why, state = _WHY[place.kind], place.node.state
    words = ("--metrics", "127.0.0.1:0", "--containerd-state", place.node.dev)
    with KubeletPlugins(str(tmp_path / "kubelet")) as kubelet:
        agent = NodeAgent(place.node, str(tmp_path), kubelet.socket, *words, "--pod-uid", POD)
        # A previous agent has left its locks.
        for name in ("node.lock", "nvml.lock"):
            Path(state, name).touch(mode=0o600)
        place.fill()
        with agent:
            assert len(kubelet.wait_for(GPU, 2)) == 2
            kubelet.allocate(GPU, 1, pod="one")
            (served,) = eventually(lambda: agent.said("serving metrics"), "metrics")

            def down() -> set[str]:
                with urlopen(f"http://{served['address']}/metrics", timeout=60) as answer:
                    told = read_told(answer.read().decode())
                series = told["nvshim_part_up"].series
                return {dict(labels)["part"] for (_, labels), up in series.items() if not up}

            # An empty file needs only an inode.
            ours = {"status-file", "health.file", "ledger"}
            ours |= set() if place.kind == "space" else {"pod"}
            eventually(lambda: down() == ours, "the failed writes are reported")
            assert not place.is_ready()
            lines = [line["event"] for line in agent.said(why)]
            # Each failure is reported once, however often the agent retries.
            assert len([line for line in lines if f"cannot write {state}/node.json" in line]) == 1
            place.make_room()
            agent.process.send_signal(1)  # type: ignore[union-attr]
            eventually(place.is_ready, "it is written")
            eventually(lambda: down() == set(), "no fault is left")
            assert kubelet.healthy(GPU)


def test_an_agent_without_a_place_for_its_lock_says_so_in_one_line(
    place: Place, tmp_path: Path
) -> None:
    place.fill()
    if place.kind == "space":
        os.mkdir(f"{place.node.state}/node.lock")
    words = ("--config", place.node.config_path, "--cdi-spec", "none", "--kernel-log", "none")
    ended = nvshim("node", *words, "--kubelet-socket", "", check=False)
    assert ended.code == 1
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"NVSHIM-E2702 agent-state-unusable: cannot lock {place.node.state}")
    assert line.endswith("Make it writable, or free some space")


def test_a_look_that_cannot_be_written_down_is_one_line(place: Place) -> None:
    """A single run reports its failure only on stderr."""
    Path(place.node.state, "node.lock").touch(mode=0o600)
    place.fill()
    words = ("--config", place.node.config_path, "--cdi-spec", "none", "--kubelet-socket", "")
    ended = nvshim("node", *words, "--once", check=False)
    assert ended.code == 1
    line = ended.stderr.splitlines()[-1]
    assert line.startswith(f"NVSHIM-E2702 agent-state-unusable: cannot write {place.node.state}")
    assert "Traceback" not in ended.stderr
