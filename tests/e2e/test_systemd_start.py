"""A fork server that starts with the node: the first shim is forked from it."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from integration.timeouts import PATIENCE
from tests.harness.launcher import REPOSITORY
from tests.harness.node import Node
from tests.harness.runtime import is_alive
from tests.harness.waiting import eventually

pytestmark = pytest.mark.anyio

UNIT = os.path.join(REPOSITORY, "integration", "systemd", "containerd-shim-nvidia.service")


@pytest.fixture
async def containerd(node: Node) -> AsyncIterator[Node]:
    """Return a node where this process listens at containerd's address."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(node.address)
        listener.listen()
        yield node


def _argv(node: Node, *before: str) -> list[str]:
    return [*before, node.launcher, "-address", node.address, "fork-server"]


@contextmanager
def _standing(node: Node, *before: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(_argv(node, *before)) as server:
        try:
            yield server
            server.terminate()
            assert server.wait(30 * PATIENCE) == 0
        finally:
            server.kill()


@pytest.mark.parametrize(
    "before",
    [(), ("prlimit", "--nofile=300:"), ("nice", "-n", "5")],
    ids=["as it is", "other limits", "nicer"],
)
async def test_the_first_shim_comes_from_it(containerd: Node, before: tuple[str, ...]) -> None:
    with _standing(containerd, *before) as server:
        eventually(containerd.server_listens, "it listens")
        assert containerd.servers() == [server.pid]
        shim = await containerd.start("c1")
        assert containerd.servers() == [server.pid]
        ours = _limits(os.getpid())
        files = ours.pop(resource.RLIMIT_NOFILE)[1]
        assert _limits(shim) == {**ours, resource.RLIMIT_NOFILE: (files, files)}
        assert _content(shim, "cgroup") == _content(os.getpid(), "cgroup")
        assert os.getpriority(os.PRIO_PROCESS, shim) == os.getpriority(os.PRIO_PROCESS, 0)
    assert is_alive(shim)


def _limits(pid: int) -> dict[int, tuple[int, int]]:
    numbers = {getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}
    return {number: resource.prlimit(pid, number) for number in numbers}


def _content(pid: int, name: str) -> bytes:
    with open(f"/proc/{pid}/{name}", "rb") as file:
        return file.read()


async def test_it_comes_into_containerds_cgroup(containerd: Node) -> None:
    root = "/sys/fs/cgroup"
    parent = root if os.path.exists(f"{root}/cgroup.controllers") else f"{root}/pids"
    unit = f"{parent}/nvshim-unit-{os.getpid()}"
    os.mkdir(unit)
    try:
        enter = f'echo 0 > {unit}/cgroup.procs; exec "$@"'
        with _standing(containerd, "sh", "-c", enter, "sh") as server:
            eventually(containerd.server_listens, "it listens")
            assert _content(server.pid, "cgroup") == _content(os.getpid(), "cgroup")
    finally:
        os.rmdir(unit)


async def test_in_another_namespace_it_says_so_and_leaves_nothing(containerd: Node) -> None:
    done = subprocess.run(  # noqa: ASYNC221 - nothing else runs in this loop
        _argv(containerd, "unshare", "--mount", "--uts"),
        capture_output=True, text=True, timeout=30 * PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith("NVSHIM-E0701")
    assert "(ns/mnt, ns/uts)" in done.stderr
    assert containerd.servers() == []


async def test_without_containerd_it_says_so(node: Node) -> None:
    done = subprocess.run(  # noqa: ASYNC221 - as above
        _argv(node), capture_output=True, text=True, timeout=30 * PATIENCE, check=False
    )
    assert (done.returncode, done.stderr[:12]) == (1, "NVSHIM-E0700")


async def test_it_takes_over_from_one_that_was_left_behind(containerd: Node) -> None:
    await containerd.start("c1")
    (left,) = containerd.servers()
    with _standing(containerd) as server:
        lock = f"{containerd.server_socket()}.lock"
        eventually(lambda: _has_open(server.pid, lock), "it waits for the lock")
        os.kill(left, signal.SIGTERM)
        eventually(lambda: not is_alive(left), "the other one exits")
        eventually(containerd.server_listens, "it listens")
        assert containerd.servers() == [server.pid]
        await containerd.start("c2")


def _has_open(pid: int, path: str) -> bool:
    try:
        files = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
    except FileNotFoundError:
        return False
    return path in files


def test_systemd_understands_the_unit(tmp_path: Path, shim_directory: str) -> None:
    if not shutil.which("systemd-analyze"):
        pytest.skip("needs systemd-analyze")
    program = os.path.join(shim_directory, "containerd-shim-nvidia-v1")
    with open(UNIT, encoding="utf-8") as file:
        text = file.read()
    assert "/usr/local/bin/containerd-shim-nvidia-v1" in text
    unit = tmp_path / os.path.basename(UNIT)
    unit.write_text(text.replace("/usr/local/bin/containerd-shim-nvidia-v1", program))
    (tmp_path / "containerd.service").write_text("[Service]\nExecStart=/bin/true\n")
    done = subprocess.run(
        ["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False,
        env={**os.environ, "SYSTEMD_UNIT_PATH": f"{tmp_path}:"},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
