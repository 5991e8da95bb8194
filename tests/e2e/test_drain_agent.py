"""What the kubelet learns about devices out of service, and resets, on a node with an agent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.request import urlopen

import grpc  # type: ignore[import-untyped] # it ships no types
import pytest

from integration.nvml.lock import shared
from integration.simulated import Scenario, SimulatedNode
from tests.harness.api_server import ApiServer
from tests.harness.exposition import read_told
from tests.harness.kubelet_plugins import KubeletPlugins
from tests.harness.launcher import REPOSITORY
from tests.harness.node_agent import NodeAgent
from tests.harness.nvidia_smi import nvidia_smi
from tests.harness.nvshim import Answer, nvshim
from tests.harness.openable import make_openable
from tests.harness.processes import with_nvml
from tests.harness.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_MINORS: Final = 24

GPU: Final = "nvidia.com/gpu"
SLICE: Final = "nvidia.com/mig-1g.10gb"

# Replaces the driver's nvidia-smi, which needs the kernel module. It records its arguments, waits
# until the test lets it continue, and exits as the test says.
NVIDIA_SMI: Final = """#!/bin/sh
echo "$@" >> {state}/reset-calls
read -r status heals said < {state}/reset-goes-on
if [ "$heals" = 1 ]; then : > {state}/nvml-faults; fi
echo "$said"
exit "$status"
"""


class Place:
    """A node, and the commands on it."""

    def __init__(self, node: SimulatedNode) -> None:
        self.node = node
        self.uuids = [gpu.uuid for gpu in node.scenario.gpus]
        self.config = ("--config", node.config_path)
        # No containerd: others run on this machine.
        self.where = (*self.config, "--containerd-state", node.dev)

    def call(self, *words: str, check: bool = True) -> Answer:
        where = self.config if words[0] == "undrain" else self.where
        return nvshim(*words, *where, check=check)

    def spawn(self, *words: str, patience: str = "1") -> subprocess.Popen[str]:
        argv = [sys.executable, "-m", "integration.cli", *words, *self.where]
        pipe, environment = subprocess.PIPE, os.environ | {"NVSHIM_PATIENCE": patience}
        return subprocess.Popen(
            argv, stdout=pipe, stderr=pipe, text=True, cwd=REPOSITORY, env=environment
        )

    def suffers(self, *faults: str) -> None:
        Path(self.node.state, "nvml-faults").write_text("\n".join(faults), encoding="ascii")

    def mark(self, index: int) -> dict[str, Any] | None:
        with suppress(FileNotFoundError):
            text = Path(self.node.directory, "drained", self.uuids[index]).read_text("utf-8")
            known: dict[str, Any] = json.loads(text)
            return known
        return None

    def put_nvidia_smi(self) -> None:
        state = self.node.state
        program = Path(self.node.driver_root, "usr/bin/nvidia-smi")
        program.unlink()  # a link to a file that other nodes use as well
        program.write_text(NVIDIA_SMI.format(state=state), encoding="ascii")
        program.chmod(0o755)
        os.mkfifo(f"{state}/reset-goes-on")

    def called(self) -> list[str]:
        """Return the calls of nvidia-smi."""
        with suppress(FileNotFoundError):
            return Path(self.node.state, "reset-calls").read_text("ascii").splitlines()
        return []

    def lets_reset(self, reset: subprocess.Popen[str], times: int = 1) -> str:
        """Let the nvidia-smi of a reset succeed; return the command's output."""
        eventually(lambda: len(self.called()) == times, "nvidia-smi runs")
        self.go_on()
        out, err = reset.communicate(timeout=60)
        assert reset.returncode == 0, err
        return out

    def go_on(self, status: int = 0, said: str = "", *, heals: bool = True) -> None:
        line = f"{status} {heals:d} {said}\n"
        Path(self.node.state, "reset-goes-on").write_text(line, encoding="ascii")


@contextmanager
def place_at(tmp_path: Path) -> Iterator[Place]:
    scenario = Scenario.load("two")
    # No other node uses these minors: every process with a node open is a holder.
    gpus = tuple(replace(gpu, minor=_MINORS + gpu.index) for gpu in scenario.gpus)
    with SimulatedNode.create(str(tmp_path / "node"), replace(scenario, gpus=gpus)) as node:
        with open(node.config_path, "a", encoding="utf-8") as file:
            file.write(f'\n[cdi]\nspec-dirs = ["{tmp_path}/cdi"]\n[health]\nquiet = 1\n')
        place = Place(node)
        place.put_nvidia_smi()
        yield place


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with place_at(tmp_path) as place:
        yield place


