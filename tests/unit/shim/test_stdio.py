"""Stdio on real fifos and a real terminal, as a client of containerd would hold the other end."""

from __future__ import annotations

import array
import os
import pty
import socket
import termios
import threading
from fcntl import ioctl
from typing import TYPE_CHECKING

import anyio
import pytest

from shim.errors import StdioUnavailable, StdioUnsupported
from shim.stdio import DirectStdio, TerminalStdio, _copy

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


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
    """Whatever a test opens through stdio is closed when it closes the stdio."""
    before = set(os.listdir("/proc/self/fd"))
    yield
    assert set(os.listdir("/proc/self/fd")) <= before


async def test_output_ends_when_the_process_has_closed_it(tmp_path: Path, open_fds: None) -> None:
    stdio = DirectStdio(stdin="", stdout=_fifo(tmp_path / "out"), stderr="")
    client = os.open(tmp_path / "out", os.O_RDONLY | os.O_NONBLOCK)
    theirs = stdio.child().stdout
    assert theirs is not None
    process = os.dup(theirs)
    await stdio.started()
    os.write(process, b"hello")
    os.close(process)
    assert _read_all(client) == b"hello"
    os.close(client)
    stdio.close()


async def test_a_client_that_goes_away_does_not_break_the_pipe(
    tmp_path: Path, open_fds: None
) -> None:
    stdio = DirectStdio(stdin="", stdout=_fifo(tmp_path / "out"), stderr="")
    theirs = stdio.child().stdout
    assert theirs is not None
    process = os.dup(theirs)
    await stdio.started()
    os.close(os.open(tmp_path / "out", os.O_RDONLY | os.O_NONBLOCK))
    assert os.write(process, b"nobody listens") == 14
    client = os.open(tmp_path / "out", os.O_RDONLY | os.O_NONBLOCK)
    assert os.read(client, 100) == b"nobody listens"
    for fd in (client, process):
        os.close(fd)
    stdio.close()


async def test_only_close_stdin_ends_the_input(tmp_path: Path, open_fds: None) -> None:
    stdio = DirectStdio(stdin=_fifo(tmp_path / "in"), stdout="", stderr="")
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
    stdio.close_stdin()
    assert os.read(process, 100) == b""
    os.close(process)
    stdio.close()


async def test_the_process_gets_blocking_descriptors(tmp_path: Path, open_fds: None) -> None:
    stdio = DirectStdio(
        stdin=_fifo(tmp_path / "in"), stdout=_fifo(tmp_path / "out"), stderr=_fifo(tmp_path / "err")
    )
    child = stdio.child()
    assert [os.get_blocking(fd) for fd in child.fds().values()] == [True, True, True]
    stdio.close()


async def test_one_uri_for_stdout_and_stderr_is_one_open_file(
    tmp_path: Path, open_fds: None
) -> None:
    log = tmp_path / "logs" / "out"
    stdio = DirectStdio(stdin="", stdout=f"file://{log}", stderr=f"file://{log}")
    child = stdio.child()
    assert child.stdout is not None
    assert child.stdout == child.stderr
    os.write(child.stdout, b"1\n")
    stdio.close()
    again = DirectStdio(stdin="", stdout=f"file://{log}", stderr="")
    assert again.child().stdout is not None
    os.write(again.child().stdout or -1, b"2\n")
    again.close()
    assert log.read_text() == "1\n2\n"


async def test_what_the_process_gets_belongs_to_the_owner_asked_for(
    tmp_path: Path, open_fds: None
) -> None:
    stdio = DirectStdio(stdin="", stdout=_fifo(tmp_path / "out"), stderr="", owner=(1234, 5678))
    found = os.stat(tmp_path / "out")
    assert (found.st_uid, found.st_gid) == (1234, 5678)
    stdio.close()


@pytest.mark.parametrize("role", ["stdin", "stdout", "stderr"])
async def test_a_missing_fifo_is_named_and_nothing_stays_open(
    tmp_path: Path, open_fds: None, role: str
) -> None:
    uris = {name: _fifo(tmp_path / name) for name in ("stdin", "stdout", "stderr") if name != role}
    with pytest.raises(StdioUnavailable, match="missing"):
        DirectStdio(**{**uris, role: str(tmp_path / "missing")})  # type: ignore[arg-type]


