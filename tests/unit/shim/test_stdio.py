"""Stdio on real fifos and a real terminal, with the test as containerd's client."""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import os
import pty
import signal
import socket
import stat
import termios
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import anyio
import pytest
from anyio.abc import TaskGroup

from integration.timeouts import PATIENCE
from shim.children import Reaper
from shim.context import ShimContext
from shim.errors import StdioTimeout, StdioUnavailable
from shim.log import Log
from shim.pod.process import Process
from shim.stdio import Stdio, files, open_stdio
from shim.stdio.uris import StdioUris
from tests.harness.fuse import FILE, fuse
from tests.harness.raising import raises

Open = Callable[..., Awaitable[Stdio]]

pytestmark = pytest.mark.anyio


@pytest.fixture
def log(tmp_path: Path) -> Log:
    """Open a log without a reader."""
    return Log(str(tmp_path / "nowhere"), debug=False)


@pytest.fixture
async def tasks(reaper: Reaper) -> AsyncIterator[TaskGroup]:
    """Run a task group for stdio's tasks, which ends before the reaper."""
    async with anyio.create_task_group() as tasks:
        yield tasks


@pytest.fixture
def plain(tasks: TaskGroup, log: Log, reaper: Reaper, tmp_path: Path) -> Open:
    """Open stdio by URIs, of init or of an exec, whose output is relayed."""
    none = cast("Any", None)
    shim = ShimContext(
        namespace="n", reaper=reaper, publisher=none, tasks=tasks, log=log, moves=none
    )

    async def open_(
        *,
        stdin: str = "",
        stdout: str = "",
        stderr: str = "",
        terminal: bool = False,
        relayed: bool = False,
        bundle: Path = tmp_path,
        **more: Any,
    ) -> Stdio:
        uris = StdioUris(stdin, stdout, stderr, terminal=terminal)
        process = Process("c", "e1" if relayed else "", uris)
        return await open_stdio(shim, process, bundle=str(bundle), **more)

    return open_


@pytest.fixture
def terminal(plain: Open) -> Open:
    """Open stdio with a terminal, by URIs."""
    return partial(plain, terminal=True)


def _fifo(path: Path) -> str:
    os.mkfifo(path)
    return str(path)


def _read_all(fd: int) -> bytes:
    data = b""
    while chunk := os.read(fd, 65536):
        data += chunk
    return data


@pytest.fixture
def open_fds() -> Iterator[None]:
    """Check that closing stdio closes everything that it opened."""
    before = set(os.listdir("/proc/self/fd"))
    yield
    assert set(os.listdir("/proc/self/fd")) <= before


def _write_end(stdio: Stdio) -> int:
    """Duplicate the write end of stdout, as a process has it."""
    stdout = stdio.child().stdout
    assert stdout is not None
    return os.dup(stdout)


async def _read_all_slowly(fd: int, *, until: bytes) -> bytes:
    data = b""
    with anyio.fail_after(5):
        while until not in data:
            await anyio.wait_readable(fd)
            data += os.read(fd, 65536)
    return data


# -- without a terminal ---------------------------------------------------------------------


@pytest.mark.parametrize("relayed", [False, True])
async def test_output_ends_when_the_process_has_closed_it(
    tmp_path: Path, open_fds: None, plain: Open, *, relayed: bool
) -> None:
    stdio = await plain(stdout=_fifo(tmp_path / "out"), relayed=relayed)
    client = os.open(tmp_path / "out", os.O_RDONLY | os.O_NONBLOCK)
    process = _write_end(stdio)
    await stdio.started()
    os.write(process, b"hello")
    os.close(process)
    await stdio.drain()
    assert _read_all(client) == b"hello"
    os.close(client)
    stdio.close()
    await anyio.wait_all_tasks_blocked()


@pytest.mark.parametrize("relayed", [False, True])
async def test_a_client_that_goes_away_does_not_break_the_pipe(
    tmp_path: Path, open_fds: None, plain: Open, *, relayed: bool
) -> None:
    stdio = await plain(stdout=_fifo(tmp_path / "out"), relayed=relayed)
    process = _write_end(stdio)
    await stdio.started()
    os.close(os.open(tmp_path / "out", os.O_RDONLY | os.O_NONBLOCK))
    assert os.write(process, b"nobody listens") == 14
    await anyio.sleep(0.05)
    client = os.open(tmp_path / "out", os.O_RDONLY | os.O_NONBLOCK)
    assert os.read(client, 100) == b"nobody listens"
    for fd in (client, process):
        os.close(fd)
    stdio.close()
    await anyio.wait_all_tasks_blocked()