def test_the_node_says_what_no_pod_can_have(place: Place, tmp_path: Path) -> None:
    def condition() -> tuple[str, ...]:
        of_others, *ours = api.nodes["one"]
        assert of_others == {"type": "Ready", "status": "True"}
        return tuple(ours[0][key] for key in ("status", "reason", "message")) if ours else ()

    with ApiServer(str(tmp_path / "token")) as api:
        api.nodes["one"] = [{"type": "Ready", "status": "True"}]
        api.is_forbidden = True
        labels = tmp_path / "features.d" / "nvshim"
        words = (
            "--api-server", "127.0.0.1", "--api-port", str(api.port), "--node-name", "one",
            "--service-account", api.service_account, "--node-condition",
            "--containerd-state", place.node.dev,
            "--node-labels", "file", "--node-labels-file", str(labels), "--node-labels-remove",
        )  # fmt: skip
        agent = NodeAgent(place.node, str(tmp_path), "/nowhere", *words)
        with agent:
            eventually(lambda: agent.said("it is 403"), "the right is missed")
            api.is_forbidden = False
            place.call("drain", "1", "--reason", "fan")
            told = eventually(condition, "a condition")
            assert told[:2] == ("True", "Drained")
            assert told[2].startswith(f"{place.uuids[1]} is out of service since ")
            assert told[2].endswith(": fan")
            began = api.nodes["one"][1]["lastTransitionTime"]
            place.call("drain", "--driver", "--reason", "update")
            words_of_both = ("the driver is out of service", ": update")
            eventually(lambda: all(w in condition()[2] for w in words_of_both), "both are reported")
            assert api.nodes["one"][1]["lastTransitionTime"] == began
            place.call("undrain", "--driver")
            place.call("undrain", "1")
            eventually(lambda: condition()[0] == "False", "all are in service")
            assert condition() == ("False", "AllInService", "all GPUs are in service")
            eventually(labels.exists, "the node is labelled")
            lines = set(labels.read_text(encoding="utf-8").splitlines())
            assert lines >= {"nvidia.com/gpu.count=2", "nvidia.com/gpu.memory=81559"}
            assert agent.stop() == 0
            assert not labels.exists()
        kinds = {kind for kind, _ in api.patches}
        assert kinds == {"application/strategic-merge-patch+json"}
        written = len(api.patches)
        with agent:
            eventually(lambda: agent.said("node inventory"), "it has looked")
            place.call("drain", "1")
            eventually(lambda: condition()[0] == "True", "the agent writes the condition again")
        # The agent did not rewrite unchanged conditions.
        assert len(api.patches) == written + 1


def test_the_kubelet_hears_of_it_whatever_is_restarted(place: Place, tmp_path: Path) -> None:
    agent_words = ("--metrics", "127.0.0.1:0", "--containerd-state", place.node.dev)
    with KubeletPlugins(str(tmp_path / "kubelet")) as kubelet:
        agent = NodeAgent(place.node, str(tmp_path), kubelet.socket, *agent_words)
        with agent:
            assert kubelet.wait_for(GPU, 2) == set(place.uuids)
            place.call("drain", "1", "--reason", "fan")
            with pytest.raises(grpc.RpcError) as refused:  # whether or not it knows already
                kubelet.plugins[GPU].allocate(place.uuids[1])
            assert refused.value.details().startswith("NVSHIM-E2715 device-drained: ")
            assert kubelet.wait_for(GPU, 1) == {place.uuids[0]}
            kubelet.allocate(GPU, 1, pod="one")
            (served,) = eventually(lambda: agent.said("serving metrics"), "it serves metrics")

            def out_of_service() -> dict[str, float]:
                with urlopen(f"http://{served['address']}/metrics", timeout=60) as answer:
                    told = read_told(answer.read().decode())
                series = told["nvshim_device_out_of_service"].series
                return {dict(labels)["uuid"]: value for (_, labels), value in series.items()}

            assert out_of_service() == {place.uuids[0]: 0, place.uuids[1]: 1}
            eventually(
                lambda: agent.status()["outOfService"].keys() == {place.uuids[1]}, "its status"
            )
            health = eventually(
                lambda: place.call("list", "--health", "-o", "json", check=False), "health"
            )
            rows = {row["uuid"]: row for row in health.items}
            assert rows[place.uuids[1]]["state"] == "healthy"
            assert not rows[place.uuids[1]]["given"]
            assert rows[place.uuids[1]]["out_of_service"].endswith(": fan")
            assert health.code == 3
            kubelet.restart()
            assert kubelet.wait_for(GPU, 1) == {place.uuids[0]}
        # A boot loses these files. The mark is not one of them.
        for path in Path(place.node.state).glob("*.json"):
            path.unlink()
        with agent:
            assert kubelet.wait_for(GPU, 1) == {place.uuids[0]}
            place.call("undrain", "1")
            assert kubelet.wait_for(GPU, 2) == set(place.uuids)


