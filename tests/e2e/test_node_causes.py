"""Whose fault a container's exit was: the real agent, real containers, a simulated driver.

The tests read what the shim reads: the files in STATE/causes.
"""

from __future__ import annotations

import json
import os
import signal
import time
from typing import TYPE_CHECKING, Any, Final

import pytest

from integration.node.faults.limits import ANNOTATION
from integration.simulated import Scenario, SimulatedNode
from shim.causes.exit_store import read_ended
from shim.causes.record import Whose, read_causes
from tests.harness.api_server import ApiServer
from tests.harness.gpu_agent import gpu_agent
from tests.harness.nvshim import nvshim
from tests.harness.runtime import is_alive, remove_fifos
from tests.harness.waiting import eventually
from tools.images import GLIBC

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from shim.causes.record import Fault
    from tests.harness.gpu_agent import GpuAgent
    from tests.harness.runtime import Container, Runtime

GIB: Final = 1 << 30


@pytest.fixture
def node(
    runtime: Runtime, tmp_path: Path, configure: Callable[[str], None], request: Any
) -> Iterator[SimulatedNode]:
    """Return a node with two GPUs; the shim is configured for it."""
    if not runtime.is_ours:
        pytest.skip("containerd's own shim knows nothing of GPUs")
    with SimulatedNode.create(str(tmp_path / "node"), Scenario.load("two")) as node:
        with open(node.config_path, "a", encoding="utf-8") as file:
            file.write(getattr(request, "param", ""))
        with open(node.config_path, encoding="utf-8") as file:
            configure(file.read())
        yield node
        runtime.close()
        remove_fifos(runtime.containerd)


@pytest.fixture
def options(runtime: Runtime) -> tuple[str, ...]:
    state = runtime.containerd.bundle("x").rpartition("/io.containerd.")[0]
    return ("--containerd-state", state, "--kubelet-socket", "", "--pod-resources", "")


def on_gpu(runtime: Runtime, number: int, *flags: str) -> Container:
    chosen = ("--env", f"NVIDIA_VISIBLE_DEVICES={number}", *flags)
    return runtime.start_idle(image=GLIBC, flags=chosen)


def in_pod(name: str) -> tuple[str, ...]:
    """Return the annotations that containerd sets for a pod's container."""
    said = {"sandbox-name": f"pod-{name}", "sandbox-namespace": "research",
            "sandbox-uid": f"uid-{name}", "container-name": name, "container-type": "container",
            "sandbox-id": name}  # fmt: skip
    return tuple(
        word
        for key, value in said.items()
        for word in ("--annotation", f"io.kubernetes.cri.{key}={value}")
    )


def faults(it: GpuAgent, container: Container) -> tuple[Fault, ...]:
    return read_causes(it.node.state, container.runtime.containerd.namespace, container.name)


def told(it: GpuAgent, container: Container) -> list[tuple[int, str]]:
    return [(each.code, each.whose.value) for each in faults(it, container)]


def cause_of(it: GpuAgent, container: Container) -> str:
    """Return why a container exited, from the shim's stored exit."""
    namespace = container.runtime.containerd.namespace
    document = read_ended(it.node.state, namespace, container.name)
    return "" if document is None else str(document["cause"])


def is_held(it: GpuAgent, *containers: Container) -> bool:
    """Whether the agent knows that these containers hold GPUs."""
    try:
        with open(f"{it.node.state}/ledger.json", encoding="utf-8") as file:
            held = {each["id"] for each in json.load(file)["holdings"] if each["pid"]}
    except FileNotFoundError:
        return False
    return {each.name for each in containers} <= held


