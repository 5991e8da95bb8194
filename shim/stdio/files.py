"""Output that a child process reads; log and input files, which a child opens and copies.

Opening, writing and even closing a file can take for ever when its file system hangs (NFS, FUSE).
The shim cannot know this in advance, and every program that it starts would first have to close its
copy of the descriptor. So the shim never has a descriptor of the file.

Rules
- The child has :data:`OPENING` seconds to open the file. Then it is killed; if the kernel cannot
  end it yet, it ends when the file system answers. The shim does not wait for that.
- The child copies until its source ends. If the shim closes their connection, or dies, the child
  copies what is available and exits.
- Output is appended to a log file: it may be rotated by truncating it, and several containers may
  share it. On a full disk, output is dropped, and this is logged once: a container must not hang
  because of a log.
- The last component of a log file's path must not be a link: a container can often write to the
  directory of its log, and could redirect its output with a link.

Source: fork(2), unix(7) SOCK_SEQPACKET.
"""

from __future__ import annotations

import errno
import json
import os
import select
import socket
import stat
from collections.abc import Callable, Sequence
from typing import Final, NoReturn

from shim import forked, loop
from shim.children import Child, Exit
from shim.context import ShimContext
from shim.errors import ShimError, StdioTimeout, StdioUnavailable
from shim.loop import Tasks
from shim.mountinfo import may_hang
from shim.stdio.pipes import Descriptors, Opening, Relay, is_fifo, state_of
from shim.stdio.streams import Input, Output

OPENING: Final = 10.0
"""Seconds for opening a file."""

_IN_MEMORY: Final = "/run/"
_CHUNK: Final = 1 << 16
_LONGEST_MESSAGE: Final = 1 << 12
_OPENED: Final = b"opened"
_START: Final = b"start"

_APPEND: Final = os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class ProcessOutput(Output):
    """Output that a child process reads from pipes.

    This keeps read ends. If the child dies before the writers, their output is dropped: they are
    not killed by SIGPIPE, and do not wait for a reader.

    Args:
        shim: watches the process, and logs if it dies too early.
        name: its name in the log.
        child: the process.
        fd: the write end for the output.
        sources: the read ends of all its pipes, now owned by this object.
    """

    lost: str
    """The log entry if it dies too early."""

    def __init__(
        self, shim: ShimContext, name: str, child: Child, fd: int, sources: Sequence[int]
    ) -> None:
        super().__init__(fd)
        self._shim = shim
        self._name = name
        self._child = child
        self._reading = Descriptors()
        self._sources = [self._reading.keep(source) for source in sources]
        self._dropping: list[Relay] = []
        self._ending = False

    def watch(self) -> None:
        """If the process dies too early, drop its input, and log that."""
        self._shim.tasks.start_soon(self._drop_after_death)

    def finish(self) -> None:
        """Allow the process to end from now on."""
        self._ending = True
        super().finish()

    def close(self) -> None:
        """Release our descriptors; the process ends after it has read everything."""
        self._ending = True
        super().close()
        for relay in self._dropping:
            relay.stop()

    def discard(self) -> None:
        """Kill it, and release everything."""
        self._child.kill()
        self.close()
        self._stop_reading()

    def forget(self) -> None:
        """Handle the end of the process."""

    def _is_at_end(self) -> bool:
        """Whether its pipes are empty and have no writer."""
        return all(state_of(fd, select.POLLIN) == select.POLLHUP for fd in self._sources)

    def _stop_reading(self) -> None:
        # Their numbers may soon mean other files, and a task may wait for their content.
        self._sources.clear()
        self._reading.close()

    async def _drop_after_death(self) -> None:
        exit_ = await self._child.wait()
        self.forget()
        if self._ending:
            return
        if self._is_at_end():
            self._stop_reading()
            return
        self._report(exit_)
        for source in self._sources:
            try:
                relay = _drop_from(source)
            except OSError as error:
                # Do not end the whole pod: the container waits when the pipe is full.
                self._shim.log.error("output is not dropped", logger=self._name, why=str(error))
                continue
            self._dropping.append(relay)
            relay.start(self._shim.tasks)

    def _report(self, exit_: Exit) -> None:
        self._shim.log.error(self.lost, logger=self._name, status=exit_.status)


