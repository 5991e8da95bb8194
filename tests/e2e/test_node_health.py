"""The health of devices: the real agent, a GPU that falls off the bus, and who is told of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from integration.simulated import Scenario, SimulatedNode
from tests.harness.kubelet_plugins import KubeletPlugins
from tests.harness.waiting import eventually
from tests.tools.images import GLIBC

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.harness.runtime import Runtime

RESOURCE: Final = "nvidia.com/gpu"
NVSHIM: Final = (sys.executable, "-m", "integration.cli")


@dataclass
class Agent:
    """The agent, and what of the node a test moves."""

    node: SimulatedNode
    log: str
    kernel: int

    def lines(self) -> list[dict[str, Any]]:
        with open(self.log, encoding="utf-8") as file:
            # The last one may just be written.
            return [json.loads(line) for line in file if line[:1] + line[-1:] == "{\n"]

    def said(self, event: str) -> list[dict[str, Any]]:
        return [line for line in self.lines() if line["event"].startswith(event)]

    def xid(self, index: int, number: int, text: str, *, pid: int = 0) -> None:
        """The kernel's log names an error."""
        bus = self.node.scenario.gpus[index].pci.rpartition(".")[0]
        process = f"pid={pid}, name=sleep, " if pid else ""
        line = f"4,1,2,-;NVRM: Xid (PCI:{bus}): {number}, {process}{text}\n"
        os.write(self.kernel, line.encode())

    def nvml(self, name: str, text: str) -> None:
        """What NVML says from now on."""
        with open(f"{self.node.state}/nvml-{name}", "w", encoding="utf-8") as file:
            file.write(text)

    def nvshim(self, *words: str) -> tuple[int, Any]:
        """The exit status and the answer of a command."""
        line = [*NVSHIM, *words, "-o", "json", "--config", self.node.config_path]
        done = subprocess.run(line, stdout=subprocess.PIPE, check=False)
        return done.returncode, json.loads(done.stdout)["items"] if done.stdout else None

    def listed(self) -> list[str]:
        """The states of the GPUs, by `nvshim list`."""
        # What the containers of this machine hold, of its other engines, is not asked.
        words = ("list", "--containerd-state", self.node.state)
        return [row["health"] for row in self.nvshim(*words)[1]]

    def states(self) -> list[str]:
        """The same by the agent's file: to be looked at often."""
        try:
            with open(f"{self.node.state}/health.json", encoding="utf-8") as file:
                return [device["state"] for device in json.load(file)["devices"]]
        except FileNotFoundError:
            return []


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimulatedNode]:
    directory = tmp_path_factory.mktemp("health")
    with SimulatedNode.create(str(directory / "node"), Scenario.load("two")) as made:
        with open(made.config_path, "a", encoding="utf-8") as file:
            file.write(f'\n[cdi]\nspec-dirs = ["{directory}/cdi"]\n')
            file.write("[health]\nquiet = 0.5\nlongest-quiet = 0.5\n")
        yield made


@pytest.fixture
def node(two: SimulatedNode) -> Iterator[SimulatedNode]:
    """The node, well, and nobody has thought anything of it yet."""
    yield two
    for pattern in ("nvml-*", "health.json"):
        for path in Path(two.state).glob(pattern):
            path.unlink()


@contextmanager
def agent(node: SimulatedNode, directory: Path, *more: str) -> Iterator[Agent]:
    kmsg, log = directory / "kmsg", str(directory / "agent.log")
    if not kmsg.exists():
        os.mkfifo(kmsg)
    kernel = os.open(kmsg, os.O_RDWR)
    words = ("node", "--config", node.config_path, "--cdi-spec", "none", "--poll", "0.3")
    with open(log, "w", encoding="utf-8") as stderr:
        process = subprocess.Popen(
            [*NVSHIM, *words, "--kernel-log", str(kmsg), "--log-format", "json", *more],
            stderr=stderr,
        )
    try:
        yield Agent(node, log, kernel)
    finally:
        process.terminate()
        process.wait(timeout=20)
        os.close(kernel)
        with open(log, encoding="utf-8") as said:
            sys.stderr.write(said.read())  # shown if the test fails


