"""A process's stdin, stdout and stderr: where they come from and who holds which end.

containerd names each of the three by a URI. Without a scheme it is the path of a fifo that a
client of containerd reads or writes; ``file://`` is a file to append to; empty is /dev/null.

Rules for fifos
- Without a terminal init gets the fifo itself: no byte passes through this process. The runtime
  gives it to the container's user (fchown), as it would a pipe.
- An exec gets a pipe, and what comes out of it is passed on. It may leave a daemon behind that
  holds its output open for ever; only what we hold can be closed when it is deleted, and its
  client waits for that end.
- The shim keeps a *read* end of stdout and stderr, so that the container is never killed by
  SIGPIPE while containerd is away. It never reads from it.
- The shim keeps a *write* end of stdin: a client that goes away is not the end of input, and
  another may attach. Only CloseIO drops it.
- No open of a fifo may block: a read end is opened first (non-blocking), which lets the write
  end be opened at once, and the other way round.

With a terminal, bytes are copied between the fifos and the terminal's master.

Source: containerd docs/runtime-v2.md (I/O), fifo(7), tty_ioctl(4).
"""

from __future__ import annotations

import fcntl
import itertools
import os
import stat
import struct
import termios
from typing import TYPE_CHECKING, Final, Protocol

import anyio
import anyio.lowlevel

from shim.errors import StdioUnavailable, StdioUnsupported
from shim.runtime import ChildStdio

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

# The longest that Delete waits for output that was written and not yet taken.
DRAIN_SECONDS: Final = 10.0
_CHUNK: Final = 65536


class Stdio(Protocol):
    """What a process's stdio can do, whatever it is made of."""

    def child(self) -> ChildStdio:
        """What the runtime hands to the process."""

    async def started(self) -> None:
        """The process has its descriptors now: let go of ours that were meant for it."""

    def close_stdin(self) -> None:
        """No more input will come (CloseIO)."""

    def resize(self, width: int, height: int) -> None:
        """Tell the terminal its size in characters; nothing without a terminal."""

    async def drain(self) -> None:
        """Wait until what the process wrote has been passed on."""

    def close(self) -> None:
        """Release everything. May be called more than once, and in any state."""


class Descriptors:
    """Descriptors that are closed together, once."""

    __slots__ = ("_fds",)

    def __init__(self) -> None:
        self._fds: list[int] = []

    def keep(self, fd: int) -> int:
        """Close ``fd`` when the others are closed."""
        self._fds.append(fd)
        return fd

    def close(self) -> None:
        """Close them all; a second call does nothing."""
        while self._fds:
            os.close(self._fds.pop())


