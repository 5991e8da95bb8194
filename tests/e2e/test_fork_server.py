"""The fork server forks ordinary shims, and shims also start without it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import anyio
import pytest

from api.ttrpc.client import connect
from integration.timeouts import PATIENCE
from shim.verbs.warmstart import READY_LINK, STARTING_LINK
from tests.harness.launcher import INTERPRETER, REPOSITORY
from tests.harness.node import Node, node_of, pids, words_of
from tests.harness.runtime import is_alive
from tests.harness.waiting import eventually, settled
from tools.launcher import compile_native, write_launcher

pytestmark = pytest.mark.anyio


def _arguments(pid: int) -> str:
    """Return the address of a process's arguments: random at exec, and inherited by fork."""
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[45]


def _is_forked_by(pid: int, server: int) -> bool:
    return _arguments(pid) == _arguments(server)


async def test_the_first_start_leaves_one_behind_and_the_next_ones_come_from_it(
    node: Node,
) -> None:
    first = await node.start("c1")
    (server,) = node.servers()
    assert not _is_forked_by(first, server)
    for name in ("c2", "c3"):
        assert _is_forked_by(await node.start(name), server)
    assert node.servers() == [server]

    def switches() -> list[str]:
        with open(f"/proc/{server}/status") as file:
            return [line for line in file if "ctxt_switches" in line]

    # Without requests it does nothing.
    before = switches()
    await anyio.sleep(2)
    assert switches() == before


async def test_a_verb_that_needs_no_new_shim_leaves_the_waiting_process_to_the_next(
    node: Node,
) -> None:
    await node.start("c1")
    before = node.wait_for_spares()
    assert await node.start("c2") in before
    waiting = set(node.wait_for_spares())
    for name in ("member-1", "member-2"):
        node.shims.bundle(name, "true", annotations={"io.containerd.runc.v2.group": "c2"})
        assert node.shims.start_verb(name) == f"unix://{node.sockets[-1]}"
        (kept,) = waiting = waiting & set(node.wait_for_spares(given_back=1))
    # Where that came late, others were forked meanwhile and are first.
    assert kept in [await node.start("c3"), await node.start("c4")]


def _observed(pid: int) -> dict[str, Any]:
    """Return everything that others can see of a process, without its ids and its memory."""
    status: dict[str, str] = {}
    with open(f"/proc/{pid}/status") as file:
        for line in file:
            key, _, value = line.partition(":")
            status[key] = value.strip()
    kept = (
        "Name", "Umask", "PPid", "TracerPid", "Uid", "Gid", "FDSize", "Groups", "Kthread", "SigBlk",
        "SigIgn", "SigCgt", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs",
        "Seccomp", "Seccomp_filters", "Cpus_allowed", "Mems_allowed", "Threads", "CoreDumping",
    )  # fmt: skip
    seen: dict[str, Any] = {key: status.get(key) for key in kept}
    for name in ("limits", "cgroup", "oom_score_adj", "comm", "personality", "coredump_filter",
        "timerslack_ns", "loginuid", "sessionid", "attr/current", "timens_offsets",
    ):  # fmt: skip
        with suppress(OSError), open(f"/proc/{pid}/{name}") as file:
            seen[name] = file.read()
    for name in sorted(os.listdir(f"/proc/{pid}/ns")):
        seen[f"ns {name}"] = os.readlink(f"/proc/{pid}/ns/{name}")
    with open(f"/proc/{pid}/environ", "rb") as file:
        seen["environ exists"] = bool(file.read())
    seen["command line"] = words_of(pid)
    seen["exe"] = os.readlink(f"/proc/{pid}/exe")
    seen["cwd"] = os.readlink(f"/proc/{pid}/cwd")
    seen["root"] = os.readlink(f"/proc/{pid}/root")
    seen["leads its group"] = os.getpgid(pid) == pid
    seen["session"] = os.getsid(pid)
    seen["priority"] = os.getpriority(os.PRIO_PROCESS, pid)
    seen["scheduler"] = os.sched_getscheduler(pid)
    # Sockets and pipes have numbers, so compare only the kind of each descriptor.
    seen["descriptors"] = descriptors = {}
    for fd in sorted(os.listdir(f"/proc/{pid}/fd"), key=int):
        with suppress(FileNotFoundError):  # closed in the meantime
            path = os.readlink(f"/proc/{pid}/fd/{fd}")
            descriptors[fd] = path.split("[")[0].replace(str(pid), "PID")
    return seen


