"""A process's stdio: the source of input, the sinks of output, and the operations on them.

=======================  ====================================================================
:class:`Input`           a fifo, or a pipe that is filled from a file
:class:`Output`          a descriptor to write to, as /dev/null is for a terminal
:class:`FifoOutput`      a fifo that a client of containerd reads; others: :mod:`shim.stdio.files`
:class:`PlainStdio`      all three without a terminal; with one: :mod:`shim.stdio.terminal`
=======================  ====================================================================

The life of an output: opened, taken by the process or a relay, started, ``ended`` or ``let_go``
after the process's end, ``finish`` and ``drain`` for Delete, and closed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from api.values import dataclass
from shim import loop
from shim.children import Child
from shim.loop import Tasks
from shim.stdio.pipes import Descriptors, Relay, open_fifo, state_of, waiting_bytes

# The most seconds that Delete waits for unread output.
DRAIN_SECONDS: Final = 10.0

# Seconds to wait for a client that has not opened its fifo by the process's end. It may be slow on
# a loaded machine, and a fifo's content is lost if no process has it open.
_READER_SECONDS: Final = 2.0
# Seconds to wait for a client that had opened its fifo when the process was created, and is gone.
# The client that deletes the process either knows that there is no reader, or is a restarted
# containerd that is opening the fifo.
_RETURN_SECONDS: Final = 0.05
_POLL_SECONDS: Final = 0.01
_LONGEST_POLL_SECONDS: Final = 1.0
# Seconds to wait for a client that reads, and polls without progress after which it counts as not
# reading: containerd writes 32 KiB of short lines to a log, on a perhaps slow disk, before it reads
# on.
_TAKING_SECONDS: Final = 5.0
_STALLED: Final = 100


class Input:
    """The source of a process's input.

    Args:
        fd: the descriptor for the process or a relay, owned by this object until :meth:`take`.
        writing: a write end of the fifo, or -1. While it is open, the input does not end.
        filler: the process that fills the pipe from a file.
    """

    __slots__ = ("_filler", "_open", "_untaken")

    def __init__(self, fd: int, *, writing: int = -1, filler: Child | None = None) -> None:
        self._untaken = fd
        self._open = Descriptors()
        if writing >= 0:
            self._open.keep(writing)
        self._filler = filler

    def take(self) -> int:
        """Return the descriptor to read, which the caller now owns."""
        fd, self._untaken = self._untaken, -1
        return fd

    def end(self) -> None:
        """End the input when its client closes the fifo: no other client may attach."""
        self._open.close()

    def close(self) -> None:
        """Release everything."""
        self.end()
        if self._untaken >= 0:
            os.close(self.take())
        if self._filler is not None:
            self._filler.kill()


class Output:
    """A sink of output.

    Args:
        fd: the descriptor for the process or a relay, owned by this object until :meth:`take`.
    """

    def __init__(self, fd: int) -> None:
        self._untaken = fd
        self.relay: Relay | None = None

    def take(self) -> int:
        """Return the descriptor to write, which the caller now owns."""
        fd, self._untaken = self._untaken, -1
        return fd

    def relay_from(self, source: int, *, close: Callable[[int], None] = os.close) -> Relay:
        """Pass on the output of a pipe or terminal, once started.

        Args:
            source: the descriptor to read, now owned by the relay.
            close: closes one of the relay's descriptors.
        """
        self.relay = Relay(source, self.take(), close=close)
        return self.relay

    def start(self, tasks: Tasks) -> None:
        """Start passing on."""
        if self.relay is not None:
            self.relay.start(tasks)

    async def ended(self, tasks: Tasks) -> None:
        """Handle that the process has ended, and its exit is about to be published.

        A client that is reading gets a moment for the rest.
        """

    async def let_go(self) -> None:
        """Keep open only what is still needed: the process has ended, and may never be deleted."""
        if self.relay is not None:
            await self.relay.done.wait()

    def finish(self) -> None:
        """Pass on what has been written, and then end, even if there are still writers."""
        if self.relay is not None:
            self.relay.finish()

    async def drain(self, deadline: float) -> None:
        """Wait until what was written has been read. Call this after :meth:`finish`.

        Args:
            deadline: when to give up, on the loop's clock.
        """
        if self.relay is not None:
            with loop.CancelScope(deadline=deadline):
                await self.relay.done.wait()

    def close(self) -> None:
        """Stop passing on and release everything."""
        if self.relay is not None:
            self.relay.stop()
        if self._untaken >= 0:
            os.close(self.take())

    def discard(self) -> None:
        """Release everything at once: the process was never created."""
        self.close()


class FifoOutput(Output):
    """A fifo that a client of containerd reads.

    This keeps a read end, so that SIGPIPE never kills the process. Without writers, it may become a
    write end, which also keeps the fifo's content, lets a late client open the fifo, and shows
    whether there is a client, because a write end without a reader is in error. With a client, it
    becomes a read end again: the client sees the end of the data, and if it leaves early, the rest
    stays for the next one.

    Args:
        path: the fifo.
        relayed: whether the process gets a pipe to pass on, instead of the fifo itself.

    Raises:
        OSError: the fifo cannot be opened.
    """

    def __init__(self, path: str, *, relayed: bool = False) -> None:
        ends = open_fifo(path)
        super().__init__(ends.writing)
        self._kept = ends.reading
        self._had_reader = ends.had_reader
        self._writes = False
        self._ended_at: float | None = None
        if relayed:
            try:
                source, theirs = os.pipe2(os.O_CLOEXEC)
            except OSError:
                self.close()
                raise
            self.relay_from(source)
            self._untaken = theirs

    async def ended(self, tasks: Tasks) -> None:
        """Let a client finish reading, and hold the rest for a later one."""
        if self.relay is not None:
            now = loop.current_time()
            await self._while_passed_on(self.relay, until=now, deadline=now + _TAKING_SECONDS)
        is_held = True
        if self.relay is None or self.relay.done.is_set():
            is_held = await self._is_left_after_a_moment()
        if is_held:
            tasks.start_soon(self._hold)

    async def let_go(self) -> None:
        """Close the fifo once it is empty; if that takes long, it stays open."""
        await super().let_go()
        with loop.move_on_after(_READER_SECONDS):
            while self._holds():
                await loop.sleep(_POLL_SECONDS)
            if not self._writes:  # otherwise it closes after a client has read it
                self._close_kept()

    async def drain(self, deadline: float) -> None:
        """Wait briefly for a client to read what is left in the fifo."""
        now = loop.current_time()
        until = (now if self._ended_at is None else self._ended_at) + _READER_SECONDS
        if self._had_reader:
            until = min(until, now + _RETURN_SECONDS)
        if self.relay is not None:
            await self._while_passed_on(self.relay, until=until, deadline=deadline)
            if not self.relay.done.is_set():
                return
        while self._holds():
            if self._has_reader():
                await self._while_taken()
                break
            if loop.current_time() >= until:
                return
            await loop.sleep(_POLL_SECONDS)
        self._close_write_end()

    def close(self) -> None:
        """Stop passing on and close the fifo."""
        super().close()
        self._close_kept()

    async def _while_passed_on(self, relay: Relay, *, until: float, deadline: float) -> None:
        """Wait until a relay is done, a client stops reading, or the deadline.

        Args:
            relay: the relay.
            until: the limit for a client that reads nothing, on the loop's clock.
            deadline: the limit for a client that reads.
        """
        passed, stalled = relay.passed, 0
        with loop.CancelScope(deadline=deadline):
            while not relay.done.is_set() and (stalled < _STALLED or loop.current_time() < until):
                with loop.move_on_after(_POLL_SECONDS):
                    await relay.done.wait()
                before, passed = passed, relay.passed
                stalled = 0 if passed > before else stalled + 1

    async def _is_left_after_a_moment(self) -> bool:
        """Whether the fifo still has output after its client, if any, had a moment to read it."""
        self._ended_at = loop.current_time()
        if not self._holds():
            return False
        if self._has_reader():
            await self._while_taken()
            self._keep_read_end()
        return self._holds()

    async def _hold(self) -> None:
        """Keep the fifo's content until a client has read it, even for days.

        containerd may be restarting. Its own shim waits for its client without a limit before it
        creates the process.
        """
        if self.relay is not None:
            await self.relay.done.wait()
        pause = _POLL_SECONDS
        while self._holds():
            if self._has_reader():
                self._keep_read_end()
            await loop.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_POLL_SECONDS)
        self._close_kept()

    async def _while_taken(self) -> None:
        """Wait while a client reads the fifo's content.

        containerd before 1.6.22 closes its end when it learns of a container's exit, even if it has
        not read everything.
        """
        left, stalled = waiting_bytes(self._kept), 0
        with loop.move_on_after(_TAKING_SECONDS):
            while left and stalled < _STALLED:
                await loop.sleep(_POLL_SECONDS)
                before, left = left, waiting_bytes(self._kept) if self._kept >= 0 else 0
                stalled = 0 if left < before else stalled + 1

    def _holds(self) -> bool:
        """Whether our fifo has any content."""
        return self._kept >= 0 and waiting_bytes(self._kept) > 0

    def _has_reader(self) -> bool:
        """Whether a client has the fifo open; from now on we keep a write end."""
        if not self._writes:
            self._reopen(os.O_WRONLY)
        return not state_of(self._kept)

    def _keep_read_end(self) -> None:
        """Keep a read end, so that the client sees the end of the data."""
        try:
            if self._writes:
                self._reopen(os.O_RDONLY)
        except OSError:  # no descriptor is free
            self._close_kept()

    def _reopen(self, mode: int) -> None:
        """Keep the other end instead, with the fifo's content."""
        path = f"/proc/self/fd/{self._kept}"
        other = os.open(path, mode | os.O_NONBLOCK | os.O_CLOEXEC)
        self._close_kept()
        self._kept, self._writes = other, mode == os.O_WRONLY

    def _close_write_end(self) -> None:
        """Let a new client see the end of the data."""
        if self._writes:
            self._close_kept()

    def _close_kept(self) -> None:
        if self._kept >= 0:
            os.close(self._kept)
            self._kept = -1