def test_a_gpu_falls_off_the_bus_under_a_container_and_comes_back(
    runtime: Runtime, node: SimulatedNode, tmp_path: Path, configure: Callable[[str], None]
) -> None:
    if not runtime.is_ours:
        pytest.skip("containerd's own shim knows nothing of GPUs")
    with open(node.config_path, encoding="utf-8") as file:
        configure(file.read())
    container = runtime.start_idle(image=GLIBC, flags=("--env", "NVIDIA_VISIBLE_DEVICES=0"))
    title = container.name
    kubelet_directory = str(tmp_path / "kubelet")
    options = (
        "--containerd-state", f"{runtime.containerd.directory}/state",
        "--kubelet-socket", f"{kubelet_directory}/kubelet.sock",
        "--pod-resources", f"{kubelet_directory}/none.sock",
    )  # fmt: skip
    with KubeletPlugins(kubelet_directory) as kubelet, agent(node, tmp_path, *options) as it:
        both = kubelet.wait_for(RESOURCE, 2)
        lost, other = node.scenario.gpus[0].uuid, node.scenario.gpus[1].uuid
        assert both == {lost, other}

        def is_known() -> bool:
            """An application's own fault: it takes nobody's GPU, and it is known whose it is."""
            it.xid(0, 31, "Ch 1, MMU Fault", pid=container.pid)
            return any(
                line.get("container") == title and line["known"] == "by its process"
                for line in it.said("XID 31")
            )

        eventually(is_known, "whose it is")
        assert not it.said("a device is unhealthy")  # that would have been said before
        eventually(lambda: it.states() == ["healthy", "healthy"], "it is written")

        it.nvml("faults", "gpu0=error:15")
        it.xid(0, 79, "GPU has fallen off the bus.", pid=container.pid)
        assert kubelet.wait_for(RESOURCE, 1) == {other}
        (line,) = eventually(lambda: it.said("XID 79"), "it is told")
        assert (line["container"], line["known"]) == (title, "by its process")
        assert (line["severity"], line["gpu"]) == ("fatal", lost)
        assert "reboot the node" in line["do"]
        eventually(lambda: it.states() == ["unhealthy", "healthy"], "it is written")
        assert it.listed() == ["unhealthy", "healthy"]

        def listed() -> Any:
            status, rows = it.nvshim("list", "--health")
            assert status == 3
            (row,) = [row for row in rows if row["uuid"] == lost]
            return row["xid"] and row

        row = eventually(listed, "with its error")
        assert (row["xid"], row["containers"], row["given"]) == (79, [title], False)

        it.nvml("faults", "")
        assert kubelet.wait_for(RESOURCE, 2) == both
        told = [line["state"] for line in it.said("a device is") if line["device"] == lost]
        # Its events are asked for again only after a while; so long it is given, and suspect.
        assert told.index("unhealthy") < told.index("recovering") < len(told) - 1
        eventually(lambda: it.states()[0] in {"healthy", "suspect"}, "the file says so")
    # Nobody watches any more.
    assert it.listed() == [None, None]
    assert it.nvshim("health", "list")[0] == 1


def is_heard_again(it: Agent, times: int) -> bool:
    return len(it.said("events of it are heard again")) == times