async def test_a_warm_shim_differs_in_nothing_that_can_be_observed(node: Node) -> None:
    # In capitals, because random directory names have none.
    cold = await node.start("ID-A")
    warm = await node.start("ID-B")
    assert _is_forked_by(warm, node.servers()[0])

    def alike(pid: int, name: str) -> dict[str, Any]:
        seen = _observed(pid)
        seen["cwd"] = seen["cwd"].replace(f"/{name}", "/NAME")
        seen["command line"] = [w.replace(name, "NAME") for w in seen["command line"]]
        seen["descriptors"] = {
            fd: path.replace(f"/{name}/", "/NAME/") for fd, path in seen["descriptors"].items()
        }
        return seen

    # The connections that queried their pids are still closing.
    settled(lambda: alike(warm, "ID-B") == alike(cold, "ID-A"), expected=True)
    assert alike(warm, "ID-B") == alike(cold, "ID-A")


def _script(path: str, body: str) -> None:
    with open(path, "w") as file:
        file.write(f"#!/bin/sh\n{body}\n")
    os.chmod(path, 0o755)


async def test_what_a_warm_shim_starts_has_the_environment_of_its_own_verb(node: Node) -> None:
    await node.start("c1")
    marker = os.path.join(node.shims.directory, "bin")
    os.mkdir(marker)
    node.shims.environment = {"PATH": f"{marker}:{os.environ['PATH']}"}
    _script(f"{marker}/runc", f'echo "$PATH" > {marker}/path; exec /usr/sbin/runc "$@"')
    pid = await node.start("c2")
    assert _is_forked_by(pid, node.servers()[0])
    async with connect(node.sockets[-1]) as node.shims.client:
        await node.shims.create("c2")
        await node.shims.call("Delete", id="c2")
    assert (await anyio.Path(f"{marker}/path").read_text()).startswith(marker)


async def test_a_fork_server_that_was_killed_costs_nobody_anything(node: Node) -> None:
    await node.start("c1")
    (server,) = node.servers()
    warm = await node.start("c2")
    os.kill(server, signal.SIGKILL)
    eventually(lambda: not is_alive(server), "it is gone")
    assert is_alive(warm)
    third = await node.start("c3")
    (successor,) = node.servers()
    assert successor != server
    assert not _is_forked_by(third, successor)
    assert _is_forked_by(await node.start("c4"), successor)


@pytest.mark.serial
async def test_one_that_does_not_answer_is_not_waited_for_and_forks_nothing_later(
    node: Node,
) -> None:
    await node.start("c1")
    (server,) = node.servers()
    os.kill(server, signal.SIGSTOP)
    began = time.monotonic()
    pid = await node.start("c2", wait=False)
    assert time.monotonic() - began < 3
    assert not _is_forked_by(pid, server)
    os.kill(server, signal.SIGCONT)
    # When it sleeps again it has handled the connection.
    node.wait_for_spares()
    assert [p for p in pids() if {"c2", node.address} <= set(words_of(p))] == [pid]
    assert _is_forked_by(await node.start("c3"), server)


@pytest.mark.parametrize("file", ["lib/shim/pod/container.py", "containerd-shim-nvidia-v1.py"])
async def test_it_ends_when_its_files_have_changed(tmp_path: Path, file: str) -> None:
    for room in ("api", "hooks", "shim"):
        shutil.copytree(f"{REPOSITORY}/{room}", tmp_path / "lib" / room)
    launcher = tmp_path / "containerd-shim-nvidia-v1"
    libraries = [str(tmp_path / "lib"), f"{REPOSITORY}/.cache/site"]
    write_launcher(f"{launcher}.py", interpreter=INTERPRETER, library_paths=libraries)
    compile_native(str(launcher), compiler="gcc")
    async with node_of(str(launcher)) as node:
        await node.start("c1")
        (server,) = node.servers()
        arguments = _arguments(server)
        os.utime(tmp_path / file)
        assert _arguments(await node.start("c2", wait=False)) != arguments
        eventually(lambda: not is_alive(server), "the old one exits")


# Nothing, a byte, a huge message, no descriptor, zeros.
_GARBAGE: Final = (
    b"", b"\x01", b"\xff\xff\xff\xff", b"\x05\x00\x00\x00hello", b"\x00" * 100,
)  # fmt: skip


async def test_a_malformed_request_is_not_answered_and_harms_nobody(node: Node) -> None:
    await node.start("c1")
    (server,) = node.servers()
    assert os.stat(node.server_socket()).st_mode & 0o777 == 0o600
    for number, garbage in enumerate(_GARBAGE):
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(20 * PATIENCE)
            client.connect(node.server_socket())
            client.sendall(garbage)
            with suppress(ConnectionResetError):  # it closed with some of the garbage unread
                client.shutdown(socket.SHUT_WR)
                assert client.recv(1) in {b",", b""}, garbage
                assert client.recv(16) == b"", garbage
        assert _is_forked_by(await node.start(f"after{number}"), server), garbage


