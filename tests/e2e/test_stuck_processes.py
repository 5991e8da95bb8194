"""Processes with files on a hanging file system do not block programs that scan processes.

They do what an unprivileged container can do: they name themselves like a shim; and they execute,
open, map, and use as working directory files on a volume whose server has stopped.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import pytest

from integration.containers.bundles import TASKS
from integration.simulated import Scenario, SimulatedNode
from shim.causes.agent import agent_of
from tests.harness.fuse import FILE, FuseServer, fuse
from tests.harness.nvshim import nvshim, start_nvshim
from tests.harness.trees import small_tree
from tests.harness.waiting import eventually

PROGRAM: Final = "containerd-shim-nvidia-v1"
SHIM: Final = (PROGRAM, "-namespace", "k8s.io", "-id", "web", "-address", "/run/c.sock")

# Has its own mounts: the volume, which looks like a bundle, and files on it that look like a GPU's
# node.
PREPARE: Final = """if True:
    import mmap, os, subprocess, sys
    words, volume, file = sys.argv[1:-2], *sys.argv[-2:]
    def mount(*words):
        subprocess.run(["mount", *words], check=True)
    mount("-t", "tmpfs", "tmpfs", "/mnt")
    mount("-t", "tmpfs", "tmpfs", "/dev")
    for node in ("/dev/nvidia0", "/mnt/nvidia1"):
        os.close(os.open(node, os.O_CREAT))
        mount("--bind", f"{volume}/{file}", node)
    os.chdir(volume)
    node = os.open("/dev/nvidia0", os.O_RDONLY)
    mapped = mmap.mmap(node, 4096, prot=mmap.PROT_READ)
    other = os.open("/mnt/nvidia1", os.O_RDONLY)
    os.set_inheritable(other, True)
"""
# Its working directory, open files and mapped files are on the volume.
OPENS: Final = (
    PREPARE
    + """
    os.write(1, b"ready\\n")
    sys.stdin.read()
"""
)
# Its program is on the volume, too.
EXECUTES: Final = (
    PREPARE
    + """
    os.write(1, b"ready\\n")
    os.execv(f"{volume}/{file}", ["containerd-shim-nvidia-v1", "1000"])