async def test_only_close_stdin_ends_the_input(tmp_path: Path, open_fds: None, plain: Open) -> None:
    stdio = await plain(stdin=_fifo(tmp_path / "in"))
    theirs = stdio.child().stdin
    assert theirs is not None
    process = os.dup(theirs)
    await stdio.started()
    for text in (b"first client", b"second client"):
        client = os.open(tmp_path / "in", os.O_WRONLY)
        os.write(client, text)
        os.close(client)
        assert os.read(process, 100) == text
    os.set_blocking(process, False)
    with pytest.raises(BlockingIOError):
        os.read(process, 100)
    client = os.open(tmp_path / "in", os.O_WRONLY)
    os.write(client, b"last words")
    os.close(client)
    stdio.close_stdin()
    assert os.read(process, 100) == b"last words"
    assert os.read(process, 100) == b""
    os.close(process)
    stdio.close()


@pytest.mark.parametrize("relayed", [False, True])
async def test_the_process_gets_blocking_descriptors(
    tmp_path: Path, open_fds: None, plain: Open, *, relayed: bool
) -> None:
    stdio = await plain(
        stdin=_fifo(tmp_path / "in"),
        stdout=_fifo(tmp_path / "out"),
        stderr=_fifo(tmp_path / "err"),
        relayed=relayed,
    )
    child = stdio.child()
    assert [os.get_blocking(fd) for fd in child.fds().values()] == [True, True, True]
    stdio.close()


async def test_one_uri_for_stdout_and_stderr_is_one_pipe_in_the_order_written(
    tmp_path: Path, usual_umask: None, open_fds: None, plain: Open
) -> None:
    log = tmp_path / "logs" / "of today" / "out"
    uri = f"file://{log}".replace(" ", "%20")
    for line in (b"1\n", b"2\n"):
        stdio = await plain(stdout=uri, stderr=uri)
        child = stdio.child()
        assert child.stdout == child.stderr
        process = _write_end(stdio)
        await stdio.started()
        os.write(process, line)
        os.close(process)
        await stdio.drain()
        stdio.close()
    assert log.read_text() == "1\n2\n"
    assert stat.S_IMODE(log.stat().st_mode) == 0o644


async def test_a_process_never_has_a_file_itself(
    tmp_path: Path, open_fds: None, plain: Open
) -> None:
    (tmp_path / "in").write_bytes(b"typed")
    (tmp_path / "plain").write_bytes(b"")
    stdio = await plain(
        stdin=str(tmp_path / "in"),
        stdout=f"file://{tmp_path}/log",
        stderr=str(tmp_path / "plain"),
        owner=(1234, 5678),
    )
    fds = stdio.child().fds()
    assert [stat.S_ISFIFO(os.fstat(fds[n]).st_mode) for n in (0, 1, 2)] == [True, True, True]
    assert {os.stat(tmp_path / name).st_uid for name in ("in", "log", "plain")} == {0}
    process = [os.dup(fds[n]) for n in (0, 1, 2)]
    await stdio.started()
    for fd, text in ((1, b"to the log"), (2, b"to the other")):
        os.write(process[fd], text)
        os.close(process[fd])
    with anyio.fail_after(5):
        await anyio.wait_readable(process[0])
    assert os.read(process[0], 100) == b"typed"
    os.close(process[0])
    await stdio.drain()
    stdio.close()
    await anyio.sleep(0.05)
    assert (tmp_path / "log").read_bytes() == b"to the log"
    assert (tmp_path / "plain").read_bytes() == b"to the other"


@pytest.mark.parametrize("relayed", [False, True])
async def test_what_the_process_gets_belongs_to_the_owner_asked_for(
    tmp_path: Path, open_fds: None, plain: Open, *, relayed: bool
) -> None:
    stdio = await plain(
        stdin=_fifo(tmp_path / "in"),
        stdout=_fifo(tmp_path / "out"),
        stderr=f"file://{tmp_path}/log",
        owner=(1234, 5678),
        relayed=relayed,
    )
    for fd in stdio.child().fds().values():
        found = os.fstat(fd)
        assert (found.st_uid, found.st_gid) == (1234, 5678)
    assert os.stat(tmp_path / "log").st_uid == 0
    stdio.close()