async def test_many_starts_at_once_leave_one_fork_server(node: Node) -> None:
    for number in range(5):
        node.shims.bundle(f"c{number}", "sleep", "1000")
    async with anyio.create_task_group() as tasks:
        for number in range(5):
            tasks.start_soon(anyio.to_thread.run_sync, node.shims.start_verb, f"c{number}")
    node.wait_for_spares()
    for number in range(5):
        path = node.shims.start_verb(f"c{number}").removeprefix("unix://")
        node.sockets.append(path)
        async with connect(path) as node.shims.client:
            node.pids.append((await node.shims.call("Connect", id=f"c{number}")).shim_pid)
    eventually(node.no_verb_is_done, "no process is about to become a fork server")
    assert len(node.servers()) == 1


_IDLE = """
import sys
sys.path += [{repository!r}, {repository!r} + "/.cache/site"]
from shim.forkserver import forkserver
forkserver.IDLE = 0.2
forkserver.serve({directory!r} + "/f", "/no/address", stay={stay})
"""


@pytest.fixture
def socket_directory() -> Iterator[str]:
    directory = tempfile.mkdtemp(prefix="nvshim-")
    yield directory
    shutil.rmtree(directory)


def test_it_ends_by_itself_when_nobody_asks_for_long(socket_directory: str) -> None:
    script = _IDLE.format(repository=REPOSITORY, directory=socket_directory, stay=False)
    done = subprocess.run([INTERPRETER, "-ISc", script], timeout=30 * PATIENCE, check=False)
    assert done.returncode == 0
    assert os.listdir(socket_directory) == []


def test_it_stays_if_it_is_told_to_and_ends_on_sigterm(socket_directory: str) -> None:
    script = _IDLE.format(repository=REPOSITORY, directory=socket_directory, stay=True)
    with subprocess.Popen([INTERPRETER, "-ISc", script]) as server:
        try:
            eventually(lambda: os.path.exists(f"{socket_directory}/f"), "it listens")
            time.sleep(0.6)
            assert server.poll() is None
            server.terminate()
            assert server.wait(20 * PATIENCE) == 0
            assert os.listdir(socket_directory) == []
        finally:
            server.kill()


_SLOW = """
import sys
sys.path += [{repository!r}, {repository!r} + "/.cache/site"]
from importlib.abc import MetaPathFinder
from shim.forkserver import forkserver, warmup

def wait(what):
    print(what, flush=True)
    sys.stdin.readline()

class Slow(MetaPathFinder):
    def find_spec(self, name, *_):
        if name == "shim.forkserver.serving":
            wait("imports")

warmup.warm_up = lambda _: wait("warms up")
sys.meta_path.insert(0, Slow())
forkserver.serve({directory!r} + "/f", "/no/address")
"""


def links_in(directory: str) -> set[str]:
    """Return the kinds of links in a directory of sockets."""
    names = os.listdir(directory)
    return {name[0] for name in names if os.path.islink(f"{directory}/{name}")}


def test_it_listens_while_it_imports_and_answers_before_it_has_warmed_up(
    socket_directory: str,
) -> None:
    script = _SLOW.format(repository=REPOSITORY, directory=socket_directory)
    argv = [INTERPRETER, "-ISc", script]

    with (
        subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server,
        socket.socket(socket.AF_UNIX) as client,
    ):
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            assert server.stdout.readline() == "imports\n"
            assert links_in(socket_directory) == {STARTING_LINK}
            client.settimeout(20 * PATIENCE)
            client.connect(f"{socket_directory}/f")
            server.stdin.write("\n")
            server.stdin.flush()
            assert server.stdout.readline() == "warms up\n"
            assert links_in(socket_directory) == {READY_LINK}
            assert client.recv(1) == b","
        finally:
            server.kill()


def test_after_one_that_was_killed_the_next_is_not_taken_for_ready_while_it_imports(
    socket_directory: str,
) -> None:
    script = _SLOW.format(repository=REPOSITORY, directory=socket_directory)
    for _ in range(2):
        argv = [INTERPRETER, "-ISc", script]
        with subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as server:
            assert server.stdin is not None
            assert server.stdout is not None
            try:
                assert server.stdout.readline() == "imports\n"
                assert links_in(socket_directory) == {STARTING_LINK}
                server.stdin.write("\n")
                server.stdin.flush()
                assert server.stdout.readline() == "warms up\n"
                assert links_in(socket_directory) == {READY_LINK}
            finally:
                server.kill()


async def test_it_can_be_turned_off(node: Node) -> None:
    node.shims.environment = {"NVSHIM_FORK_SERVER": "0"}
    await node.start("c1", wait=False)
    eventually(node.no_verb_is_done, "no process is about to become a fork server")
    assert node.servers() == []
    assert node.server_socket() == ""
