"""Tests that show that known advisories of similar software do not affect the shim.

The table is in ``advisories.py``; each test that it names must exist.

These tests cannot show that a runtime is safe by itself: runc before 1.3.6 or 1.4.3 and crun before
1.28 have CVE-2024-21626, CVE-2025-31133, -52565, -52881, CVE-2026-41579, -47766 and others. They
cannot show that the GPU's kernel driver is safe either.
"""

from __future__ import annotations

import ast
import functools
import json
import os
import stat
import subprocess
import sys
from typing import TYPE_CHECKING, Any, Final

import anyio
import pytest

from api.ttrpc import RemoteError
from hooks.requests.request import read_request
from integration.simulated import Scenario, SimulatedNode
from tests.harness.launcher import REPOSITORY
from tests.harness.shim import shim_by_hand
from tests.security.advisories import COVERED, MECHANISM, NOT_OURS

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.security,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
]


def test_every_row_names_tests_that_there_are() -> None:
    missing = []
    for row, tests in COVERED.items():
        for test in tests:
            file, _, name = test.partition("::")
            path = os.path.join(REPOSITORY, "tests", file)
            if not os.path.exists(path) or name not in _functions(path):
                missing.append((row, test))
    assert missing == []
    assert not COVERED.keys() & NOT_OURS.keys()
    assert COVERED.keys() == MECHANISM.keys()


@functools.cache
def _functions(path: str) -> set[str]:
    with open(path, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)}


# -- programs -------------------------------------------------------------------------------

# Functions that start programs, or run text as a program.
STARTS: Final = frozenset({"os.system", "os.popen", "fork_exec", "eval", "exec", "compile"})
STARTS_WITH: Final = (
    "os.exec", "os.spawn", "os.posix_spawn", "pty.", "subprocess.", "asyncio.create_subprocess",
    "anyio.run_process", "anyio.open_process", "pickle.", "marshal.", "runpy.", "shelve.",
)  # fmt: skip
MAY_START: Final = {
    ("shim/children.py", "fork_exec"): "every program that the shim starts",
    ("shim/programs.py", "os.posix_spawn"): "the same for the verbs, which have no loop",
    (
        "shim/sandbox/namespaces.py",
        "os.execve",
    ): "the process that holds a pod's namespaces: our own",
    ("shim/verbs/warmstart.py", "os.execv"): "a verb that could not be served warm: our own",
    ("hooks/contributions.py", "marshal.dumps"): "the spec as it came, kept in memory",
    (
        "hooks/contributions.py",
        "marshal.loads",
    ): "the same, to compare with",
    ("hooks/prepared.py", "marshal.dumps"): "what was decided for an image, as values",
    ("hooks/prepared.py", "marshal.loads"): "the same, of a directory of root's; nothing is called",
}


def test_nothing_is_executed_but_by_the_one_function_for_it() -> None:
    found: set[tuple[str, str]] = set()
    for package in ("hooks", "shim", "api"):
        for directory, _, files in os.walk(os.path.join(REPOSITORY, package)):
            for name in files:
                path = os.path.relpath(os.path.join(directory, name), REPOSITORY)
                if name.endswith(".py"):
                    found |= {(path, call) for call in _starting_calls(path)}
    assert found == MAY_START.keys()


def _starting_calls(path: str) -> set[str]:
    with open(os.path.join(REPOSITORY, path), encoding="utf-8") as file:
        tree = ast.parse(file.read())
    calls = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            assert all(word.arg != "shell" for word in node.keywords), f"{path}:{node.lineno}"
            name = ast.unparse(node.func)
            if name in STARTS or name.startswith(STARTS_WITH):
                calls.add(name)
    return calls


LIST_DESCRIPTORS: Final = """
import os, signal, sys
sys.path[:0] = sys.argv[1:]
from shim import loop
from shim.children import Reaper, run
from tests.harness.signals import open_signal_receiver
held = [os.open("/", os.O_RDONLY | os.O_DIRECTORY) for _ in range(1000)]
for fd in held:
    os.set_inheritable(fd, True)
async def reap(reaper):
    with open_signal_receiver(signal.SIGCHLD) as signals:
        async for _ in signals:
            reaper.reap()
async def main():
    async with loop.create_task_group() as tasks:
        reaper = Reaper()
        tasks.start_soon(reap, reaper)
        await loop.checkpoint()
        done = await run(reaper, ["/bin/ls", "/proc/self/fd"])
        print(done.output.decode().split())
        tasks.cancel_scope.cancel()
loop.run(main)
"""


def test_a_program_has_three_descriptors_whatever_else_is_open() -> None:
    """A container could escape by an inherited directory. A thousand are open and inheritable."""
    argv = [sys.executable, "-c", LIST_DESCRIPTORS, REPOSITORY]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    # The fourth descriptor is the directory that ls lists.
    assert done.stdout.strip() == "['0', '1', '2', '3']", done.stderr