@pytest.mark.parametrize("role", ["stdin", "stdout", "stderr"])
@pytest.mark.parametrize("relayed", [False, True])
async def test_a_missing_fifo_is_named_and_nothing_stays_open(
    tmp_path: Path, open_fds: None, plain: Open, role: str, *, relayed: bool
) -> None:
    uris = {name: _fifo(tmp_path / name) for name in ("stdin", "stdout", "stderr") if name != role}
    uris[role] = str(tmp_path / "missing")
    with pytest.raises(StdioUnavailable, match="missing"):
        await plain(**uris, relayed=relayed)


async def test_a_log_that_a_link_leads_away_is_refused(
    tmp_path: Path, open_fds: None, plain: Open
) -> None:
    (tmp_path / "log").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StdioUnavailable, match="symbolic link"):
        await plain(stdout=f"file://{tmp_path}/log")
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("kind", ["directory", "fifo", "socket"])
async def test_a_log_that_is_no_file_is_refused_at_once(
    tmp_path: Path, open_fds: None, plain: Open, kind: str
) -> None:
    path = tmp_path / "log"
    if kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
    with pytest.raises(StdioUnavailable):
        await plain(stdout=f"file://{path}")


@pytest.mark.parametrize("killed", [False, True])
async def test_what_a_file_does_not_take_is_forgotten_and_said_once(
    tmp_path: Path,
    open_fds: None,
    plain: Open,
    log: Log,
    monkeypatch: pytest.MonkeyPatch,
    *,
    killed: bool,
) -> None:
    said: list[str] = []
    monkeypatch.setattr(log, "error", lambda event, **fields: said.append(event))
    children = set(_children())
    stdio = await plain(stdout=f"file://{tmp_path}/log" if killed else "file:///dev/full")
    process = _write_end(stdio)
    await stdio.started()
    if killed:
        (child,) = set(_children()) - children
        os.kill(child, signal.SIGKILL)
    os.set_blocking(process, False)
    for _ in range(40):
        with anyio.fail_after(5):
            await anyio.wait_writable(process)
        with suppress(BlockingIOError):
            os.write(process, b"line\n" * 2000)
    os.close(process)
    await stdio.drain()
    stdio.close()
    why = "what writes its file was killed" if killed else "its file cannot be written"
    assert said == [f"output is lost: {why}"]


def _children() -> list[int]:
    with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
        return [int(pid) for pid in file.read().split()]


@pytest.mark.parametrize("uri", ["fifo", "file"])
async def test_a_daemon_that_keeps_the_output_does_not_hold_the_drain(
    tmp_path: Path, open_fds: None, plain: Open, uri: str
) -> None:
    path = tmp_path / "out"
    stdio = await plain(stdout=_fifo(path) if uri == "fifo" else f"file://{path}", relayed=True)
    client = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    daemon = _write_end(stdio)
    await stdio.started()
    os.write(daemon, b"all of it" * 1000)
    with anyio.fail_after(5 * PATIENCE):
        await stdio.drain()
    stdio.close()
    assert _read_all(client) == b"all of it" * 1000
    os.close(client)
    os.close(daemon)
    await anyio.sleep(0.05)


async def test_closing_before_the_start_leaves_nothing_open(
    tmp_path: Path, open_fds: None, plain: Open
) -> None:
    (tmp_path / "in").write_bytes(b"")
    for stdout in (_fifo(tmp_path / "out"), f"file://{tmp_path}/log"):
        stdio = await plain(stdin=str(tmp_path / "in"), stdout=stdout, relayed=True)
        stdio.close()
        stdio.close()