@pytest.mark.serial  # every process with an NVIDIA node open holds the driver
def test_the_driver_out_of_service_is_left_alone_by_the_agent(place: Place, tmp_path: Path) -> None:
    asked = Path(place.node.state, "nvml-inits")
    with (
        KubeletPlugins(str(tmp_path / "kubelet")) as kubelet,
        # A device that has recovered is noticed at the next poll.
        NodeAgent(place.node, str(tmp_path), kubelet.socket, "--poll", "0.5") as agent,
    ):
        kubelet.wait_for(GPU, 2)
        eventually(lambda: with_nvml(agent.pid), "it has NVML open")
        place.call("drain", "--driver", "--reason", "570 comes")
        kubelet.wait_for(GPU, 0)
        eventually(lambda: not with_nvml(agent.pid), "it has closed NVML")
        asked.touch()
        # The driver's files are removed and restored: the agent does not use NVML or create nodes.
        root, node = Path(place.node.driver_root), Path(place.node.dev, f"nvidia{_MINORS + 1}")
        away = root.rename(root.with_name("away"))
        node.unlink()
        looks = len(agent.said())
        agent.process.send_signal(signal.SIGHUP)  # type: ignore[union-attr]
        eventually(lambda: len(agent.said()) > looks, "it has looked")
        away.rename(root)
        fault = "out of service since"
        eventually(lambda: any(fault in each for each in agent.faults()), "its status has it")
        assert asked.read_bytes() == b""
        assert not node.exists()
        place.call("undrain", "--driver")
        kubelet.wait_for(GPU, 2)
        eventually(node.exists, "the node is recreated")
        eventually(asked.read_bytes, "NVML is queried again")


def test_a_mig_device_out_of_service_by_itself(tmp_path: Path) -> None:
    gpu = {"index": 0, "minor": _MINORS, "mig": ["1g.10gb", "1g.10gb"]}
    scenario = Scenario.of(1, gpu=[gpu])
    with SimulatedNode.create(str(tmp_path / "node"), scenario) as node:
        place = Place(node)
        with (
            KubeletPlugins(str(tmp_path / "kubelet")) as kubelet,
            NodeAgent(node, str(tmp_path), kubelet.socket) as agent,
        ):
            agent.configure(flags={"migStrategy": "mixed"})
            both = kubelet.wait_for(SLICE, 2)
            document = place.call("drain", "0:1", "-o", "json").document
            (device,) = document["devices"]
            assert device["device"] in both
            assert kubelet.wait_for(SLICE, 1) == both - {device["device"]}
            place.call("drain", "0")
            kubelet.wait_for(SLICE, 0)
            place.call("undrain", "0")
            assert kubelet.wait_for(SLICE, 1) == both - {device["device"]}
            place.call("undrain", device["device"][:12])
            kubelet.wait_for(SLICE, 2)