# -- grants ---------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["/var/lib/volumes/1234/_data", "tmpfs", "", "/dev/zero"])
def test_volume_that_an_image_declares_is_no_grant(source: str) -> None:
    """VOLUME /var/run/nvidia-container-devices/all is not a mount of /dev/null."""
    mount = {
        "destination": "/var/run/nvidia-container-devices/all",
        "type": "bind",
        "source": source,
        "options": ["rbind"],
    }
    spec = {"process": {"env": []}, "mounts": [mount]}
    assert not read_request(spec).wants_injection
    # The control.
    assert read_request({**spec, "mounts": [{**mount, "source": "/dev/null"}]}).wants_injection


# -- the shim's own doors -------------------------------------------------------------------


@pytest.fixture
def launcher(shim_directory: str) -> str:
    return os.path.join(shim_directory, "containerd-shim-nvidia-v1")


CONNECT: Final = """
import os, socket, sys
os.setgroups([])
os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))
with socket.socket(socket.AF_UNIX) as sock:
    try:
        sock.connect(sys.argv[1])
    except OSError as error:
        sys.exit(error.strerror)
print("connected")
"""


@pytest.mark.anyio
async def test_a_shim_is_reached_by_root_alone_and_leaves_nothing_open_to_others(
    launcher: str,
) -> None:
    async with shim_by_hand(launcher, "c1", "sleep", "1000") as shim:
        await shim.run("c1")
        inodes = set()
        for fd in os.listdir(f"/proc/{shim.pid}/fd"):
            target = os.readlink(f"/proc/{shim.pid}/fd/{fd}")
            inodes |= {target[8:-1]} if target.startswith("socket:[") else set()
        table = await anyio.Path("/proc/net/unix").read_text()
        words = [line.split() for line in table.splitlines()]
        names = [w[7] for w in words if len(w) > 7 and w[6] in inodes]
        assert shim.socket_path in names
        assert not [name for name in names if name.startswith("@")], "an abstract socket"

        socket_mode = os.stat(shim.socket_path).st_mode
        assert stat.S_ISSOCK(socket_mode)
        assert stat.S_IMODE(socket_mode) == 0o600
        assert not os.stat(os.path.dirname(shim.socket_path)).st_mode & 0o077
        argv = [sys.executable, "-I", "-S", "-c", CONNECT, shim.socket_path]
        done = await anyio.run_process([*argv, "65534"], check=False)
        assert done.stderr.strip() == b"Permission denied"
        control = await anyio.run_process([*argv, "0"], check=False)
        assert control.stdout.strip() == b"connected", control.stderr

        bundle = os.path.join(shim.directory, "c1")
        assert not os.stat(bundle).st_mode & 0o077
        # containerd creates the rootfs and the spec, and the runtime init.pid.
        for name in set(os.listdir(bundle)) - {"rootfs", "config.json", "init.pid"}:
            seen = os.lstat(os.path.join(bundle, name))
            assert stat.S_ISLNK(seen.st_mode) or not seen.st_mode & 0o077, name
        await shim.end("c1")


@pytest.mark.anyio
async def test_ids_that_are_paths_are_refused(launcher: str) -> None:
    async with shim_by_hand(launcher, "c1", "sleep", "1000") as shim:
        await shim.run("c1")
        before = sorted(os.listdir(shim.directory))
        bundle = os.path.join(shim.directory, "c1")
        for name in ("../c1", "a/b", "/etc", "..", "c1/../c1", "x\0y", "a" * 200):
            with pytest.raises(RemoteError, match=r"NVSHIM-E\d+"):
                await shim.call("Create", id=name, bundle=bundle)
            with pytest.raises(RemoteError, match=r"NVSHIM-E\d+"):
                await shim.exec("c1", name, "true")
        assert sorted(os.listdir(shim.directory)) == before
        await shim.end("c1")


@pytest.mark.anyio
async def test_nothing_in_a_checkpoint_is_a_request(
    launcher: str, tmp_path: Path, workshop: str
) -> None:
    """A checkpoint may contain a spec, annotations and a record; the shim ignores them."""
    saved = tmp_path / "saved"
    saved.mkdir()
    (saved / "inventory.img").write_bytes(bytes.fromhex("16313158"))
    (saved / "descriptors.json").write_text("[]")
    asks: dict[str, Any] = {
        "annotations": {"cdi.k8s.io/gpu": "nvidia.com/gpu=all"},
        "process": {"env": ["NVIDIA_VISIBLE_DEVICES=all"]},
        "edits": {"devices": [{"path": "/dev/nvidia0", "major": 195, "minor": 0}]},
    }
    for name in ("config.json", "spec.dump", "config.dump", "nvidia.json"):
        (saved / name).write_text(json.dumps(asks))
    with SimulatedNode.create(f"{workshop}/saved-node", Scenario.load("one")) as node:
        environment = {"NVSHIM_CONFIG": node.config_path}
        async with shim_by_hand(launcher, "c1", "true", environment=environment) as shim:
            before = shim.spec("c1")
            await shim.create("c1", checkpoint=str(saved))
            assert shim.spec("c1") == before
            assert not os.path.exists(os.path.join(shim.directory, "c1", "nvidia.json"))
            await shim.call("Delete", id="c1")