def test_each_container_is_told_of_its_own_and_the_agent_may_die_between(
    runtime: Runtime, node: SimulatedNode, options: tuple[str, ...], tmp_path: Path
) -> None:
    mine, other, apart = on_gpu(runtime, 0), on_gpu(runtime, 0), on_gpu(runtime, 1)
    with gpu_agent(node, tmp_path, *options) as it:
        eventually(lambda: is_held(it, mine, other, apart), "the ledger has them")
        it.listens()
        it.xid(0, 31, "Ch 1, MMU Fault", pid=mine.pid)
        eventually(lambda: told(it, mine) == [(31, Whose.APPLICATION)], "its own")
        eventually(lambda: told(it, other) == [(31, Whose.NEIGHBOUR)], "a neighbour's")
        assert faults(it, mine)[0].pid == mine.pid
        with open(
            f"{node.state}/causes/{other.runtime.containerd.namespace}/{other.name}.json"
        ) as file:
            assert mine.name not in file.read()
        assert os.stat(file.name).st_mode & 0o777 == 0o600
        it.process.send_signal(signal.SIGKILL)
        it.process.wait()
    with gpu_agent(node, tmp_path, *options) as it:
        eventually(lambda: is_held(it, mine, other, apart), "the next one knows them")
        it.listens()
        # The exit comes first, and the driver reports the fault afterwards.
        pid = mine.pid
        mine.kill()
        mine.wait_for("STOPPED")  # the shim has stored the time
        it.xid(0, 79, "GPU has fallen off the bus.", pid=pid)
        eventually(lambda: (79, Whose.DEVICE) in told(it, mine), "the late fault")
        assert told(it, mine) == [(31, Whose.APPLICATION), (79, Whose.DEVICE)]
        eventually(lambda: told(it, other)[1:] == [(79, Whose.DEVICE)], "both had the GPU")
        # The shim's stored exit has it, too.
        eventually(lambda: cause_of(it, mine).startswith("GPU failure: Xid 79"), "the record")
        assert "s after exit, and 1 more." in cause_of(it, mine)
        assert told(it, apart) == []
        # Nothing was known about this container when it exited.
        apart.kill()
        apart.wait_for("STOPPED")
        it.xid(1, 62, "PMU halt")
        eventually(lambda: cause_of(it, apart).startswith("GPU failure: Xid 62"), "the late cause")
        rows = nvshim("ledger", "faults", "--config", node.config_path, "-o", "json").items
        assert [(row["id"], row["xid"], row["whose"]) for row in rows if row["xid"] == 79] == [
            (name, 79, "device") for name in sorted((mine.name, other.name))
        ]
        (row,) = [
            row
            for row in nvshim("ps", "--gpus", "-o", "json", *_where(node, options)).items
            if row["id"] == other.name
        ]
        assert row["fault"].startswith("GPU failure: Xid 79 (GPU has fallen off the bus) on GPU-")
        assert "and 1 more. Not the application's fault." in row["fault"]
        shown = nvshim("ledger", "faults", "-o", "wide", "--config", node.config_path).stdout
        assert "Xid 79: the GPU has fallen off the bus" in shown


def _where(node: SimulatedNode, options: tuple[str, ...]) -> tuple[str, ...]:
    return ("--config", node.config_path, *options[:2], "--pod-resources", "")


