"""Which container holds which GPU and its usage, and which runs without its allocation."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from api.proto import deviceplugin_pb2 as pb
from integration.containers.bundles import TASKS
from integration.simulated import Scenario, SimulatedNode
from tests.harness.kubelet_plugins import Assignment, KubeletPlugins
from tests.harness.launcher import REPOSITORY
from tests.harness.nvshim import nvshim, start_nvshim
from tests.harness.runtime import Container, Runtime, is_alive, remove_fifos
from tests.harness.terminal import Terminal
from tests.harness.waiting import eventually
from tools.containerd import PrivateContainerd
from tools.images import GLIBC

HOSTILE: Final = "evil\x1b[2Jname"


@pytest.fixture
def node(
    runtime: Runtime, tmp_path: Path, configure: Callable[[str], None]
) -> Iterator[SimulatedNode]:
    """Return a node with two GPUs; the shim is configured for it."""
    if not runtime.is_ours:
        pytest.skip("containerd's own shim knows nothing of GPUs")
    with SimulatedNode.create(str(tmp_path / "node"), Scenario.load("two")) as node:
        with open(node.config_path, encoding="utf-8") as file:
            configure(file.read())
        yield node
        runtime.close()
        remove_fifos(runtime.containerd)


@pytest.fixture
def where(node: SimulatedNode, containerd: PrivateContainerd) -> tuple[str, ...]:
    state = containerd.bundle("x").rpartition("/io.containerd.")[0]
    return ("--config", node.config_path, "--containerd-state", state)


@contextmanager
def agent(where: tuple[str, ...], tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    words = ["--cdi-spec", "none", "--poll", "1000", "--device-plugin", "no", "--kernel-log", ""]
    with open(tmp_path / "log", "a+", encoding="utf-8") as log:
        process = start_nvshim("node", *where, *words, stderr=log, text=True)
        try:
            yield process
        finally:
            process.kill()
            process.wait()
            log.seek(0)
            sys.stderr.write(log.read())  # shown if the test fails


def on_gpu(runtime: Runtime, number: int, *flags: str) -> Container:
    chosen = ("--env", f"NVIDIA_VISIBLE_DEVICES={number}", *flags)
    return runtime.start_idle(image=GLIBC, flags=chosen)


def uuids(where: tuple[str, ...]) -> list[str]:
    return [row["uuid"] for row in nvshim("list", *where, "-o", "json").items]


def test_the_ledger_follows_containers_and_outlives_the_agent(
    runtime: Runtime, node: SimulatedNode, where: tuple[str, ...], tmp_path: Path
) -> None:
    def ledger() -> list[dict[str, Any]]:
        try:
            with open(f"{node.state}/ledger.json", encoding="utf-8") as file:
                found: list[dict[str, Any]] = json.load(file)["holdings"]
        except FileNotFoundError:
            return []
        return found

    def held() -> dict[str, list[str]]:
        return {each["id"]: each["devices"] for each in ledger() if each["pid"]}

    one, two = uuids(where)
    with agent(where, tmp_path) as process:
        first, second = on_gpu(runtime, 0), on_gpu(runtime, 1)
        runtime.start_idle(image=GLIBC)
        both = {first.name: [one], second.name: [two]}
        eventually(lambda: held() == both, "the ledger has both")
        before = ledger()
        process.send_signal(signal.SIGKILL)
        process.wait()
    os.unlink(f"{node.state}/ledger.json")
    with agent(where, tmp_path):
        assert eventually(ledger, "a ledger") == before
        # The container has exited, and its task still exists.
        second.kill()
        eventually(lambda: held() == {first.name: [one]}, "one has exited")
        first.remove()
        eventually(lambda: ledger() == [], "the other was deleted")
        third = on_gpu(runtime, 1)
        eventually(lambda: held() == {third.name: [two]}, "another one is listed")
    listed = nvshim("ledger", "list", *where, "-o", "json").items
    assert [(row["id"], row["devices"], row["stale"], row["orphan"]) for row in listed] == [
        (third.name, [two], None, None)
    ]


def test_what_should_not_be_is_found(
    runtime: Runtime, node: SimulatedNode, where: tuple[str, ...]
) -> None:
    container = on_gpu(runtime, 0)
    assert nvshim("ledger", "check", *where).stdout == ""
    # A shim dies while containerd is down.
    containerd = runtime.containerd.pid
    assert containerd
    (shim,) = runtime.containerd.shim_pids()
    os.kill(containerd, signal.SIGSTOP)
    try:
        os.kill(shim, signal.SIGKILL)
        eventually(lambda: not is_alive(shim), "the shim is dead")
        checked = nvshim("ledger", "check", "-o", "wide", *where, check=False)
        assert checked.code == 3
        assert "its shim is gone, but it still runs" in checked.stdout
    finally:
        os.kill(containerd, signal.SIGCONT)
    bundle = runtime.containerd.bundle(container.name)
    eventually(lambda: not os.path.exists(bundle), "containerd cleans up")

    # The driver is reinstalled, as by its container: same paths, different files.
    stale = on_gpu(runtime, 1)
    assert nvshim("ps", "--stale", *where, "-o", "json").items == []
    assert _holders(where) == [[], [(stale.name, None)]]
    library = os.path.realpath(f"{node.driver_root}/usr/lib/x86_64-linux-gnu/libcuda.so.1")
    shutil.copy2(library, f"{library}.new")
    os.rename(f"{library}.new", library)
    (row,) = nvshim("ps", "--stale", *where, "-o", "json").items
    assert row["id"] == stale.name
    assert row["stale"] == f"{library} is not the one that it was made with"
    assert _holders(where) == [[], [(stale.name, row["stale"])]]
    assert f"{stale.name} (stale)" in nvshim("list", "-o", "wide", *where).stdout
    assert nvshim("ps", "--orphans", *where, "-o", "json").items == []
    assert nvshim("ledger", "check", *where, check=False).code == 3


def _holders(where: tuple[str, ...]) -> list[list[tuple[str, str | None]]]:
    """Return, from `nvshim list`, each GPU's containers and why they are stale."""
    rows = nvshim("list", *where, "-o", "json").items
    return [[(each["id"], each["stale"]) for each in row["containers"]] for row in rows]


