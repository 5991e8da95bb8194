"""A child of the shim that does the work for one container, answers, and exits.

Reading an image, mounting, locking and querying the driver can hang, and need memory that an idle
shim should not keep. So the shim forks a worker for them, and serves the other containers while it
waits for the answer.

Rules
- The worker is a fork of the shim, without an exec. Forking is safe despite the shim's few threads:
  they mostly wait in system calls (they mount, unmount, close descriptors and move themselves to
  their cgroup), and hold no lock that the worker needs while the main thread runs Python code;
  glibc makes its allocator usable in the child.
  Source: fork(2), pthread_atfork(3).
- The worker handles no signals, keeps only the descriptors that it needs, and never returns to the
  shim's loop. It leads its own process group, which includes the programs that it runs.
- It has :data:`DEADLINE` seconds, plus the limit of each program that it runs. After that, or when
  the shim no longer waits, the group is killed. A worker in an uninterruptible system call may end
  later; the shim does not wait for it. One that does end is gone before its Create is undone.
- A worker that fails undoes nothing; its Create does that
  (:meth:`shim.work.injection.Injection.undo`, and unmounting the rootfs). If the shim is killed,
  the kernel kills the worker, and containerd's ``delete`` verb undoes its work.
- A request and an answer are lines of JSON over a socket, with at most one descriptor. The shim
  raises the worker's errors.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import array
import gc
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn

from api.errors import NvshimError, describe_bug
from shim import forked, loop
from shim.children import Child, Reaper, spawn
from shim.errors import ProgramTimeout, WorkerFailed, WorkerTimeout
from shim.programs import has_ended

# An answer: a JSON value, and a descriptor to pass, or -1.
Answer = tuple[dict[str, Any], int]

DEADLINE: Final = 60.0
"""A worker's seconds from its request to its answer."""

UNUSED: Final = 5.0
"""Seconds that a worker waits for a request."""

_RESERVED: Final = frozenset(range(6))  # 3 to 5: see shim.children
_CHUNK: Final = 1 << 16
_OUTPUT: Final = 1 << 20
_INT: Final = array.array("i").itemsize
_DYING: Final = 1.0