def test_a_storm_by_hostile_names_loses_nothing_and_fills_nothing(
    runtime: Runtime, node: SimulatedNode, options: tuple[str, ...], tmp_path: Path
) -> None:
    mine, other = on_gpu(runtime, 0), on_gpu(runtime, 0)
    pid, bus = mine.pid, node.scenario.gpus[0].pci.rpartition(".")[0]
    head = f"4,1,2,-;NVRM: Xid (PCI:{bus}): "
    names = ("a\nNVRM: Xid (PC", "\n4,1,2,-;NVRM:", "NVRM: Xid (PCI", "pid=1, name=x",
             "x, pid=1, name", "\x1b[2J", "\\x0aNVRM: Xid")  # fmt: skip
    with gpu_agent(node, tmp_path, *options) as it:
        eventually(lambda: is_held(it, mine, other), "the ledger has them")
        it.listens()
        it.xid(0, 48, "DBE", pid=pid)
        begun = time.monotonic()
        for n in range(1000):
            name = names[n % len(names)]
            line = f"{head}{(13, 31, 43)[n % 3]}, pid={pid}, name={name}, Ch {n}\n"
            os.write(it.kernel, line.encode())
        eventually(
            lambda: all(
                {code for code, _ in told(it, each)} == {13, 31, 43, 48} for each in (mine, other)
            ),
            "all kinds, of both",
            timeout=30,
        )
        took = time.monotonic() - begun
        # The agent trusts nothing in the names, and keeps all earlier faults.
        assert told(it, mine)[0] == (48, Whose.DEVICE)
        assert {whose for code, whose in told(it, mine) if code != 48} == {Whose.APPLICATION}
        assert {whose for code, whose in told(it, other) if code != 48} == {Whose.NEIGHBOUR}
        assert len(faults(it, mine)) <= 16
        assert {each.pid for each in faults(it, mine)} == {pid}
        path = f"{node.state}/causes/{mine.runtime.containerd.namespace}"
        assert sorted(os.listdir(path)) == sorted((f"{mine.name}.json", f"{other.name}.json"))
        assert all(entry.stat().st_size <= 16 << 10 for entry in os.scandir(path))
        assert "\x1b" not in "".join(each.name for each in faults(it, mine))
        assert took < 30


def test_what_nvml_says_that_a_gpu_needs_is_obeyed_and_its_silence_is_borne(
    runtime: Runtime, node: SimulatedNode, options: tuple[str, ...], tmp_path: Path
) -> None:
    mine = on_gpu(runtime, 0)
    with gpu_agent(node, tmp_path, *options) as it:
        eventually(lambda: is_held(it, mine), "the ledger has it")
        it.listens()
        it.nvml("facts", "0 recovery-action 2\n")
        it.xid(0, 109, "CTX SWITCH TIMEOUT", pid=mine.pid)
        eventually(lambda: told(it, mine) == [(109, Whose.DEVICE)], "NVML's word")
        assert faults(it, mine)[0].action == "reboot the node"
        eventually(lambda: it.states()[0] == "unhealthy", "its health follows, too")
        it.nvml("faults", "any=hang")
        it.xid(0, 62, "PMU halt", pid=mine.pid)
        eventually(lambda: (62, Whose.DEVICE) in told(it, mine), "a hanging NVML is reported")


@pytest.mark.parametrize("node", ['\n[policy]\nmode = "nvidia"\n'], indirect=True, ids=["trusted"])
def test_the_pod_says_what_its_gpu_suffered(
    runtime: Runtime, node: SimulatedNode, options: tuple[str, ...], tmp_path: Path
) -> None:
    train, other = on_gpu(runtime, 0, *in_pod("train")), on_gpu(runtime, 0, *in_pod("other"))
    with ApiServer(str(tmp_path / "account")) as api:
        cluster = (
            "--api-server", "127.0.0.1", "--api-port", str(api.port),
            "--service-account", api.service_account,
        )  # fmt: skip
        with gpu_agent(node, tmp_path, *options, *cluster) as it:
            eventually(lambda: is_held(it, train, other), "the ledger has them")
            it.listens()
            it.xid(0, 31, "Ch 1, MMU Fault", pid=train.pid)
            eventually(lambda: len(api.events) == 2, "an event on each pod")
            for _ in range(50):
                it.xid(0, 31, "Ch 1, MMU Fault", pid=train.pid)
            it.xid(0, 79, "GPU has fallen off the bus.")
            eventually(lambda: len(api.events) == 4, "and of the GPU")
    by_pod: dict[str, list[tuple[str, str]]] = {}
    for _, event in api.events:
        told_of = by_pod.setdefault(event["involvedObject"]["name"], [])
        told_of.append((event["reason"], event["message"]))
        assert event["involvedObject"]["uid"].startswith("uid-")
    reason, message = by_pod["pod-train"][0]
    assert reason == "GPUError"
    assert message == (
        "GPU error: Xid 31 (memory page fault) by this process: an illegal address in a kernel. "
        "Likely the application."
    )
    reason, message = by_pod["pod-other"][0]
    assert reason == "GPUError"
    assert "by another process" in message
    assert "train" not in message
    assert str(train.pid) not in message
    for events in by_pod.values():
        reason, message = events[1]
        assert reason == "GPUFailure"
        assert message.startswith("GPU failure: Xid 79 (GPU has fallen off the bus) on GPU-")
        assert message.endswith("Not the application's fault. The node needs a reboot.")