@dataclass(frozen=True, slots=True)
class ChildStdio:
    """A container process's three descriptors, and its console socket.

    Attributes:
        stdin, stdout, stderr: our descriptors; None for /dev/null.
        console_socket: the socket for the terminal's master; None without a terminal.
    """

    stdin: int | None = None
    stdout: int | None = None
    stderr: int | None = None
    console_socket: str | None = None

    def fds(self) -> dict[int, int]:
        """Return the descriptors, by their numbers in the process."""
        three = {0: self.stdin, 1: self.stdout, 2: self.stderr}
        return {number: fd for number, fd in three.items() if fd is not None}


class Stdio:
    """A process's stdio, with or without a terminal.

    Args:
        tasks: the group in which data is passed on.
        source: the input; None for /dev/null.
        outputs: the sinks of output.
    """

    def __init__(self, tasks: Tasks, source: Input | None, outputs: Iterable[Output]) -> None:
        self._tasks = tasks
        self._source = source
        self._outputs = list(dict.fromkeys(outputs))
        self._child = ChildStdio()
        self._started = False

    def child(self) -> ChildStdio:
        """Return the process's descriptors, for the runtime."""
        return self._child

    async def started(self) -> None:
        """Start to pass data on, once the process has its descriptors.

        Raises:
            StdioUnavailable: the runtime has not sent a terminal.
        """
        self._started = True
        for output in self._outputs:
            output.start(self._tasks)

    def close_stdin(self) -> None:
        """End the input (CloseIO) when its client closes it; no other client may attach."""
        if self._source is not None:
            self._source.end()

    def use_threads(self) -> None:
        """Read the process's pipes in threads. Call this before :meth:`started`."""
        for output in self._outputs:
            if output.relay is not None:
                output.relay.use_threads()

    def keep_stderr(self) -> None:
        """Keep stderr open after the process's end, for :meth:`tell`. Not for terminals."""

    def tell(self, line: str) -> bool:
        """Write a line to stderr, once, after the process's output. Never waits.

        Returns:
            Whether it was written. This needs a separate stderr that was kept, and enough room.
        """
        del line
        return False

    def resize(self, width: int, height: int) -> None:
        """Set the terminal's size in characters; nothing without a terminal."""

    async def ended(self) -> None:
        """Handle that the process has ended, and its exit is about to be published.

        A client that is reading gets a moment for the rest. The shim keeps what is left then for a
        later client.
        """
        for output in self._outputs:
            await output.ended(self._tasks)

    async def let_go(self) -> None:
        """Keep open only what is still needed: the process has ended, and may never be deleted.

        After a lost client, nobody deletes its exec.
        """
        if self._source is not None:
            self._source.close()
        for output in self._outputs:
            await output.let_go()

    async def drain(self) -> None:
        """Wait for a limited time until the process's output has been read; not for a daemon's."""
        if not self._started:
            return
        for output in self._outputs:
            output.finish()
        deadline = loop.current_time() + DRAIN_SECONDS
        for output in self._outputs:
            await output.drain(deadline)

    def close(self) -> None:
        """Release everything. May be called repeatedly, in any state."""
        if self._source is not None:
            self._source.close()
        for output in self._outputs:
            output.close()