class Link:
    """The worker's end of the connection.

    Args:
        connection: the socket.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def receive(self) -> dict[str, Any] | None:
        """Wait for the request; return None if none comes within :data:`UNUSED` seconds."""
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        received = b""
        while not received.endswith(b"\n"):
            if not poll.poll(UNUSED * 1000):
                return None
            chunk = self._connection.recv(_CHUNK)
            if not chunk:
                return None
            received += chunk
        request: dict[str, Any] = json.loads(received)
        return request

    def extend_deadline(self, seconds: float) -> None:
        """Tell the shim that the next program may run this long."""
        self._send({"more": seconds})

    def run(self, argv: Sequence[str], timeout: float) -> tuple[int, bytes]:
        """Run a program to its end; the worker waits for its own children.

        Args:
            argv: the program and its arguments.
            timeout: seconds after which it is killed; the shim's deadline grows by this.

        Returns:
            Its exit status, and up to a megabyte of its stdout.

        Raises:
            ProgramNotFound: the program does not exist.
            ProgramTimeout: it did not exit in time, and was killed.
        """
        self.extend_deadline(timeout)
        reading, writing = os.pipe2(os.O_CLOEXEC)
        try:
            try:
                pid = spawn(Reaper(), argv, fds={1: writing}).pid
            finally:
                os.close(writing)
            deadline = time.monotonic() + timeout
            output = _read_all(reading, deadline)
        finally:
            os.close(reading)
        # It may close its output long before it ends, while it still closes the driver.
        if (
            output is None
            or (status := _status(pid, max(0.0, deadline - time.monotonic()))) is None
        ):
            os.kill(pid, signal.SIGKILL)
            _status(pid, _DYING)  # do not wait for one that hangs in the driver
            raise ProgramTimeout(
                f"to run {argv[0]!r}",
                found=f"it had not ended after {timeout} s",
                do="look for what holds it up (a hung driver, a frozen cgroup) in the kernel's log",
            )
        return status, output

    def answer(self, value: dict[str, Any], fd: int = -1) -> None:
        """Answer the request.

        Args:
            value: a JSON value.
            fd: a descriptor to duplicate into the shim; -1 for none.
        """
        self._send({"value": value}, fd)

    def fail(self, error: BaseException) -> None:
        """Answer with an error."""
        self._send({"error": _described(error)})

    def _send(self, message: dict[str, Any], fd: int = -1) -> None:
        content = json.dumps(message).encode() + b"\n"
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
        sent = self._connection.sendmsg([content], rights if fd >= 0 else [])
        self._connection.sendall(content[sent:])


class Worker:
    """A running worker, from the shim's point of view.

    Args:
        reaper: collects the worker.
        work: takes the request from its link, and returns the answer; None to exit without an
            answer.
        keep: other descriptors that it needs.
    """

    def __init__(
        self, reaper: Reaper, work: Callable[[Link], Answer | None], keep: frozenset[int]
    ) -> None:
        self._connection, theirs = socket.socketpair()
        self._connection.setblocking(False)
        shim = os.getpid()
        with theirs:
            kept = {*_RESERVED, *keep, theirs.fileno()}
            pid = forked.fork(lambda: _run(shim, work, theirs, kept))
        self._child: Child = reaper.register(pid)
        self._has_answered = False
        try:
            os.setpgid(pid, pid)  # as in the child, whichever is first
        except OSError:
            pass  # it has ended already

    async def ask(self, request: dict[str, Any]) -> Answer:
        """Let the worker do its work.

        Args:
            request: a JSON value.

        Returns:
            The answer; its descriptor belongs to the caller.

        Raises:
            NvshimError, OSError: what the worker raised.
            WorkerTimeout: it did not answer in time, and was killed.
            WorkerFailed: it exited without an answer.
        """
        try:
            return await self._ask(request)
        except TimeoutError:
            raise WorkerTimeout(
                "a container's files and devices",
                found=f"preparing them had not ended after {DEADLINE:.0f} s",
                do="look for what hangs (the image's file system, the driver) in the kernel's log",
            ) from None
        finally:
            self.end()

    async def _ask(self, request: dict[str, Any]) -> Answer:
        received, fds = bytearray(), array.array("i")
        try:
            with loop.fail_after(DEADLINE) as scope:
                await self._send(json.dumps(request).encode() + b"\n")
                while line := await self._read_line(received, fds):
                    self._has_answered = True
                    message = json.loads(line)
                    if "more" in message:
                        scope.deadline = loop.current_time() + DEADLINE + message["more"]
                        continue
                    if "error" in message:
                        raise _rebuilt(message["error"])
                    fd = fds.pop() if fds else -1
                    return message["value"], fd
        finally:
            for fd in fds:
                os.close(fd)
        raise WorkerFailed(
            "a container's files and devices",
            found=f"the process that prepares them {await self._how_it_ended()}",
            do="look into the kernel's log: it may have killed it for want of memory",
        )

    async def _send(self, content: bytes) -> None:
        rest = memoryview(content)
        while rest:
            try:
                rest = rest[self._connection.send(rest) :]
            except BlockingIOError:
                await loop.wait_writable(self._connection.fileno())
            except (BrokenPipeError, ConnectionResetError):
                return  # reading reports the same

    async def _read_line(self, received: bytearray, fds: array.array[int]) -> bytes:
        """Return the next line; empty if the connection ends within it."""
        while (end := received.find(b"\n")) < 0:
            try:
                chunk, rights, _, _ = self._connection.recvmsg(
                    _CHUNK, socket.CMSG_SPACE(_INT), socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                await loop.wait_readable(self._connection.fileno())
                continue
            except ConnectionResetError:
                return b""
            for _, _, passed in rights:
                fds.frombytes(passed[: len(passed) - len(passed) % _INT])
            if not chunk:
                return b""
            received += chunk
        line = bytes(received[:end])
        del received[: end + 1]
        return line

    async def _how_it_ended(self) -> str:
        with loop.move_on_after(_DYING):
            status = (await self._child.wait()).status
            killed = status > 128  # noqa: PLR2004 - as shim.children.Exit has it
            return f"was killed by signal {status - 128}" if killed else f"ended with {status}"
        return "closed its connection"

    def runs(self) -> bool:
        """Whether it still runs."""
        return self._child.runs()

    @property
    def gave_up(self) -> bool:
        """Whether it has ended before it read the request: none had come in time."""
        exit_ = self._child.exit
        return exit_ is not None and exit_.status == 0 and not self._has_answered

    async def gone(self) -> None:
        """Wait for its end, but not long: a killed process completes its system call, a mount."""
        with loop.CancelScope(shield=True), loop.move_on_after(_DYING):
            await self._child.wait()

    def end(self) -> None:
        """Kill it and the programs that it runs; a second call does nothing."""
        self._connection.close()
        if self._child.exit is None:
            try:
                os.killpg(self._child.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass  # it has ended meanwhile


def _run(
    shim: int,
    work: Callable[[Link], Answer | None],
    connection: socket.socket,
    kept: set[int],
) -> NoReturn:
    """Be the worker."""
    link, status = Link(connection), 1
    try:
        try:
            os.setpgid(0, 0)
            # Garbage here is the shim's, whose descriptor numbers now mean other files.
            gc.disable()
            forked.set_up_child(shim, kept)
            _signal.pthread_sigmask(signal.SIG_SETMASK, ())
            answer = work(link)
            if answer is not None:
                link.answer(*answer)
        except Exception as error:  # noqa: BLE001 - the shim raises it
            link.fail(error)
        status = 0
    finally:
        os._exit(status)


def _read_all(fd: int, deadline: float) -> bytes | None:
    """Return everything up to the end; None if it does not come in time."""
    output = bytearray()
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while poll.poll(max(0, deadline - time.monotonic()) * 1000):
        chunk = os.read(fd, _CHUNK)
        if not chunk:
            return bytes(output)
        output += chunk[: _OUTPUT - len(output)]
    return None


def _status(pid: int, seconds: float) -> int | None:
    """Reap a child and return its exit status; None if it does not exit in time."""
    pidfd = os.pidfd_open(pid)
    try:
        if not has_ended(pidfd, seconds):
            return None
    finally:
        os.close(pidfd)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def _described(error: BaseException) -> dict[str, Any]:
    if isinstance(error, NvshimError):
        kind = [type(error).__module__, type(error).__qualname__]
        said = [error.asked, error.found, error.do]
        row = [error.code, error.slug, error.status]
        return {"kind": kind, "said": said, "row": row}
    if isinstance(error, OSError):
        return {"os": [error.errno, error.strerror, error.filename]}
    return {"bug": describe_bug(error)}


def _rebuilt(described: dict[str, Any]) -> Exception:
    """Return the error that a worker raised."""
    if "os" in described:
        number, text, filename = described["os"]
        return OSError(number, text, filename) if filename else OSError(number, text)
    if "bug" in described:
        return WorkerFailed("a container's files and devices", found=described["bug"])
    kind = _class_of(*described["kind"])
    error = kind.__new__(kind)
    asked, found, do = described["said"]
    NvshimError.__init__(error, asked, found=found, do=do)  # a class may have other arguments
    error.code, error.slug, error.status = described["row"]
    return error


def _class_of(module: str, name: str) -> type[NvshimError]:
    """Return an error's class; the root class if the shim has not loaded it."""
    kind = getattr(sys.modules.get(module), name, None)
    if isinstance(kind, type) and issubclass(kind, NvshimError):
        return kind
    return NvshimError