def test_top_attributes_processes_to_their_containers(
    runtime: Runtime, node: SimulatedNode, where: tuple[str, ...]
) -> None:
    container = on_gpu(runtime, 0, "--annotation", f"nerdctl/name={HOSTILE}")
    with subprocess.Popen(["sleep", "1000"]) as foreign:
        try:
            Path(node.state, "nvml-processes").write_text(
                f"0 {container.pid} 1073741824 60 20 5 0\n1 {foreign.pid} 1048576 7 1 0 0\n"
            )
            _is_attributed(where, container, foreign.pid)
            _is_live(where)
        finally:
            foreign.kill()


def _is_attributed(where: tuple[str, ...], container: Container, foreign: int) -> None:
    frame = nvshim("top", "--once", "-o", "json", *where).document
    first, second = frame["devices"]
    (use,) = first["containers"]
    assert (use["container"]["id"], use["container"]["name"]) == (container.name, HOSTILE)
    assert (use["memory_bytes"], use["sm_percent"], use["encoder_percent"]) == (1 << 30, 60, 5)
    assert use["processes"] == [{"pid": container.pid, "name": "sleep"}]
    assert use["holds"]
    (nobodys,) = second["containers"]
    assert nobodys["container"] is None
    assert nobodys["processes"] == [{"pid": foreign, "name": "sleep"}]
    table = nvshim("top", "--once", "-o", "wide", *where).stdout
    assert "evil\\x1b[2Jname" in table
    assert "\x1b" not in table
    found = nvshim("ledger", "check", "-o", "json", *where).document
    assert [row["pid"] for row in found["foreign"]] == [foreign]
    assert found["holdings"] == []


def _is_live(where: tuple[str, ...]) -> None:
    argv = [sys.executable, "-m", "integration.cli", "top", "--interval", "0.2", *where]
    with Terminal(argv, rows=30, columns=150) as terminal:
        _wait_for(terminal, "evil\\x1b[2Jname")
        _wait_for(terminal, "(no container)")
        assert HOSTILE not in terminal.screen
        terminal.resize(5, 60)
        _wait_for(terminal, "more lines")
        terminal.type("q")
        assert terminal.wait() == 0
        # The command has restored the screen and the cursor.
        assert terminal.screen.endswith("\x1b[?25h\x1b[?1049l")