async def test_an_exec_that_is_never_deleted_keeps_nothing_of_its_log_open(
    tmp_path: Path, plain: Open
) -> None:
    before = os.listdir("/proc/self/fd")
    stdio = await plain(stdin=_fifo(tmp_path / "in"), stdout=f"file://{tmp_path}/log", relayed=True)
    process = _write_end(stdio)
    await stdio.started()
    os.write(process, b"all of it")
    os.close(process)
    with anyio.fail_after(5):
        await stdio.let_go()
    await anyio.wait_all_tasks_blocked()
    assert os.listdir("/proc/self/fd") == before
    assert (tmp_path / "log").read_bytes() == b"all of it"


async def test_a_file_that_no_child_can_be_made_for_leaves_nothing_open(
    tmp_path: Path, open_fds: None, plain: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> int:
        raise BlockingIOError(errno.EAGAIN, "no process")

    (tmp_path / "in").write_bytes(b"")
    monkeypatch.setattr(os, "fork", refuse)
    for uris in ({"stdin": str(tmp_path / "in")}, {"stderr": f"file://{tmp_path}/log"}):
        with pytest.raises(BlockingIOError):
            await plain(stdout=_fifo(tmp_path / f"out-{len(os.listdir(tmp_path))}"), **uris)


async def test_a_file_that_does_not_open_is_given_up_with_its_child_and_nothing_stays_open(
    tmp_path: Path, open_fds: None, plain: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fuse(str(tmp_path / "fuse")) as server:
        monkeypatch.setattr(files, "OPENING", 0.05)
        before = set(os.listdir("/proc/self/fd"))
        server.hang()
        with anyio.fail_after(5), raises(StdioTimeout, match=server.mount_point):
            await plain(stdout=f"file://{server.mount_point}/{FILE}")
        assert set(os.listdir("/proc/self/fd")) == before


async def test_an_end_may_be_closed_while_a_reader_is_waited_for(
    tmp_path: Path, open_fds: None, plain: Open
) -> None:
    stdio = await plain(stdout=_fifo(tmp_path / "out"))
    process = _write_end(stdio)
    await stdio.started()
    os.write(process, b"unread")
    os.close(process)
    with anyio.fail_after(1):  # the wait for a missing client is twice as long
        async with anyio.create_task_group() as waiting:
            waiting.start_soon(stdio.drain)
            await anyio.sleep(0.05)
            stdio.close()
            # The fd number is reused from now on: the shim must not close or query it.
            another = os.open("/dev/null", os.O_RDONLY)
    os.close(another)


# -- with a terminal ------------------------------------------------------------------------


def _send_terminal(path: str) -> tuple[int, threading.Thread]:
    """Send a terminal to a console socket as a runtime does; return the slave."""
    master, slave = pty.openpty()

    def send() -> None:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(path)
            sock.sendmsg(
                [b"/dev/ptmx"],
                [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [master]))],
            )
        os.close(master)

    thread = threading.Thread(target=send)
    thread.start()
    return slave, thread


async def _begin(stdio: Stdio) -> int:
    """Start it; return the terminal's slave."""
    slave, thread = _send_terminal(stdio.child().console_socket or "")
    thread.join()
    await stdio.started()
    return slave


async def test_a_terminal_is_passed_on_both_ways_resized_and_drained(
    tmp_path: Path, open_fds: None, terminal: Open
) -> None:
    stdio = await terminal(stdin=_fifo(tmp_path / "in"), stdout=_fifo(tmp_path / "out"))
    stdio.resize(132, 43)  # before the terminal exists
    slave = await _begin(stdio)
    output = os.open(tmp_path / "out", os.O_RDONLY | os.O_NONBLOCK)
    input_ = os.open(tmp_path / "in", os.O_WRONLY)
    size = array.array("H", [0, 0, 0, 0])
    fcntl.ioctl(slave, termios.TIOCGWINSZ, size)
    assert list(size[:2]) == [43, 132]
    os.write(input_, b"typed\n")
    data = await _read_all_slowly(output, until=b"typed")
    os.write(slave, b"shown\n")
    data += await _read_all_slowly(output, until=b"shown")
    os.set_blocking(slave, False)
    assert os.read(slave, 100) == b"typed\n"
    os.write(slave, b"last words" * 500)
    os.close(slave)
    await stdio.drain()
    # The client sees the end before anything is closed.
    assert _read_all(output).endswith(b"last words" * 500)
    stdio.resize(80, 24)  # no process is left to notice
    stdio.close()
    stdio.close()
    stdio.resize(80, 24)
    os.close(input_)
    os.close(output)
    assert not [name for name in os.listdir(tmp_path) if "console" in name]
    await anyio.wait_all_tasks_blocked()


