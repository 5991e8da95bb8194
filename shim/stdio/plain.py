"""Stdio without a terminal: fifos and files, or pipes that are passed on."""

from __future__ import annotations

import os

from api import aio
from shim.runtime import ChildStdio
from shim.stdio import ends
from shim.stdio.ends import Descriptors, KeptEnd, Opening
from shim.stdio.relay import Relay
from shim.stdio.stdio import DRAIN_SECONDS
from shim.stdio.uris import Fifo, LogFile

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final, Protocol

    from shim.log import Log
    from shim.stdio.logger import Logger
    from shim.stdio.uris import Output
    from shim.tasks import Tasks
else:
    Protocol = object

_NOBODY: Final = (0, 0)


class Flow(Protocol):
    """What passes something on."""

    done: aio.Event

    def start(self, tasks: Tasks) -> None:
        """Begin."""

    def finish(self) -> None:
        """Pass on what is there, and then end, whoever could still write."""

    def stop(self) -> None:
        """End now."""


class PlainStdio:
    """Stdio without a terminal.

    Args:
        tasks: where relays run.
        log: told when a log file takes no more.
        stdin, stdout, stderr: where they are.
        owner: the uid and gid that own what the process gets (options IoUid, IoGid).
        relayed: whether a fifo is written through a pipe of ours.
        logger: who takes stdout, and what there is of stderr, if they name one.

    Raises:
        StdioUnavailable: one of them cannot be opened.
    """

    def __init__(
        self,
        tasks: Tasks,
        log: Log,
        *,
        stdin: Fifo | None,
        stdout: Output,
        stderr: Output,
        owner: tuple[int, int] = _NOBODY,
        relayed: bool = False,
        logger: Logger | None = None,
    ) -> None:
        self._tasks = tasks
        self._log = log
        self._relayed = relayed
        self._logger = logger
        self._for_child = Descriptors()
        self._input_open = Descriptors()
        self._kept: list[KeptEnd] = []
        self._flows: list[Flow] = []
        self._input: Relay | None = None
        self._started = False
        self._stdout: int | None
        self._stderr: int | None
        try:
            self._stdin = self._open_input(stdin)
            if logger is not None:
                self._stdout, theirs = map(self._for_child.keep, logger.take())
                self._stderr = theirs if stderr == stdout else self._open_output(stderr)
            else:
                self._stdout = self._open_output(stdout)
                self._stderr = self._stdout if stderr == stdout else self._open_output(stderr)
            if owner != _NOBODY:
                for fd in set(self.child().fds().values()):
                    os.fchown(fd, *owner)
        except BaseException:
            self.close()
            raise

    def child(self) -> ChildStdio:
        """The ends that the process gets."""
        return ChildStdio(self._stdin, self._stdout, self._stderr)

    async def started(self) -> None:
        """Close our copies of the process's ends, and begin to pass on what it writes."""
        self._for_child.close()
        self._started = True
        for flow in self._flows:
            flow.start(self._tasks)
        if self._input is not None:
            self._input.start(self._tasks)

    def close_stdin(self) -> None:
        """Drop our write end: input ends when the client has closed its own."""
        self._input_open.close()

    def resize(self, width: int, height: int) -> None:
        """Nothing: there is no terminal."""

    async def ended(self) -> None:
        """Let a client take what it is taking, and hold the rest for one that comes later."""
        for end in self._kept:
            if await end.taken():
                self._tasks.start_soon(end.hand_over)

    async def let_go(self) -> None:
        """Close the input, and each fifo that the client has emptied."""
        self._input_open.close()
        if self._input is not None:
            self._input.stop()
        for flow in self._flows:
            await flow.done.wait()
        for end in self._kept:
            await end.close_when_empty()

    async def drain(self) -> None:
        """Pass on what has been written, but wait neither for a daemon nor for ever.

        What a process wrote to a fifo of its own needs no waiting: its reader finds it there.
        """
        if self._started:
            for flow in self._flows:
                flow.finish()
            with aio.move_on_after(DRAIN_SECONDS):
                for flow in self._flows:
                    await flow.done.wait()
            for end in self._kept:
                await end.wait_for_reader()
            if self._logger is not None:
                await self._logger.finish()

    def close(self) -> None:
        """Stop passing on and close everything."""
        self._for_child.close()
        self._input_open.close()
        for end in self._kept:
            end.close()
        for flow in self._flows:
            flow.stop()
        if self._input is not None:
            self._input.stop()
        if self._logger is not None:
            self._logger.close()

    def _open_input(self, place: Fifo | None) -> int | None:
        if place is None:
            return None
        with Opening("stdin", place.path):
            if ends.is_fifo(place.path):
                reading, writing = ends.open_fifo(place.path)
                self._input_open.keep(writing)
                os.set_blocking(reading, True)
                return self._for_child.keep(reading)
            # See the package's rules: not the file itself.
            source = os.open(place.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            reading, writing = ends.pipe_for(source)
        self._input = Relay(source, writing)
        return self._for_child.keep(reading)

    def _open_output(self, place: Output) -> int | None:
        if isinstance(place, Fifo):
            with Opening("stdout or stderr", place.path):
                if ends.is_fifo(place.path):
                    return self._open_fifo(place.path)
                return self._pipe_to_file(ends.open_existing_file(place.path), place.path)
        if isinstance(place, LogFile):
            with Opening("stdout or stderr", place.path):
                return self._pipe_to_file(ends.open_log_file(place.path), place.path)
        return None

    def _open_fifo(self, path: str) -> int:
        reading, writing = ends.open_fifo(path)
        self._kept.append(KeptEnd(reading))
        if not self._relayed:
            return self._for_child.keep(writing)
        source, theirs = ends.pipe_for(writing)
        self._for_child.keep(theirs)
        self._flows.append(Relay(source, writing))
        return theirs

    def _pipe_to_file(self, sink: int, path: str) -> int:
        source, theirs = ends.pipe_for(sink)
        self._for_child.keep(theirs)
        self._flows.append(relay_to_file(source, sink, path, self._log))
        return theirs


def relay_to_file(source: int, sink: int, path: str, log: Log) -> Flow:
    """What passes on to an open file; see :mod:`shim.stdio.log_file`.

    Args:
        source: a pipe's read end or a terminal's master; the flow's from now on.
        sink: the file; the flow's from now on.
        path: the file's name, for the log.
        log: told when it takes no more.
    """
    from shim.stdio.log_file import FileRelay  # noqa: PLC0415 - few containers write to a file

    return FileRelay(
        source,
        sink,
        at_failure=lambda error: log.error(
            "output is lost: its file cannot be written", file=path, why=error.strerror or ""
        ),
    )
