"""Where a process's input comes from and where its output goes.

=======================  ==================================================================
:class:`Input`           a fifo, or a pipe that is filled from a file
:class:`Output`          a descriptor to write to, as /dev/null is for a terminal
:class:`FifoOutput`      a fifo that a client of containerd reads
:class:`ProcessOutput`   a pipe that a process of ours reads: a logger, or what writes a log file
=======================  ==================================================================

The life of an output: opened, taken by the process or by a relay, started, then ``ended`` or
``let_go`` when the process has ended, ``finish`` and ``drain`` for Delete, and closed.
"""

from __future__ import annotations

import os
import select
from typing import TYPE_CHECKING, Final

from shim import loop
from shim.stdio import ends
from shim.stdio.ends import Descriptors, waiting_bytes
from shim.stdio.relay import Relay

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shim.context import ShimContext, Tasks
    from shim.reaper import Child, Exit

# The longest that Delete waits for output that was written and not yet taken.
DRAIN_SECONDS: Final = 10.0

# Seconds to wait for a client that has not opened its fifo when the process has ended. It may be
# slow on a loaded machine, and what is in a fifo that nobody has open is lost.
_READER_SECONDS: Final = 2.0
_POLL_SECONDS: Final = 0.01
_LONGEST_POLL_SECONDS: Final = 1.0
# Seconds to wait for a client that is reading. After so many polls without progress it is not:
# containerd writes 32 KiB of short lines to a log before it reads on, and that disk may be slow.
_TAKING_SECONDS: Final = 5.0
_STALLED: Final = 100


class Input:
    """Where a process's input comes from.

    Args:
        fd: what the process or a relay reads; ours until :meth:`take`.
        writing: a write end of the fifo, or -1: while it is open, the input has no end.
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
        """The descriptor to read from; the taker's from now on."""
        fd, self._untaken = self._untaken, -1
        return fd

    def end(self) -> None:
        """Let the input end when its client closes the fifo: no other client may attach."""
        self._open.close()

    def close(self) -> None:
        """Release everything."""
        self.end()
        if self._untaken >= 0:
            os.close(self.take())
        if self._filler is not None:
            self._filler.kill()