@pytest.mark.parametrize("fault", ["", "nvmlDeviceRegisterEvents=error:3"])
def test_a_lost_gpu_is_taken_back_and_given_again_though_nobody_asks(
    node: SimulatedNode, tmp_path: Path, fault: str
) -> None:
    """Nothing is in the kernel's log, nobody scrapes, and the next look is far away."""
    directory = str(tmp_path / "kubelet")
    options = (
        "--kubelet-socket", f"{directory}/kubelet.sock", "--pod-resources", "",
        "--containerd-state", str(tmp_path), "--poll", "1000",
    )  # fmt: skip
    lost, other = (gpu.uuid for gpu in node.scenario.gpus)
    with KubeletPlugins(directory) as kubelet, agent(node, tmp_path, *options) as it:
        it.nvml("faults", fault)
        kubelet.wait_for(RESOURCE, 2)
        for n in range(2):
            it.nvml("faults", f"{fault} gpu0=error:15")
            assert kubelet.wait_for(RESOURCE, 1) == {other}
            it.nvml("faults", fault)
            assert kubelet.wait_for(RESOURCE, 2) == {lost, other}
            if not fault:
                eventually(partial(is_heard_again, it, n + 1), "again")
        assert not [line for line in it.lines() if "XID" in line["event"]]


def test_an_unhealthy_gpu_outlives_the_agent_and_is_reset_or_put_back_by_hand(
    node: SimulatedNode, tmp_path: Path
) -> None:
    options = ("--kubelet-socket", "", "--containerd-state", str(tmp_path))
    uuid = node.scenario.gpus[1].uuid
    with agent(node, tmp_path, *options) as it:
        it.nvml("facts", "1 ecc-uncorrected 1\n")

        def is_heard() -> bool:
            it.xid(1, 95, "Uncontained ECC error")
            return bool(it.said("a device is unhealthy"))

        eventually(is_heard, "the error")
        eventually(lambda: it.states() == ["healthy", "unhealthy"], "it is written")
    with agent(node, tmp_path, *options) as it:
        eventually(lambda: it.said("a device is unhealthy"), "it is still so")
        assert it.nvshim("health", "clear", "GPU-")[0] == 1  # which of them?
        status, rows = it.nvshim("health", "clear", uuid[:-3])
        assert (status, [row["uuid"] for row in rows]) == (0, [uuid])
        assert it.states() == ["healthy", "healthy"]
        assert it.said("put back by hand")[0]["device"] == uuid
        it.xid(1, 95, "Uncontained ECC error")
        eventually(lambda: it.states() == ["healthy", "unhealthy"], "it fails again")
        counted = cycle([*["1 ecc-uncorrected 1\n"] * 50, *[""] * 50])

        def is_reset() -> bool:
            """It counts from zero, as after a reset; again, if nobody has seen it count before."""
            it.nvml("facts", next(counted))
            return it.states() == ["healthy", "healthy"]

        eventually(is_reset, "it was reset")


def test_a_gpu_that_was_exchanged_is_said_to_be_gone_once(tmp_path: Path) -> None:
    options = ("--kubelet-socket", "", "--containerd-state", str(tmp_path))
    with SimulatedNode.create(str(tmp_path / "node"), Scenario.load("two")) as node:
        with agent(node, tmp_path, *options) as it:
            eventually(lambda: it.states() == ["healthy", "healthy"], "both are known")
        gone, new = node.scenario.gpus[1].uuid, "GPU-11111111-2222-4333-8444-555555555555"
        other = Scenario.parse({"gpus": 2, "model": "h100", "gpu": [{"index": 1, "uuid": new}]})
        changed = node.change(other)
        with agent(changed, tmp_path, *options) as it:
            eventually(lambda: len(it.states()) == 3, "the new one is known as well")
            (line,) = eventually(lambda: it.said("a device is unhealthy"), "it is said")
            assert (line["device"], line["level"]) == (gone, "error")
        with agent(changed, tmp_path, *options) as it:
            eventually(lambda: it.listed() == ["healthy", "healthy"], "it has begun again")
            it.xid(0, 31, "Ch 1, MMU Fault")
            eventually(lambda: it.said("XID 31"), "it watches over the devices")
            assert it.said("a device is unhealthy") == []


def test_a_list_of_errors_that_is_none_keeps_the_agent_from_beginning(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text(f'[node]\nstate = "{tmp_path}"\n')
    done = subprocess.run(
        [*NVSHIM, "node", "--config", config, "--disable-healthchecks", "31;79"],
        stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith("NVSHIM-E2755 xid-list-wrong: ")