def _drop_from(source: int) -> Relay:
    """Return a relay that drops a pipe's output."""
    ours = Descriptors()
    try:
        reading = ours.keep(os.dup(source))
        null = ours.keep(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC))
        return Relay(reading, null)
    except OSError:
        ours.close()
        raise


class FileOutput(ProcessOutput):
    """Output that a child writes to a file."""

    lost = "output is lost: what writes its file was killed"

    def __init__(
        self, shim: ShimContext, path: str, *, child: Child, connection: socket.socket, pipe: _Pipe
    ) -> None:
        reading, writing = pipe
        super().__init__(shim, path, child, writing, [reading])
        self._connection = connection
        self._listening = loop.CancelScope()
        shim.tasks.start_soon(self._log_failures)
        self.watch()

    def start(self, tasks: Tasks) -> None:
        """Let the child start to copy."""
        super().start(tasks)
        try:
            self._connection.send(_START)
        except OSError:
            pass  # it has ended, and that is logged

    async def let_go(self) -> None:
        """Release everything once all output is in the file."""
        await super().let_go()
        await self._child.wait()
        if self._is_at_end():
            self.close()

    def finish(self) -> None:
        """Copy the rest of the output, and then end."""
        super().finish()
        if self.relay is None:
            self._tell_to_finish()

    async def drain(self, deadline: float) -> None:
        """Wait until all output is in the file; kill a child that takes too long."""
        await super().drain(deadline)
        self._tell_to_finish()
        with loop.CancelScope(deadline=deadline):
            await self._child.wait()
        if self._child.exit is None:
            self._shim.log.error("output is lost: its file system does not answer", file=self._name)
            self._child.kill()

    def close(self) -> None:
        """Let the child copy the available output and exit; do nothing if it has not started."""
        super().close()
        self._listening.cancel()
        self._connection.close()
        self._stop_reading()

    def _tell_to_finish(self) -> None:
        try:
            self._connection.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # it has ended

    def _report(self, exit_: Exit) -> None:
        self._shim.log.error(self.lost, file=self._name, status=exit_.status)

    async def _log_failures(self) -> None:
        with self._listening:
            while message := await _receive(self._connection):
                self._shim.log.error(
                    "output is lost: its file cannot be written",
                    file=self._name,
                    why=message.decode(errors="replace"),
                )


_Pipe = tuple[int, int]


async def leads_to_fifo(role: str, path: str) -> bool:
    """Whether a path leads to a fifo, not to another file.

    Args:
        role: the name of the stream: "stdin".
        path: the path to check.

    Raises:
        StdioUnavailable: the path cannot be checked.
        StdioTimeout: the file system does not answer.
    """
    with Opening(role, path):
        # Clients' fifos are below /run, which is in memory.
        if path.startswith(_IN_MEMORY) or not may_hang([("", path, "", ())]):
            return is_fifo(path)
        with loop.move_on_after(OPENING):
            try:
                return await loop.run_in_thread(lambda: is_fifo(path))
            except RuntimeError as error:  # no thread can be started
                raise OSError(errno.EAGAIN, str(error)) from error
    raise _late(f"{role} at {path}", "stat")


async def open_log_file(shim: ShimContext, path: str, *, make: bool = True) -> FileOutput:
    """Start a child that writes to a file.

    Args:
        shim: the parent of the child.
        path: the file.
        make: whether to create the file and its directories if missing.

    Raises:
        StdioUnavailable: the file cannot be opened, is a link, or is not suitable as a log.
        StdioTimeout: the file system does not answer.
    """
    pipe = reading, writing = os.pipe2(os.O_CLOEXEC)
    try:
        child, connection = await _start(
            shim,
            "the log file",
            path,
            lambda: (reading, _open_log(path, make=make)),
            reading,
            waits=True,
        )
    except BaseException:
        os.close(reading)
        os.close(writing)
        raise
    return FileOutput(shim, path, child=child, connection=connection, pipe=pipe)


async def open_input_file(shim: ShimContext, path: str) -> Input:
    """Start a child that fills a pipe from a file.

    Raises:
        StdioUnavailable: the file cannot be opened.
        StdioTimeout: the file system does not answer.
    """
    reading, writing = os.pipe2(os.O_CLOEXEC)
    try:
        child, connection = await _start(
            shim, "stdin", path, lambda: (_open_input(path), writing), writing
        )
        shim.tasks.start_soon(_keep_until_ended, child, connection)
    except BaseException:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    return Input(reading, filler=child)