@pytest.mark.parametrize("agent_runs", [True, False], ids=["let go", "no agent"])
def test_a_mig_mode_that_a_person_switches_is_seen(tmp_path: Path, *, agent_runs: bool) -> None:
    """No container gets such a GPU as a whole one: its programs would find no device."""
    with SimulatedNode.create(str(tmp_path / "node"), Scenario.load("two")) as node:
        let_go = Path(node.state, "let-go")
        with (
            KubeletPlugins(str(tmp_path / "kubelet")) as kubelet,
            NodeAgent(node, str(tmp_path), kubelet.socket) as agent,
        ):
            agent.configure(flags={"migStrategy": "mixed"})
            kubelet.wait_for(GPU, 2)
            for mode, count in (("1", 1), ("0", 2)):
                if agent_runs:
                    let_go.touch()
                    eventually(lambda: not with_nvml(agent.pid), "the agent closes NVML")
                else:
                    agent.stop()
                assert "MIG Mode" in nvidia_smi(node, "-i", "0", "-mig", mode)
                if agent_runs:
                    let_go.unlink()
                else:
                    agent.start()
                kubelet.wait_for(GPU, count)


# -- reset -------------------------------------------------------------------------------------


def test_a_reset_gives_back_a_gpu_that_answers_again(place: Place, tmp_path: Path) -> None:
    with (
        KubeletPlugins(str(tmp_path / "kubelet")) as kubelet,
        NodeAgent(place.node, str(tmp_path), kubelet.socket) as agent,
    ):
        kubelet.wait_for(GPU, 2)
        place.suffers("gpu1=error:15")
        kubelet.wait_for(GPU, 1)
        reset = place.spawn("reset", "1", "--reason", "Xid 79")
        eventually(place.called, "nvidia-smi runs")
        assert place.called() == [f"--gpu-reset -i {place.node.scenario.gpus[1].pci}"]
        eventually(lambda: not with_nvml(agent.pid), "the agent closes NVML")
        mark = place.mark(1)
        assert mark is not None
        assert (mark["reset"], mark["reason"]) == ("nvidia-smi resets it", "Xid 79")
        # While it runs, no other command can reset a GPU or remove the mark.
        for words in (("reset", "0"), ("undrain", "1")):
            refused = place.call(*words, check=False)
            assert refused.code == 1
            assert refused.stderr.startswith("NVSHIM-E2645 reset-running")
        assert place.mark(0) is None
        place.go_on(0, "GPU was successfully reset.")
        out, err = reset.communicate(timeout=60)
        assert (reset.returncode, out) == (
            0, "GPU 1 was reset, answers, and is back in service\n",
        ), err  # fmt: skip
        assert place.mark(1) is None
        kubelet.wait_for(GPU, 2, timeout=60)
        eventually(lambda: with_nvml(agent.pid), "it watches again")


def test_the_agent_does_not_ask_nvml_while_a_gpu_is_reset(place: Place, tmp_path: Path) -> None:
    agent = NodeAgent(place.node, str(tmp_path), "/nowhere", "--containerd-state", place.node.dev)
    with agent:
        # The agent queries a lost GPU again whenever something changes.
        place.suffers("gpu1=error:15")
        place.call("list")
        reset = place.spawn("reset", "1")
        eventually(place.called, "nvidia-smi runs")
        inits = Path(place.node.state, "nvml-inits")
        inits.touch()
        place.call("drain", "0")
        eventually(
            lambda: agent.status()["outOfService"].keys() == set(place.uuids), "it has looked"
        )
        assert inits.read_bytes() == b""
        place.go_on()
        _, err = reset.communicate(timeout=60)
        assert reset.returncode == 0, err
        eventually(inits.read_bytes, "NVML is queried again")


def test_who_is_about_to_open_nvml_is_waited_for(place: Place) -> None:
    with shared(place.node.state, 0) as lock:
        assert lock is not None
        reset = place.spawn("reset", "1", patience="0.05")
        _, err = reset.communicate(timeout=60)
        assert reset.returncode == 1
        assert err.splitlines()[-1].startswith("NVSHIM-E2644 still-held")
        assert "a program of ours that queries NVML still holds it" in err
        assert place.called() == []
        waiting = place.spawn("reset", "1", patience="20")
        mark = place.mark(1)
        assert mark is not None
        assert mark["reset"] == "waits for its holders"
    place.lets_reset(waiting)
    assert place.mark(1) is None