class Output:
    """Where output goes.

    Args:
        fd: what the process or a relay writes to; ours until :meth:`take`.
    """

    def __init__(self, fd: int) -> None:
        self._untaken = fd
        self.relay: Relay | None = None

    def take(self) -> int:
        """The descriptor to write to; the taker's from now on."""
        fd, self._untaken = self._untaken, -1
        return fd

    def relay_from(self, source: int) -> Relay:
        """Pass on what comes out of a pipe or terminal, once it is started.

        Args:
            source: read from; the relay's from now on.
        """
        self.relay = Relay(source, self.take())
        return self.relay

    def start(self, tasks: Tasks) -> None:
        """Start passing on."""
        if self.relay is not None:
            self.relay.start(tasks)

    async def ended(self, tasks: Tasks) -> None:
        """The process has ended, and its exit is about to be published.

        A client that is reading has a moment for the rest.
        """

    async def let_go(self) -> None:
        """The process has ended and may never be deleted: keep open only what is still needed."""
        if self.relay is not None:
            await self.relay.done.wait()

    def finish(self) -> None:
        """Pass on what has been written, and then end, whoever could still write."""
        if self.relay is not None:
            self.relay.finish()

    async def drain(self, deadline: float) -> None:
        """Wait until what was written has been taken. To be called after :meth:`finish`.

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
        """Release everything at once: the process was never made."""
        self.close()


class FifoOutput(Output):
    """A fifo that a client of containerd reads.

    A read end is kept, so that the process is never killed by SIGPIPE. When nobody writes any more
    it may become a write end: that holds what is in the fifo too, lets a client that comes
    late open the fifo, and shows whether there is one: a write end is in error if nobody reads.

    Args:
        path: the fifo.
        relayed: whether the process gets a pipe that is passed on, and not the fifo itself.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: str, *, relayed: bool = False) -> None:
        reading, writing = ends.open_fifo(path)
        super().__init__(writing)
        self._kept = reading
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
        """Let a client take what it is taking, and hold the rest for one that comes later."""
        if self.relay is not None:
            await self._while_passed_on(self.relay)
        is_held = True
        if self.relay is None or self.relay.done.is_set():
            is_held = await self._is_left_after_a_moment()
        if is_held:
            tasks.start_soon(self._hold)

    async def let_go(self) -> None:
        """Close the fifo as soon as it is empty; if that takes long, it stays open."""
        await super().let_go()
        with loop.move_on_after(_READER_SECONDS):
            while self._holds():
                await loop.sleep(_POLL_SECONDS)
            if not self._writes:  # or it is closed when somebody has read it
                self._close_kept()

    async def drain(self, deadline: float) -> None:
        """If something is in the fifo, wait a little for a client to take it."""
        await super().drain(deadline)
        if self.relay is not None and not self.relay.done.is_set():
            return
        began = loop.current_time() if self._ended_at is None else self._ended_at
        while self._holds():
            if self._has_reader():
                await self._while_taken()
                break
            if loop.current_time() >= began + _READER_SECONDS:
                return
            await loop.sleep(_POLL_SECONDS)
        self._close_write_end()

    def close(self) -> None:
        """Stop passing on and close the fifo."""
        super().close()
        self._close_kept()

    async def _while_passed_on(self, relay: Relay) -> None:
        passed, stalled = relay.passed, 0
        with loop.move_on_after(_TAKING_SECONDS):
            while not relay.done.is_set() and stalled < _STALLED:
                with loop.move_on_after(_POLL_SECONDS):
                    await relay.done.wait()
                before, passed = passed, relay.passed
                stalled = 0 if passed > before else stalled + 1

    async def _is_left_after_a_moment(self) -> bool:
        """Whether something is left that nobody has come for."""
        self._ended_at = loop.current_time()
        if not self._holds():
            return False
        if not self._has_reader():
            return True
        await self._while_taken()
        self._close_kept()  # or the client would wait for an end that only we delay
        return False

    async def _hold(self) -> None:
        """Hold what is in the fifo until a client comes, be it days later, and let it have the end.

        containerd may be restarting; its own shim waits for its client before it makes the process,
        for ever.
        """
        if self.relay is not None:
            await self.relay.done.wait()
        pause = _POLL_SECONDS
        while self._holds() and not self._has_reader():
            await loop.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_POLL_SECONDS)
        self._close_write_end()

    async def _while_taken(self) -> None:
        """Wait while a client takes what is in the fifo.

        containerd before 1.6.22 closes its end when it learns of a container's exit, read or not.
        """
        fd, stalled = self._kept, 0
        left = waiting_bytes(fd)
        with loop.move_on_after(_TAKING_SECONDS):
            while left and stalled < _STALLED:
                await loop.sleep(_POLL_SECONDS)
                if self._kept != fd:
                    return
                before, left = left, waiting_bytes(fd)
                stalled = 0 if left < before else stalled + 1

    def _holds(self) -> bool:
        """Whether something is in the fifo that we hold."""
        return self._kept >= 0 and waiting_bytes(self._kept) > 0

    def _has_reader(self) -> bool:
        """Whether a client has the fifo open; what we keep is a write end from now on."""
        if not self._writes:
            path = f"/proc/self/fd/{self._kept}"
            writing = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            self._close_kept()
            self._kept, self._writes = writing, True
        return not ends.state_of(self._kept)

    def _close_write_end(self) -> None:
        """Let a client that has come have the end."""
        if self._writes:
            self._close_kept()

    def _close_kept(self) -> None:
        if self._kept >= 0:
            os.close(self._kept)
            self._kept = -1


class ProcessOutput(Output):
    """Output that a process of ours reads from pipes.

    Read ends are kept. If the process dies before those that write, what they write is dropped:
    they are not killed by SIGPIPE, and do not wait for a reader.

    Args:
        shim: where it is watched, and whose log is told if it dies too early.
        name: what is logged as its name.
        child: the process.
        fd: the write end to take.
        sources: the read ends of all its pipes; ours from now on.
    """

    lost: str
    """What is logged if it dies too early."""

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
        """Drop what it would have read, and log that, if it dies before it is to end."""
        self._shim.tasks.start_soon(self._drop_after_death)

    def finish(self) -> None:
        """From now on it may end."""
        self._ending = True
        super().finish()

    def close(self) -> None:
        """Release what is ours; the process ends when it has read what was written."""
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
        """It has ended."""

    def _is_at_end(self) -> bool:
        """Whether nothing is left in its pipes, and nobody can write to them any more."""
        return all(ends.state_of(fd, select.POLLIN) == select.POLLHUP for fd in self._sources)

    def _stop_reading(self) -> None:
        # Their numbers are other files' soon, and somebody may be waiting for what is in them.
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
                # Not the whole pod's end for it: the container will wait when the pipe is full.
                self._shim.log.error("output is not dropped", logger=self._name, why=str(error))
                continue
            self._dropping.append(relay)
            relay.start(self._shim.tasks)

    def _report(self, exit_: Exit) -> None:
        self._shim.log.error(self.lost, logger=self._name, status=exit_.status)


def _drop_from(source: int) -> Relay:
    """A relay that drops what comes out of a pipe."""
    ours = Descriptors()
    try:
        reading = ours.keep(os.dup(source))
        null = ours.keep(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC))
        return Relay(reading, null)
    except OSError:
        ours.close()
        raise