async def _keep_until_ended(child: Child, connection: socket.socket) -> None:
    with connection:
        await child.wait()


async def _start(
    shim: ShimContext,
    role: str,
    path: str,
    open_: Callable[[], _Pipe],
    kept: int,
    *,
    waits: bool = False,
) -> tuple[Child, socket.socket]:
    """Start a child that copies, and wait until it has opened its file.

    The child calls ``open_``, which returns the descriptors to read from and to write to, and keeps
    ``kept`` open. A child that ``waits`` starts to copy when it receives :data:`_START`.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        try:
            fds = {kept, theirs.fileno()}
            pid = forked.fork(lambda: _be_copier(open_, theirs, fds, waits=waits))
        except BaseException:
            ours.close()
            raise
    child = shim.reaper.register(pid)
    ours.setblocking(False)
    try:
        await _wait_until_opened(ours, f"{role} at {path}")
    except BaseException:
        child.kill()
        ours.close()
        raise
    return child, ours


async def _wait_until_opened(connection: socket.socket, asked: str) -> None:
    message = b""
    with loop.move_on_after(OPENING) as waiting:
        message = await _receive(connection)
    if waiting.cancelled_caught:
        raise _late(asked, "open")
    if not message:
        raise StdioUnavailable(asked, found="what opens it was killed", do="try again")
    if message != _OPENED:
        raise StdioUnavailable(**json.loads(message))


def _late(asked: str, call: str) -> ShimError:
    return StdioTimeout(
        asked,
        found=f"{call}(2) had not returned after {OPENING:.0f} s",
        do="look for a FUSE or network file system that does not answer",
    )


async def _receive(connection: socket.socket) -> bytes:
    """Receive the next message; empty at the end of the connection."""
    while True:
        try:
            return connection.recv(_LONGEST_MESSAGE)
        except BlockingIOError:
            await loop.wait_readable(connection)
        except OSError:
            return b""  # the connection was reset, or closed by us


# -- in the child -------------------------------------------------------------------------------


def _be_copier(
    open_: Callable[[], _Pipe], connection: socket.socket, kept: set[int], *, waits: bool
) -> NoReturn:
    try:
        forked.reset_signals()
        forked.close_others(kept)
        source, sink = open_()
        connection.send(_OPENED)
        if not waits or connection.recv(_LONGEST_MESSAGE) == _START:
            _copy(source, sink, connection)
    except StdioUnavailable as error:
        parts = {"asked": error.asked, "found": error.found, "do": error.do}
        connection.send(json.dumps(parts).encode())
    finally:
        os._exit(0)


def _open_log(path: str, *, make: bool) -> int:
    with Opening("the log file", path, do="check the path, and what its directory allows"):
        flags = _APPEND
        if make:
            os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
            if os.path.islink(path):
                raise StdioUnavailable(
                    f"the log file {path}",
                    found="a symbolic link",
                    do="name the file that it leads to",
                )
            flags |= os.O_CREAT | os.O_NOFOLLOW
        fd = os.open(path, flags, 0o644)
    kind = os.fstat(fd).st_mode
    if not (stat.S_ISREG(kind) or stat.S_ISCHR(kind)):
        raise StdioUnavailable(
            f"the log file {path}", found="it is no regular file", do="name another path"
        )
    os.set_blocking(fd, True)
    return fd


def _open_input(path: str) -> int:
    with Opening("stdin", path):
        return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


def _copy(source: int, sink: int, connection: socket.socket) -> None:
    """Copy until the source ends, or until it is empty and the shim has closed the connection."""
    poll = select.poll()
    poll.register(source, select.POLLIN)
    poll.register(connection, select.POLLIN)
    os.set_blocking(source, False)
    finishing = failed = False
    while True:
        try:
            data = memoryview(os.read(source, _CHUNK))
        except BlockingIOError:
            if finishing:
                return
            finishing = any(fd == connection.fileno() for fd, _ in poll.poll())
            continue
        except OSError:
            return
        if not data:
            return
        try:
            while data:
                data = data[os.write(sink, data) :]
        except OSError as error:
            if not failed:
                failed = True
                connection.send(forked.reason(error).encode())