@pytest.mark.serial
def test_who_comes_between_the_wait_and_the_reset_is_not_waited_for_once_more(place: Place) -> None:
    with ExitStack() as stack:
        with shared(place.node.state, 0) as lock:
            assert lock is not None
            reset = place.spawn("reset", "1", "--wait=3s", patience="20")
            eventually(lambda: place.mark(1), "the reset waits for the lock")
            time.sleep(3)  # the time that the option sets
            stack.enter_context(_holding(place))
        since = time.monotonic()
        _, err = reset.communicate(timeout=60)
        assert time.monotonic() - since < 3
    assert reset.returncode == 1
    assert err.splitlines()[-1].startswith("NVSHIM-E2644 still-held")
    assert place.called() == []


def test_a_reset_without_a_place_for_its_lock_does_nothing(place: Place) -> None:
    os.mkdir(f"{place.node.state}/nvml.lock")
    refused = place.call("reset", "1", check=False)
    assert refused.code == 1
    assert refused.stderr.splitlines()[-1].startswith("NVSHIM-E2642 mark-unwritten")
    assert place.called() == []


@pytest.mark.parametrize(
    ("status", "code", "found"),
    [
        (3, "NVSHIM-E2646", "In use by another client"),
        (0, "NVSHIM-E2647", "GPU is lost"),
    ],
)
def test_a_reset_that_fails_leaves_the_gpu_out_of_service(
    place: Place, status: int, code: str, found: str
) -> None:
    place.suffers("gpu1=error:15")
    place.call("list")
    reset = place.spawn("reset", "1", patience="0.1")  # do not wait for the GPU to recover
    eventually(place.called, "nvidia-smi runs")
    place.go_on(status, found, heals=False)
    out, err = reset.communicate(timeout=120)
    assert (reset.returncode, out) == (1, "")
    last = err.splitlines()[-1]
    assert last.startswith(code)
    assert found in last
    mark = place.mark(1)
    assert mark is not None
    assert mark["reset"].startswith("it failed: ")
    assert found in mark["reset"]
    told = nvshim("doctor", *place.config, "--only", "D017", check=False).stdout
    assert "its reset stopped at" in " ".join(told.split())
    # The operator can continue from there.
    place.suffers()
    place.lets_reset(place.spawn("reset", "1"), times=2)
    assert place.mark(1) is None


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_reset_that_is_interrupted_can_be_seen_and_gone_on_with(
    place: Place, number: signal.Signals
) -> None:
    reset = place.spawn("reset", "1")
    eventually(place.called, "nvidia-smi runs")
    reset.send_signal(number)
    reset.communicate(timeout=60)
    assert reset.returncode != 0
    mark = place.mark(1)
    assert mark is not None
    assert mark["reset"] == "nvidia-smi resets it"
    rows = place.call("list", "-o", "json").items
    assert [bool(row["out_of_service"]) for row in rows] == [False, True]
    if number == signal.SIGKILL:  # its nvidia-smi is still running
        place.go_on()
    place.lets_reset(place.spawn("reset", "1"), times=2)
    assert place.mark(1) is None


@contextmanager
def _holding(place: Place) -> Iterator[Callable[[], None]]:
    """Run a process that holds the second GPU until the yielded function is called."""
    holds = "import os, sys; os.open(sys.argv[1], os.O_RDWR); print(flush=True); sys.stdin.read()"
    argv = [sys.executable, "-c", holds, make_openable(place.node, 1)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdin is not None
        holder.stdout.readline()
        yield holder.stdin.close


def test_a_gpu_that_somebody_holds_is_not_reset_and_given_to_nobody_else(place: Place) -> None:
    with _holding(place) as let_go:
        refused = place.call("reset", "1", "--wait=1s", check=False)
        assert refused.code == 1
        last = refused.stderr.splitlines()[-1]
        assert last.startswith("NVSHIM-E2644 still-held")
        assert "was not reset" in last
        mark = place.mark(1)
        assert mark is not None
        assert mark["reset"] == "waits for its holders"
        assert place.called() == []
        waiting = place.spawn("reset", "1", "--wait")
        assert "lets_go" not in mark  # while it waits, the agent watches all GPUs
        let_go()
    place.lets_reset(waiting)
    assert place.mark(1) is None


def test_a_gpu_that_a_person_took_out_of_service_stays_so_after_its_reset(place: Place) -> None:
    place.call("drain", "1", "--reason", "fan")
    before = place.mark(1)
    out = place.lets_reset(place.spawn("reset", "1"))
    assert out == "GPU 1 was reset, answers, and stays out of service, as before\n"
    assert place.mark(1) == before