class DirectStdio:
    """Stdio without a terminal: the process has the fifos and files themselves.

    Args:
        stdin, stdout, stderr: URIs as containerd sends them; empty is /dev/null.
        owner: the uid and gid that own what the process gets (options IoUid, IoGid).

    Raises:
        StdioUnavailable: one of them cannot be opened.
        StdioUnsupported: a scheme that this shim does not serve.
    """

    def __init__(
        self, *, stdin: str, stdout: str, stderr: str, owner: tuple[int, int] = (0, 0)
    ) -> None:
        self._for_child = Descriptors()
        self._input_open = Descriptors()
        self._kept = Descriptors()
        try:
            self._stdin = self._open_input(stdin)
            self._stdout = self._open_output(stdout)
            self._stderr = self._stdout if stderr == stdout else self._open_output(stderr)
            if owner != (0, 0):
                for fd in {self._stdin, self._stdout, self._stderr} - {None}:
                    os.fchown(fd, *owner)  # type: ignore[arg-type]  # None is taken out above
        except BaseException:
            self.close()
            raise

    def child(self) -> ChildStdio:
        """The ends that the process gets."""
        return ChildStdio(self._stdin, self._stdout, self._stderr)

    async def started(self) -> None:
        """Close our copies of the process's ends: its exit has to be the end of its output."""
        self._for_child.close()

    def close_stdin(self) -> None:
        """Drop our write end: input ends when the client has closed its own."""
        self._input_open.close()

    def resize(self, width: int, height: int) -> None:
        """Nothing: there is no terminal."""

    async def drain(self) -> None:
        """Nothing to wait for: what was written is in the fifo, where its reader finds it."""

    def close(self) -> None:
        """Close what is left open."""
        self._for_child.close()
        self._input_open.close()
        self._kept.close()

    def _open_input(self, uri: str) -> int | None:
        path = _path_of(uri, "stdin")
        if path is None:
            return None
        with _opening("stdin", path):
            if not _is_fifo(path):
                return self._for_child.keep(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            reading, writing = _open_both_ends(path)
            self._input_open.keep(writing)
            os.set_blocking(reading, True)
            return self._for_child.keep(reading)

    def _open_output(self, uri: str) -> int | None:
        path = _path_of(uri, "stdout or stderr")
        if path is None:
            return None
        with _opening("stdout or stderr", path):
            if uri.startswith("file:"):
                return self._for_child.keep(_open_log_file(path))
            if not _is_fifo(path):
                flags = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
                return self._for_child.keep(os.open(path, flags))
            reading, writing = _open_both_ends(path)
            self._kept.keep(reading)
            return self._for_child.keep(writing)


class RelayedStdio:
    """Stdio of an exec: as :class:`DirectStdio`, but fifos are written through a pipe of ours.

    Args:
        tasks: where the passing on runs.
        stdin, stdout, stderr, owner: as for :class:`DirectStdio`, and so is what is raised.
    """

    def __init__(
        self,
        tasks: TaskGroup,
        *,
        stdin: str,
        stdout: str,
        stderr: str,
        owner: tuple[int, int] = (0, 0),
    ) -> None:
        self._tasks = tasks
        self._for_child = Descriptors()
        self._relays: list[_Relay] = []
        self._started = False
        self._direct = DirectStdio(stdin=stdin, stdout=stdout, stderr=stderr, owner=owner)
        try:
            self._child = self._with_pipes(self._direct.child(), owner)
        except BaseException:
            self.close()
            raise

    def child(self) -> ChildStdio:
        """The ends that the process gets."""
        return self._child

    async def started(self) -> None:
        """Close our copies of the process's ends, and begin to pass on what it writes."""
        await self._direct.started()
        self._for_child.close()
        self._started = True
        for relay in self._relays:
            self._tasks.start_soon(relay.run)

    def close_stdin(self) -> None:
        """Drop our write end: input ends when the client has closed its own."""
        self._direct.close_stdin()

    def resize(self, width: int, height: int) -> None:
        """Nothing: there is no terminal."""

    async def drain(self) -> None:
        """Pass on what has been written, but wait neither for a daemon nor for ever."""
        if self._started:
            for relay in self._relays:
                relay.finish()
            with anyio.move_on_after(DRAIN_SECONDS):
                for relay in self._relays:
                    await relay.done.wait()

    def close(self) -> None:
        """Stop passing on and close everything."""
        self._direct.close()
        self._for_child.close()
        for relay in self._relays:
            relay.stop(running=self._started)

    def _with_pipes(self, direct: ChildStdio, owner: tuple[int, int]) -> ChildStdio:
        instead: dict[int | None, int | None] = {}
        for sink in {direct.stdout, direct.stderr} - {None}:
            if sink is not None and stat.S_ISFIFO(os.fstat(sink).st_mode):
                reading, writing = os.pipe2(os.O_CLOEXEC)
                instead[sink] = self._for_child.keep(writing)
                self._relays.append(_Relay(reading, sink))
                if owner != (0, 0):
                    os.fchown(writing, *owner)
        return ChildStdio(
            direct.stdin,
            instead.get(direct.stdout, direct.stdout),
            instead.get(direct.stderr, direct.stderr),
        )


class _Relay:
    """Passes on what comes out of a pipe, to its end or until told to finish.

    Args:
        source: the pipe's read end; ours from now on.
        sink: a fifo's write end, which is duplicated.
    """

    def __init__(self, source: int, sink: int) -> None:
        self.done = anyio.Event()
        self._ours = Descriptors()
        self._source = self._ours.keep(source)
        self._sink = self._ours.keep(fcntl.fcntl(sink, fcntl.F_DUPFD_CLOEXEC, 3))
        for fd in (self._source, self._sink):
            os.set_blocking(fd, False)
        self._finishing = False
        self._whole = anyio.CancelScope()
        self._waiting: anyio.CancelScope | None = None

    async def run(self) -> None:
        try:
            with self._whole:
                while not await self._step():
                    # See _copy.
                    await anyio.lowlevel.checkpoint()
        finally:
            self._ours.close()
            self.done.set()

    def finish(self) -> None:
        """Pass on what is there, and then end, whoever could still write."""
        self._finishing = True
        if self._waiting is not None:
            self._waiting.cancel()

    def stop(self, *, running: bool) -> None:
        """End now; close what :meth:`run`, if it was ever called, would close."""
        if running:
            self._whole.cancel()
        else:
            self._ours.close()

    async def _step(self) -> bool:
        """Pass on one chunk; says whether it was the last."""
        try:
            data = os.read(self._source, _CHUNK)
        except BlockingIOError:
            if self._finishing:
                return True
            with anyio.CancelScope() as self._waiting:
                await anyio.wait_readable(self._source)
            return False
        if data:
            await _write(self._sink, data)
        return not data


class TerminalStdio:
    """Stdio with a terminal: bytes are copied between its master and the fifos.

    Args:
        tasks: where the copying runs.
        stdin, stdout: URIs as containerd sends them. There is no stderr with a terminal.
        socket_directory: the bundle; the socket on which the runtime sends the master is
            made there, under a name of its own.
    """

    _sockets = itertools.count()

    def __init__(self, tasks: TaskGroup, *, stdin: str, stdout: str, socket_directory: str) -> None:
        import socket  # noqa: PLC0415 - only a terminal needs it by name

        self._tasks = tasks
        self._kept = Descriptors()
        self._kept_directory = Descriptors()
        self._input_open = Descriptors()
        self._master: int | None = None
        self._size: tuple[int, int] | None = None
        self._drained = anyio.Event()
        self._stop_input = anyio.CancelScope()
        self._stop_output = anyio.CancelScope()
        self._copies = 0
        self._closed = False
        self._listener: socket.socket | None = None
        # Not named after the process: an exec's id is the client's choice, and the socket's
        # address has to be short.
        self._socket_file = f"console.{next(self._sockets)}"
        self._directory = -1
        try:
            self._input = self._open_input(stdin)
            self._output = self._open_output(stdout)
            # A bundle's path can be longer than a socket's address may be; the descriptor of
            # its directory is a short way to the same place, for us and for the runtime.
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
            self._directory = self._kept_directory.keep(os.open(socket_directory, flags))
            self._console = f"/proc/{os.getpid()}/fd/{self._directory}/{self._socket_file}"
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._listener.bind(self._console)
            self._listener.listen(1)
            self._listener.setblocking(False)
        except BaseException:
            self.close()
            raise

    def child(self) -> ChildStdio:
        """Nothing but the way to our console socket."""
        return ChildStdio(console_socket=self._console)

    async def started(self) -> None:
        """Take the terminal's master, which the runtime has sent, and begin to copy.

        Raises:
            StdioUnavailable: the runtime did not send one.
        """
        self._master = await self._receive_master()
        self._stop_listening()
        if self._size is not None:
            self.resize(*self._size)
        if self._input is not None:
            self._copies += 1
            self._tasks.start_soon(self._copy_input, self._input, self._master)
        self._copies += 1
        self._tasks.start_soon(self._copy_output, self._master, self._output)

    def close_stdin(self) -> None:
        """Take what the client still writes, then stop: no other may attach."""
        self._input_open.close()

    def resize(self, width: int, height: int) -> None:
        """Set the terminal's size; the kernel tells the foreground process (SIGWINCH)."""
        self._size = (width, height)
        if self._master is not None:
            size = struct.pack("HHHH", height & 0xFFFF, width & 0xFFFF, 0, 0)
            fcntl.ioctl(self._master, termios.TIOCSWINSZ, size)

    async def drain(self) -> None:
        """Wait until all that was written to the terminal is in the fifo, but not for ever."""
        if self._master is not None:
            with anyio.move_on_after(DRAIN_SECONDS):
                await self._drained.wait()

    def close(self) -> None:
        """Stop copying and close everything."""
        self._stop_listening()
        self._input_open.close()
        self._closed = True
        self._stop_input.cancel()
        self._stop_output.cancel()
        self._close_when_unused()

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
            try:
                os.unlink(self._socket_file, dir_fd=self._directory)
            except FileNotFoundError:
                pass
        self._kept_directory.close()

    def _close_when_unused(self) -> None:
        # A descriptor closed under a waiting copy could come back as another file's number,
        # whose readiness the loop would then forget.
        if self._closed and not self._copies:
            self._master = None
            self._kept.close()

    def _open_input(self, uri: str) -> int | None:
        path = _path_of(uri, "stdin")
        if path is None:
            return None
        with _opening("stdin", path):
            reading, writing = _open_both_ends(path)
        self._input_open.keep(writing)
        return self._kept.keep(reading)

    def _open_output(self, uri: str) -> int | None:
        path = _path_of(uri, "stdout")
        if path is None:
            return None
        with _opening("stdout", path):
            if uri.startswith("file:"):
                return self._kept.keep(_open_log_file(path))
            reading, writing = _open_both_ends(path)
        self._kept.keep(reading)
        os.set_blocking(writing, False)
        return self._kept.keep(writing)

    async def _receive_master(self) -> int:
        import socket  # noqa: PLC0415 - see __init__

        if self._listener is None:
            message = "the terminal is received once, before close"
            raise AssertionError(message)
        try:
            # The runtime has exited: what it sent waits in the listener's queue.
            connection, _ = self._listener.accept()
            with connection:
                connection.setblocking(False)
                _, fds, _, _ = socket.recv_fds(connection, 4096, 1, socket.MSG_CMSG_CLOEXEC)
            master = self._kept.keep(fds[0])
        except (OSError, IndexError) as error:
            raise StdioUnavailable(
                "a terminal for the process",
                found="the runtime sent no terminal over the console socket",
                do="check that the runtime supports --console-socket",
            ) from error
        os.set_blocking(master, False)
        return master

    async def _copy_input(self, source: int, master: int) -> None:
        with self._stop_input:
            await _copy(source, master)
        self._copy_ended()

    async def _copy_output(self, master: int, sink: int | None) -> None:
        with self._stop_output:
            await _copy(master, sink)
        self._drained.set()
        # Nobody is left to read what a client may still type.
        self._stop_input.cancel()
        self._copy_ended()

    def _copy_ended(self) -> None:
        self._copies -= 1
        self._close_when_unused()


async def _copy(source: int, sink: int | None) -> None:
    """Copy until the source ends.

    What there is no sink for, or what it does not take (a log on a full disk), is forgotten: a
    process must not hang for want of a reader of its terminal.
    """
    while True:
        try:
            data = os.read(source, _CHUNK)
        except BlockingIOError:
            await anyio.wait_readable(source)
            continue
        except OSError:  # EIO: the last process that had the terminal open is gone
            return
        if not data:
            return
        if sink is not None:
            await _write(sink, data)
        # Source and sink may always be ready, and the shim has more to do than this.
        await anyio.lowlevel.checkpoint()


async def _write(sink: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(sink, rest) :]
        except BlockingIOError:
            await anyio.wait_writable(sink)
        except OSError:
            return


def _path_of(uri: str, role: str) -> str | None:
    """The path that a stdio URI names; None for /dev/null."""
    if not uri:
        return None
    if uri.startswith("/"):
        return uri
    scheme, _, path = uri.partition("://")
    if scheme in {"fifo", "file"} and path.startswith("/"):
        if "%" in path:
            from urllib.parse import unquote  # noqa: PLC0415 - 3 ms for a rare path

            path = unquote(path)
        return path
    raise StdioUnsupported(
        f"{role} at {uri!r}",
        found=f"scheme {scheme!r}",
        do="use the path of a fifo, or file:// and an absolute path",
    )


class _opening:  # noqa: N801 - reads as the statement that it is: with _opening(...)
    """Turns an OSError of an open into one line for whoever named the path."""

    def __init__(self, role: str, path: str) -> None:
        self._role = role
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, OSError):
            raise StdioUnavailable(
                f"{self._role} at {self._path}",
                found=error.strerror or str(error),
                do="containerd's client has to make the fifo before it creates the task",
            ) from error


def _is_fifo(path: str) -> bool:
    return stat.S_ISFIFO(os.stat(path).st_mode)


def _open_both_ends(path: str) -> tuple[int, int]:
    """A non-blocking read end and a blocking write end of a fifo, without waiting for anyone."""
    reading = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return reading, os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except BaseException:
        os.close(reading)
        raise


def _open_log_file(path: str) -> int:
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    return os.open(path, flags, 0o644)