def _masters() -> list[str]:
    names = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [name for name in names if name.endswith("ptmx")]


async def test_a_terminal_holds_its_master_once_until_nobody_uses_it(
    tmp_path: Path, open_fds: None, terminal: Open
) -> None:
    stdio = await terminal(stdin=_fifo(tmp_path / "in"), stdout=_fifo(tmp_path / "out"))
    slave = await _begin(stdio)
    assert len(_masters()) == 1
    client = os.open(tmp_path / "in", os.O_WRONLY)
    stdio.close_stdin()
    os.close(client)
    await anyio.wait_readable(slave)
    assert os.read(slave, 100) == b""  # Ctrl-D: the input has ended
    os.write(slave, b"still passed on\n")
    output = os.open(tmp_path / "out", os.O_RDONLY | os.O_NONBLOCK)
    assert b"still passed on" in await _read_all_slowly(output, until=b"on\r\n")
    stdio.resize(80, 24)
    assert len(_masters()) == 1
    os.close(slave)
    await stdio.drain()
    stdio.close()
    await anyio.wait_all_tasks_blocked()
    assert not _masters()
    os.close(output)


async def test_a_program_may_close_its_terminal_and_open_it_again(
    tmp_path: Path, open_fds: None, terminal: Open
) -> None:
    stdio = await terminal(stdin=_fifo(tmp_path / "in"), stdout=_fifo(tmp_path / "out"))
    slave = await _begin(stdio)
    name = os.ttyname(slave)
    output = os.open(tmp_path / "out", os.O_RDONLY | os.O_NONBLOCK)
    input_ = os.open(tmp_path / "in", os.O_WRONLY)
    os.write(slave, b"before\n")
    os.close(slave)  # as an init does that opens /dev/console for each message
    await _read_all_slowly(output, until=b"before\r\n")
    await anyio.wait_all_tasks_blocked()
    os.write(input_, b"typed\n")
    await anyio.wait_all_tasks_blocked()
    slave = os.open(name, os.O_RDWR | os.O_NOCTTY)
    assert os.read(slave, 100) == b"typed\n"
    os.write(slave, b"after\n")
    await _read_all_slowly(output, until=b"after\r\n")
    os.write(slave, b"last words\n")
    os.close(slave)
    await stdio.ended()
    # The client sees the end, before anything is deleted.
    assert _read_all(output).endswith(b"last words\r\n")
    await stdio.drain()
    stdio.close()
    for fd in (input_, output):
        os.close(fd)
    await anyio.wait_all_tasks_blocked()


async def test_a_terminal_that_is_closed_has_no_characters_to_end_its_input_with(
    tmp_path: Path, terminal: Open
) -> None:
    stdio = await terminal(stdin=_fifo(tmp_path / "in"), stdout=_fifo(tmp_path / "out"))
    slave = await _begin(stdio)
    last = cast("Any", stdio)._end_of_input
    assert last() == b"\x04\x04"
    os.close(slave)
    stdio.close()
    # The input may end in the same turn of the loop in which the terminal is closed.
    assert last() == b""
    await anyio.wait_all_tasks_blocked()


async def test_clients_of_a_terminal_come_and_go_until_the_input_is_closed(
    tmp_path: Path, open_fds: None, terminal: Open
) -> None:
    stdio = await terminal(stdin=_fifo(tmp_path / "in"))
    slave = await _begin(stdio)
    os.set_blocking(slave, False)
    for text in (b"first\n", b"second\n"):
        client = os.open(tmp_path / "in", os.O_WRONLY)
        os.write(client, text)
        os.close(client)
        assert await _read_all_slowly(slave, until=b"\n") == text
    client = os.open(tmp_path / "in", os.O_WRONLY)
    os.write(client, b"no line end")
    stdio.close_stdin()
    await anyio.sleep(0.05)
    with pytest.raises(BlockingIOError):
        os.read(slave, 100)
    os.close(client)
    # Ctrl-D flushes the incomplete line, then signals the end of the file.
    assert await _read_all_slowly(slave, until=b"end") == b"no line end"
    assert os.read(slave, 100) == b""
    os.close(slave)
    await stdio.drain()
    stdio.close()
    await anyio.wait_all_tasks_blocked()


