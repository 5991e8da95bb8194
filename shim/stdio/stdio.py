"""A process's stdio: what can be asked of it, and how it works without a terminal."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from api.values import dataclass
from shim import loop
from shim.stdio.ends import Descriptors
from shim.stdio.streams import DRAIN_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from shim.context import Tasks
    from shim.stdio.streams import Input, Output


@dataclass(frozen=True, slots=True)
class ChildStdio:
    """The three descriptors that a container's process gets, and its console socket.

    Attributes:
        stdin, stdout, stderr: our descriptors; None is /dev/null.
        console_socket: where the runtime sends the terminal's master; None without terminal.
    """

    stdin: int | None = None
    stdout: int | None = None
    stderr: int | None = None
    console_socket: str | None = None

    def fds(self) -> dict[int, int]:
        """The descriptors by the number that the process knows them under."""
        three = {0: self.stdin, 1: self.stdout, 2: self.stderr}
        return {number: fd for number, fd in three.items() if fd is not None}


class Stdio:
    """A process's stdio, with or without a terminal.

    Args:
        tasks: where it passes on.
        source: the input; None for /dev/null.
        outputs: where output goes.
    """

    def __init__(self, tasks: Tasks, source: Input | None, outputs: Iterable[Output]) -> None:
        self._tasks = tasks
        self._source = source
        self._outputs = list(dict.fromkeys(outputs))
        self._child = ChildStdio()
        self._started = False

    def child(self) -> ChildStdio:
        """What the runtime hands to the process."""
        return self._child

    async def started(self) -> None:
        """The process has its descriptors: start to pass on.

        Raises:
            StdioUnavailable: the runtime has sent no terminal.
        """
        self._started = True
        for output in self._outputs:
            output.start(self._tasks)

    def close_stdin(self) -> None:
        """End the input (CloseIO) when its client closes it; no other client may attach."""
        if self._source is not None:
            self._source.end()

    def keep_stderr(self) -> None:
        """Keep stderr open beyond the process's end, for :meth:`tell`. Nothing with a terminal."""

    def tell(self, line: str) -> bool:
        """Write a line to stderr, once, behind all that the process has written. Never waits.

        Returns:
            Whether it was written: there is a stderr of its own that was kept, with room.
        """
        del line
        return False

    def resize(self, width: int, height: int) -> None:
        """Set the terminal's size in characters; nothing without a terminal."""

    async def ended(self) -> None:
        """The process has ended, and its exit is about to be published.

        A client that is reading its output has a moment for the rest. What is left then is held
        until somebody comes.
        """
        for output in self._outputs:
            await output.ended(self._tasks)

    async def let_go(self) -> None:
        """The process has ended, and may never be deleted: keep open only what is still needed.

        A client that was cut off does not delete its exec, and nobody else does.
        """
        if self._source is not None:
            self._source.close()
        for output in self._outputs:
            await output.let_go()

    async def drain(self) -> None:
        """Wait until what the process wrote has been taken, but not for a daemon, nor for ever."""
        if not self._started:
            return
        for output in self._outputs:
            output.finish()
        deadline = loop.current_time() + DRAIN_SECONDS
        for output in self._outputs:
            await output.drain(deadline)

    def close(self) -> None:
        """Release everything. May be called more than once, and in any state."""
        if self._source is not None:
            self._source.close()
        for output in self._outputs:
            output.close()


class PlainStdio(Stdio):
    """Stdio without a terminal.

    Args:
        tasks: where it passes on.
        source: the input; None for /dev/null.
        outputs: stdout and stderr, by descriptor; the same one twice if they are one.
        owner: the uid and gid that own what the process gets (options IoUid, IoGid).
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
        """Keep stderr open; to be called before :meth:`started`.

        Its reader sees no end before :meth:`ended`. Without it, what takes the output would be gone
        before the shim knows why the process ended.
        """
        if self._child.stderr is not None:
            # Opened anew: that writing does not wait must not hold for the process, too.
            path = f"/proc/self/fd/{self._child.stderr}"
            try:
                fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            except OSError:
                return  # no descriptor is free: the container does not need it
            self._kept_stderr.keep(fd)

    def tell(self, line: str) -> bool:
        """Write a line to the stderr that was kept."""
        written = False
        for fd in self._kept_stderr:
            try:
                # All of it or nothing, as it is shorter than PIPE_BUF (pipe(7)).
                written = os.write(fd, line.encode(errors="replace") + b"\n") > 0
            except OSError:
                pass  # it is full, and nobody reads
        return written

    async def started(self) -> None:
        """The process has its descriptors: close our copies, and start to pass on."""
        self._for_child.close()
        await super().started()

    async def ended(self) -> None:
        """Let the reader of stderr have its end, and a moment for the rest."""
        self._kept_stderr.close()
        await super().ended()

    def close(self) -> None:
        """Release everything."""
        self._kept_stderr.close()
        self._for_child.close()
        super().close()