"""
)
NOBODY: Final = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
CONTAINERS: Final = {
    "a container of its own users": (
        *NOBODY, "unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork",
        "--kill-child",
    ),
    "a container of the node's root": ("unshare", "--mount", "--pid", "--fork", "--kill-child"),
    "one that sees the node's processes": ("unshare", "--mount"),
}  # fmt: skip


@pytest.fixture
def volume() -> Iterator[FuseServer]:
    """Yield a volume with a program that every user may enter."""
    directory = tempfile.mkdtemp(prefix="nvshim-volume-")
    os.chmod(directory, 0o755)
    try:
        shutil.copy("/bin/sleep", f"{directory}/sleep")
        # On the host it has the same path as in the container, as a kubelet's volume can have.
        os.makedirs(f"{directory}/{TASKS}/k8s.io")
        place = f"{directory}/{TASKS}/k8s.io/web"
        with fuse(place, f"{directory}/sleep", mode=0o755) as server:
            yield server
    finally:
        shutil.rmtree(directory)


@contextmanager
def hostile(volume: FuseServer) -> Iterator[list[int]]:
    """Yield such processes, in containers of each kind, once their volume has stopped answering."""
    with ExitStack() as processes:
        for within in CONTAINERS.values():
            for script in (OPENS, EXECUTES):
                # It executes its interpreter under the name of a shim.
                words = [*SHIM, volume.mount_point, FILE]
                program = 'exec -a "$1" python3 -c "$0" "${@:2}"'
                argv = [*within, "bash", "-c", program, script, *words]
                process = processes.enter_context(
                    subprocess.Popen(
                        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
                    )
                )
                processes.callback(os.killpg, process.pid, signal.SIGKILL)
                assert process.stdout is not None
                assert process.stdout.readline() == b"ready\n"
        pids = list(_at_work(volume))
        assert len(pids) == 2 * len(CONTAINERS)
        eventually(lambda: sorted(map(_waits_in, pids)) == _AT_REST, "they read, or sleep")
        volume.hang()
        try:
            yield pids
            ours = [line for line in volume.askers if os.getpid() in line]
            assert not ours, "this process has opened a file on the volume"
        finally:
            volume.go_on()


def _at_work(volume: FuseServer) -> Iterator[int]:
    """Return the processes whose working directory is on the volume."""
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            if os.readlink(f"/proc/{name}/cwd") == volume.mount_point:
                yield int(name)
        except OSError:
            continue


_READ, _SLEEP = {"x86_64": ("0", "230"), "aarch64": ("63", "115")}[os.uname().machine]
_AT_REST: Final = sorted([(FILE, _SLEEP), ("", _READ)] * len(CONTAINERS))


def _waits_in(pid: int) -> tuple[str, str]:
    """Return whether a process executes a file on the volume, and its system call.

    A waiting process no longer needs its program.
    """
    program = os.path.basename(os.readlink(f"/proc/{pid}/exe"))
    call, *_ = Path(f"/proc/{pid}/syscall").read_text("ascii").split()
    return FILE if program == FILE else "", call


@pytest.fixture(scope="module")
def node(workshop: str) -> Iterator[SimulatedNode]:
    with SimulatedNode.create(f"{workshop}/stuck", Scenario.load("two")) as node:
        yield node


def test_whoever_looks_at_processes_is_answered(
    node: SimulatedNode, volume: FuseServer, tmp_path: Path
) -> None:
    prefix = str(tmp_path / "opt")
    small_tree(f"{prefix}/1.0-00000000")
    (tmp_path / "state").mkdir()
    config = ("--config", node.config_path)
    where = (*config, "--containerd-state", str(tmp_path / "state"))
    installed = ("--prefix", prefix, "--no-links")
    with hostile(volume) as pids:
        # No state directory is configured, so it searches for those of shims.
        assert not {row["pid"] for row in nvshim("ps", *config, "-o", "json").items} & set(pids)
        for words in (
            ("ps", *where),
            ("list", *where),
            ("ledger", "list", *config),
            ("ledger", "check", *where),
            ("explain", "web", *config),
            ("status", *installed),
            ("install", "--collect", "--dry-run", *installed),
            ("uninstall", "--dry-run", *installed, *config),
            ("doctor", *config, "--prefix", prefix),
            ("drain", "0", *where),
            ("drain", "--driver", *where),
            ("reset", "1", *where),
        ):
            answer = nvshim(*words, "-o", "json", check=False)
            assert "Traceback" not in answer.stderr, words
            if words[0] in {"drain", "reset"}:
                held = json.loads(answer.stdout or '{"holders": []}')["holders"]
                assert not {each["pid"] for each in held} & set(pids), words
        nvshim("undrain", "0", "1", *config, check=False)
        nvshim("undrain", "--driver", *config, check=False)


def test_an_agent_keeps_its_ledger_and_can_be_killed_and_started_again(
    node: SimulatedNode, volume: FuseServer, tmp_path: Path
) -> None:
    # containerd's state is not configured, so the agent searches for shims itself.
    words = ("node", "--config", node.config_path, "--cdi-spec", "none", "--device-plugin", "no")
    ledger = Path(node.state, "ledger.json")
    with hostile(volume):
        for _ in range(2):
            ledger.unlink(missing_ok=True)
            with open(tmp_path / "log", "a+", encoding="utf-8") as log:
                agent = start_nvshim(*words, "--kernel-log", "", stderr=log, text=True)
                try:
                    eventually(ledger.exists, "a ledger")
                    assert agent_of(node.state) == agent.pid
                finally:
                    agent.kill()
                    agent.wait(60)
                    log.seek(0)
                    sys.stderr.write(log.read())  # shown if the test fails