def _wait_for(terminal: Terminal, text: str) -> None:
    """Wait for text, without printing the whole screen on failure."""
    try:
        terminal.wait_for(text, timeout=30)
    except AssertionError:
        pytest.fail(f"{text!r} is not on the screen; its end: {terminal.screen[-2000:]!r}")


# -- containers that run without the device that the kubelet allocated -------------------


RECORDED: Final = os.path.join(REPOSITORY, "tests", "recorded", "kubernetes-1.36", "specs")


# Without enable_cdi the spec lacks the device, and the pod was Running and Ready.
WITHOUT: Final = "containerd-1.7.24/nvidia/gpu-one.main.enable_cdi-unset.json"


WITH: Final = "containerd-2.1.9/nvidia/gpu-one.main.json"


PRIVILEGED: Final = "containerd-2.1.9/nvidia/privileged.main.json"


_CONTAINER: Final = "f" * 64


@pytest.mark.parametrize(
    ("recorded", "runs", "code", "pid", "late"),
    [
        (WITHOUT, True, 3, 77, 2.5),  # a busy kubelet
        (WITHOUT, False, 0, 0, 0),  # its image may not be pulled yet
        (WITH, True, 0, None, 0),
        (PRIVILEGED, True, 0, None, 0),  # it has every device node of the host
    ],
)
def test_what_the_kubelet_gave_and_a_running_container_does_not_have_is_a_fault(
    own_gpus: SimulatedNode,
    tmp_path: Path,
    recorded: str,
    runs: bool,
    code: int,
    pid: int | None,
    late: float,
) -> None:
    with open(os.path.join(RECORDED, recorded), encoding="utf-8") as file:
        spec = json.load(file)["spec"]
    bundle = tmp_path / "state" / TASKS / "k8s.io" / _CONTAINER
    proc, shim = tmp_path / "proc" / "77", tmp_path / "proc" / "76"
    for directory in (bundle, proc, shim):
        directory.mkdir(parents=True)
    (bundle / "config.json").write_text(json.dumps(spec))
    (proc / "stat").write_text("77 (sleep) S 76 " + "0 " * 40)
    (shim / "stat").write_text("76 (containerd-shim) S 1 " + "0 " * 40)
    (shim / "cmdline").write_text("/usr/bin/containerd-shim-runc-v2")
    (proc / "cgroup").write_text(f"0::/kubepods/besteffort/pod/{_CONTAINER}\n")
    if runs:
        (bundle / "init.pid").write_text("77")
    annotations = spec["annotations"]
    pod = annotations["io.kubernetes.cri.sandbox-name"]
    uuid = own_gpus.scenario.gpus[0].uuid
    given = Assignment(
        pod, "default", "main", "nvidia.com/gpu", (uuid,), pb.ContainerAllocateResponse()
    )
    socket = str(tmp_path / "pod-resources.sock")
    with KubeletPlugins(str(tmp_path / "plugins"), pod_resources=socket) as kubelet:
        kubelet.assignments.append(given)
        kubelet.late = late
        words = (
            "ledger", "check", "--config", own_gpus.config_path, "--pod-resources", socket,
            "--containerd-state", str(tmp_path / "state"), "--procfs", str(tmp_path / "proc"),
        )  # fmt: skip
        checked = nvshim(*words, "-o", "json", check=False)
        shown = nvshim(*words, "-o", "wide", check=False)
    unheld: list[dict[str, Any]] = checked.document["unheld"]
    assert (checked.code, shown.code) == (code, code), checked.stderr
    if pid is None:
        assert unheld == []
        return
    uid = annotations["io.kubernetes.cri.sandbox-uid"] if pid else ""
    assert unheld == [
        {"namespace": "default", "pod": pod, "container": "main", "resource": "nvidia.com/gpu",
         "device": uuid, "pid": pid, "pod_uid": uid}
    ]  # fmt: skip
    assert ("process 77" in shown.stdout) is bool(pid)
    assert uuid in shown.stdout