@pytest.mark.parametrize(
    "node",
    ['\n[guard]\ngpu-memory = "4GiB"\nbeyond = "kill"\ninterval = 0.2\n'],
    indirect=True,
    ids=["kill"],
)
def test_who_takes_more_gpu_memory_than_it_may_is_told_and_then_ended(
    runtime: Runtime, node: SimulatedNode, options: tuple[str, ...], tmp_path: Path
) -> None:
    greedy, modest, alone = on_gpu(runtime, 0), on_gpu(runtime, 0), on_gpu(runtime, 1)
    with gpu_agent(node, tmp_path, *options) as it:
        eventually(lambda: is_held(it, greedy, modest, alone), "the ledger has them")
        it.nvml("processes", _using((0, greedy, 6), (0, modest, 2), (1, alone, 60)))
        eventually(lambda: not is_alive(greedy.pid), "it was killed")
        names = [each.name for each in faults(it, greedy) if each.kind == "memory-limit"]
        assert names[0] == "6.0 GiB of GPU memory, over its limit of 4.0 GiB"
        assert names[-1] == f"{names[0]}, killed by the memory guard"
        eventually(lambda: cause_of(it, greedy), "its shim has stored the cause")
        assert f"{names[-1]} by this container" in cause_of(it, greedy)
        assert is_alive(modest.pid)
        assert is_alive(alone.pid)
        assert faults(it, modest) == faults(it, alone) == ()
        done = [line["done"] for line in it.said("a container exceeds its GPU memory limit")]
        assert done == ["told", "killed"]


def _using(*uses: tuple[int, Container, int]) -> str:
    return "".join(f"{gpu} {each.pid} {gib * GIB} 50 10 0 0\n" for gpu, each, gib in uses)


@pytest.mark.parametrize("node", ["\n[guard]\ninterval = 0.2\n"], indirect=True, ids=["tell"])
def test_a_pod_that_limits_itself_is_told_and_goes_on(
    runtime: Runtime, node: SimulatedNode, options: tuple[str, ...], tmp_path: Path
) -> None:
    mine = on_gpu(runtime, 0, "--annotation", f"{ANNOTATION}=1Gi")
    later = on_gpu(runtime, 1, "--annotation", f"{ANNOTATION}=25%")
    wrong = on_gpu(runtime, 1, "--annotation", f"{ANNOTATION}=much")
    with gpu_agent(node, tmp_path, *options) as it:
        eventually(lambda: is_held(it, mine, later, wrong), "the ledger has them")
        it.nvml("processes", _using((0, mine, 2), (1, wrong, 10)))
        eventually(
            lambda: [each.kind for each in faults(it, mine)] == ["memory-limit"], "it is reported"
        )
        it.nvml("processes", _using((0, mine, 2), (1, later, 30), (1, wrong, 10)))
        # A later sample, in which the first container still uses too much.
        eventually(
            lambda: [each.kind for each in faults(it, later)] == ["memory-limit"], "it is reported"
        )
        assert is_alive(mine.pid)
        assert faults(it, wrong) == ()
        (line,) = it.said("ignoring an invalid GPU memory limit")
        assert line["annotation"] == "much"
        assert {each["done"] for each in it.said("a container exceeds its GPU memory limit")} == {
            "told"
        }