class PlainStdio(Stdio):
    """Stdio without a terminal.

    Args:
        tasks: the group in which data is passed on.
        source: the input; None for /dev/null.
        outputs: stdout and stderr, by descriptor; the same object twice if shared.
        owner: the uid and gid of the process's descriptors (options IoUid, IoGid).
    """

    def __init__(
        self,
        tasks: Tasks,
        source: Input | None,
        outputs: Mapping[int, Output],
        owner: tuple[int, int],
    ) -> None:
        super().__init__(tasks, source, outputs.values())
        self._for_child = Descriptors()
        self._kept_stderr = Descriptors()
        fds = {output: self._for_child.keep(output.take()) for output in self._outputs}
        stdout, stderr = (fds[outputs[n]] if n in outputs else None for n in (1, 2))
        stdin = None
        if source is not None:
            stdin = self._for_child.keep(source.take())
            os.set_blocking(stdin, True)
        self._child = ChildStdio(stdin, stdout, stderr)
        try:
            for fd in set(self._child.fds().values()) if owner != (0, 0) else ():
                os.fchown(fd, *owner)
        except BaseException:
            self.close()
            raise

    def keep_stderr(self) -> None:
        """Keep stderr open. Call this before :meth:`started`.

        The reader of stderr sees no end before :meth:`ended`. Otherwise it would be gone before the
        shim knows why the process ended.
        """
        if self._child.stderr is not None:
            # Open it again: writing must not wait here, but may in the process.
            path = f"/proc/self/fd/{self._child.stderr}"
            try:
                fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            except OSError:
                return  # no free descriptor: the container works without it
            self._kept_stderr.keep(fd)

    def tell(self, line: str) -> bool:
        """Write a line to the kept stderr."""
        written = False
        for fd in self._kept_stderr:
            try:
                # All or nothing, since it is shorter than PIPE_BUF (pipe(7)).
                written = os.write(fd, line.encode(errors="replace") + b"\n") > 0
            except OSError:
                pass  # it is full, without a reader
        return written

    async def started(self) -> None:
        """Close our copies, since the process has its descriptors, and start to pass data on."""
        self._for_child.close()
        await super().started()

    async def ended(self) -> None:
        """Let the reader of stderr see its end, with a moment for the rest."""
        self._kept_stderr.close()
        await super().ended()

    def close(self) -> None:
        """Release everything."""
        self._kept_stderr.close()
        self._for_child.close()
        super().close()