async def test_a_large_paste_arrives_whole(tmp_path: Path, open_fds: None, terminal: Open) -> None:
    stdio = await terminal(stdin=_fifo(tmp_path / "in"))
    slave = await _begin(stdio)
    modes = termios.tcgetattr(slave)
    modes[3] &= ~termios.ECHO
    termios.tcsetattr(slave, termios.TCSANOW, modes)
    paste = b"".join(b"%06d %s\n" % (number, b"x" * 50) for number in range(10_000))
    client = os.open(tmp_path / "in", os.O_WRONLY)

    def type_() -> None:
        os.write(client, paste)
        os.close(client)

    typist = threading.Thread(target=type_)
    typist.start()
    os.set_blocking(slave, False)
    data = b""
    with anyio.fail_after(20):
        while len(data) < len(paste):
            await anyio.wait_readable(slave)
            data += os.read(slave, 65536)
            if len(data) % 7 == 0:
                await anyio.sleep(0.001)  # a slow reader
    assert data == paste
    typist.join()
    os.close(slave)
    await stdio.drain()
    stdio.close()
    await anyio.wait_all_tasks_blocked()


async def test_a_daemon_that_keeps_a_terminal_does_not_hold_the_drain(
    tmp_path: Path, open_fds: None, terminal: Open
) -> None:
    stdio = await terminal(stdout=_fifo(tmp_path / "out"))
    client = os.open(tmp_path / "out", os.O_RDONLY | os.O_NONBLOCK)
    slave = await _begin(stdio)
    os.write(slave, b"x" * 3000 + b"end")
    with anyio.fail_after(5 * PATIENCE):
        await stdio.drain()
    stdio.close()
    assert _read_all(client) == b"x" * 3000 + b"end"
    os.close(slave)
    os.close(client)
    await anyio.wait_all_tasks_blocked()


async def test_a_runtime_that_sends_no_terminal_is_told_so(
    tmp_path: Path, open_fds: None, terminal: Open
) -> None:
    stdio = await terminal(stdin=_fifo(tmp_path / "in"), stdout=_fifo(tmp_path / "out"))
    with pytest.raises(StdioUnavailable, match="no terminal"):
        await stdio.started()
    stdio.close()
    assert sorted(os.listdir(tmp_path)) == ["in", "out"]


async def test_a_terminal_without_its_fifo_leaves_nothing(
    tmp_path: Path, open_fds: None, terminal: Open
) -> None:
    with pytest.raises(StdioUnavailable, match="missing"):
        await terminal(stdin=_fifo(tmp_path / "in"), stdout=str(tmp_path / "missing"))
    assert os.listdir(tmp_path) == ["in"]


async def test_a_bundle_with_a_path_too_long_for_a_socket_still_has_a_terminal(
    tmp_path: Path, open_fds: None, terminal: Open
) -> None:
    bundle = tmp_path / ("d" * 100) / ("e" * 100)
    bundle.mkdir(parents=True)
    stdio = await terminal(bundle=bundle)
    os.close(await _begin(stdio))
    assert os.listdir(bundle) == []
    await stdio.drain()
    stdio.close()
    await anyio.wait_all_tasks_blocked()


@pytest.mark.parametrize("where", ["nothing", "a file", "a full disk"])
async def test_a_terminal_that_no_client_reads_does_not_block(
    tmp_path: Path, open_fds: None, terminal: Open, where: str
) -> None:
    uris = {"nothing": "", "a file": f"file://{tmp_path}/log", "a full disk": "file:///dev/full"}
    stdio = await terminal(stdout=uris[where])
    slave = await _begin(stdio)
    os.set_blocking(slave, False)
    written = 0
    with anyio.fail_after(5):
        for _ in range(100):
            await anyio.wait_writable(slave)
            written += os.write(slave, b"line\n" * 100)
    os.close(slave)
    await stdio.drain()
    stdio.close()
    await anyio.sleep(0.05)
    if where == "a file":
        # A line end has two characters, and a write to a terminal may be cut between them.
        found = (tmp_path / "log").read_bytes()
        assert len(found.replace(b"\r", b"")) == written
