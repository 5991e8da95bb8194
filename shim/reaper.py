"""The one owner of wait(2) in the shim.

The shim is a subreaper: besides the runtimes that it spawns, every container's init process
and exec becomes its child when runc exits. The first call of ``waitpid`` takes the status, so there
is one caller, which hands the statuses out.

Rules
- Nothing else in this process waits: not :mod:`subprocess`, not asyncio's or anyio's process
  functions. (They report status 0 or 255 if another caller has reaped the child.)
- A process that we spawned is registered before the loop runs again, so its exit cannot be
  missed. The pid of a container's process is learned late, from runc's pid file; its exit may
  come first. While a :meth:`Reaper.window` is open, the exits of unknown pids are kept.
- No timer is involved: a loaded machine delays an exit, and never loses one.

Source: prctl(2) PR_SET_CHILD_SUBREAPER, waitid(2).
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from api.values import dataclass
from shim import loop

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class Exit:
    """How a process ended."""

    pid: int  # which process
    status: int  # its exit code (0-255), or 128 + the signal that killed it
    at: int  # when it was reaped, in nanoseconds since the epoch


class Child:
    """A process whose exit this shim waits for."""

    __slots__ = ("_done", "exit", "pid")

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.exit: Exit | None = None
        self._done = loop.Event()

    def runs(self) -> bool:
        """Whether the process has not ended; one that was not reaped yet has."""
        if self.exit is not None:
            return False
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        except ChildProcessError:
            return False

    def signal(self, number: int) -> None:
        """Signal the process, unless it was reaped: its pid could be another process's by now."""
        if self.exit is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process, unless it was reaped."""
        self.signal(signal.SIGKILL)

    async def wait(self) -> Exit:
        """How the process ended, once it has."""
        await self._done.wait()
        if self.exit is None:
            message = "the exit of a child is known before its waiters are woken"
            raise AssertionError(message)
        return self.exit

    def _finish(self, exit_: Exit) -> None:
        self.exit = exit_
        self._done.set()


class Reaper:
    """Reaps every child that ended and wakes the tasks that wait for it."""

    def __init__(self) -> None:
        self._children: dict[int, Child] = {}
        self._windows = 0
        self._unclaimed: dict[int, Exit] = {}

    @contextmanager
    def window(self) -> Iterator[None]:
        """Keep the exits of unknown processes, for a pid that will only be learned later."""
        self._windows += 1
        try:
            yield
        finally:
            self._windows -= 1
            if not self._windows:
                self._unclaimed.clear()

    def register(self, pid: int) -> Child:
        """Keep the exit of a process from now on.

        Args:
            pid: a child of ours that was spawned in this turn of the loop, or one that a
                runtime left to us within an open :meth:`window`.

        Returns:
            The child; its exit is already known if it ended in the meantime.

        Raises:
            ChildProcessError: it is not a child of ours, and never was.
        """
        child = Child(pid)
        kept = self._unclaimed.pop(pid, None)
        if not _is_our_child(pid):
            if kept is None:
                message = f"process {pid} is not a child of the shim"
                raise ChildProcessError(message)
            child._finish(kept)  # noqa: SLF001 - a Child is finished by its reaper alone
        else:
            self._children[pid] = child
        return child

    def reap(self) -> None:
        """Reap all children that have ended. To be called upon SIGCHLD."""
        while True:
            try:
                result = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG)
            except ChildProcessError:
                return
            if result is None:
                return
            status = result.si_status
            if result.si_code != os.CLD_EXITED:
                status += 128
            exit_ = Exit(result.si_pid, status, time.time_ns())
            child = self._children.pop(exit_.pid, None)
            if child is not None:
                child._finish(exit_)  # noqa: SLF001 - see register
            elif self._windows:
                self._unclaimed[exit_.pid] = exit_


def _is_our_child(pid: int) -> bool:
    """Whether a live process has this pid now: then a kept exit is its predecessor's."""
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except OSError:  # no child, or no number that a process can have
        return False
    return True