@pytest.mark.parametrize("uri", ["binary:///bin/logger", "npipe:////./pipe/x", "relative/path"])
async def test_a_scheme_that_is_not_served_is_named(uri: str) -> None:
    with pytest.raises(StdioUnsupported, match="scheme"):
        DirectStdio(stdin="", stdout=uri, stderr="")


def _send_terminal(path: str) -> tuple[int, threading.Thread]:
    """What a runtime does with a console socket; our end of the terminal is the slave."""
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


async def test_a_terminal_is_copied_both_ways_resized_and_drained(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    uris = {"stdin": _fifo(tmp_path / "in"), "stdout": _fifo(tmp_path / "out")}
    async with anyio.create_task_group() as tasks:
        stdio = TerminalStdio(tasks, **uris, socket_directory=str(tmp_path))
        console = stdio.child().console_socket
        assert console is not None
        stdio.resize(132, 43)  # before the terminal is there
        slave, thread = _send_terminal(console)
        thread.join()
        await stdio.started()
        output = os.open(tmp_path / "out", os.O_RDONLY | os.O_NONBLOCK)
        input_ = os.open(tmp_path / "in", os.O_WRONLY)
        size = array.array("H", [0, 0, 0, 0])
        ioctl(slave, termios.TIOCGWINSZ, size)
        assert list(size[:2]) == [43, 132]
        os.write(input_, b"typed\n")
        os.write(slave, b"shown\n")
        data = b""
        with anyio.fail_after(5):
            while b"shown" not in data or b"typed" not in data:
                await anyio.wait_readable(output)
                data += os.read(output, 100)
        os.set_blocking(slave, False)
        assert os.read(slave, 100) == b"typed\n"
        os.write(slave, b"last words" * 500)
        os.close(slave)
        await stdio.drain()
        while b"last words" * 500 not in data:
            data += os.read(output, 65536)
        stdio.close()
        stdio.close()
        os.close(input_)
        os.close(output)
    assert not [name for name in os.listdir(tmp_path) if "console" in name]
    assert len(os.listdir("/proc/self/fd")) == before


async def test_a_runtime_that_sends_no_terminal_is_told_so(tmp_path: Path) -> None:
    async with anyio.create_task_group() as tasks:
        stdio = TerminalStdio(tasks, stdin="", stdout="", socket_directory=str(tmp_path))
        with pytest.raises(StdioUnavailable, match="no terminal"):
            await stdio.started()
        stdio.close()
    assert os.listdir(tmp_path) == []


async def test_a_bundle_with_a_path_too_long_for_a_socket_still_has_a_terminal(
    tmp_path: Path,
) -> None:
    bundle = tmp_path / ("d" * 100) / ("e" * 100)
    bundle.mkdir(parents=True)
    async with anyio.create_task_group() as tasks:
        stdio = TerminalStdio(tasks, stdin="", stdout="", socket_directory=str(bundle))
        slave, thread = _send_terminal(stdio.child().console_socket or "")
        thread.join()
        await stdio.started()
        os.close(slave)
        await stdio.drain()
        stdio.close()


async def test_copying_what_is_always_ready_lets_others_run() -> None:
    source, sink = os.open("/dev/zero", os.O_RDONLY), os.open("/dev/null", os.O_WRONLY)
    with anyio.move_on_after(0.1) as scope:
        await _copy(source, sink)
    assert scope.cancelled_caught
    for fd in (source, sink):
        os.close(fd)


async def test_a_full_disk_does_not_block_the_terminal(tmp_path: Path) -> None:
    async with anyio.create_task_group() as tasks:
        stdio = TerminalStdio(
            tasks, stdin="", stdout="file:///dev/full", socket_directory=str(tmp_path)
        )
        slave, thread = _send_terminal(stdio.child().console_socket or "")
        thread.join()
        await stdio.started()
        os.set_blocking(slave, False)
        with anyio.fail_after(5):
            for _ in range(100):
                await anyio.wait_writable(slave)
                os.write(slave, b"line\n" * 100)
        os.close(slave)
        await stdio.drain()
        stdio.close()


async def test_a_terminal_that_came_leaves_no_socket_behind(tmp_path: Path) -> None:
    async with anyio.create_task_group() as tasks:
        stdio = TerminalStdio(tasks, stdin="", stdout="", socket_directory=str(tmp_path))
        slave, thread = _send_terminal(stdio.child().console_socket or "")
        thread.join()
        await stdio.started()
        assert os.listdir(tmp_path) == []
        os.close(slave)
        await stdio.drain()
        stdio.close()
