"""Events and locks, by which tasks wait for each other."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from shim.loop import core

if TYPE_CHECKING:
    from types import TracebackType

    from shim.loop.core import Task


class Event:
    """Happens once; any number of tasks can wait for it."""

    __slots__ = ("_set", "_waiting")

    def __init__(self) -> None:
        self._set = False
        self._waiting: dict[Task, None] | None = None

    def is_set(self) -> bool:
        """Whether it has happened."""
        return self._set

    def set(self) -> None:
        """Wake all that wait, now and later."""
        self._set = True
        waiting, self._waiting = self._waiting, None
        if waiting:
            loop = core.current()
            for task in waiting:
                loop.schedule(task)

    async def wait(self) -> None:
        """Return when it has happened."""
        if self._set:
            core.raise_if_cancelled()
            return
        task = core.current_task()
        if self._waiting is None:
            self._waiting = {}
        waiting = self._waiting
        waiting[task] = None
        await core.park(lambda: waiting.pop(task))


class Lock:
    """Held by one task at a time; passed on in the order of the requests."""

    __slots__ = ("_holder", "_waiting")

    def __init__(self) -> None:
        self._holder: Task | None = None
        self._waiting: deque[Task] | None = None

    async def acquire(self) -> None:
        """Wait until it is free, and hold it.

        Raises:
            RuntimeError: the task holds it already.
        """
        task = core.current_task()
        core.raise_if_cancelled()
        if self._holder is None:
            self._holder = task
            return
        if self._holder is task:
            message = "a task waits for a lock that it holds"
            raise RuntimeError(message)
        if self._waiting is None:
            self._waiting = deque()
        waiting = self._waiting
        waiting.append(task)
        await core.park(lambda: waiting.remove(task))

    def release(self) -> None:
        """Pass it on.

        Raises:
            RuntimeError: the task does not hold it.
        """
        if self._holder is not core.current_task():
            message = "a task releases a lock that it does not hold"
            raise RuntimeError(message)
        if self._waiting:
            self._holder = self._waiting.popleft()
            core.current().schedule(self._holder)
        else:
            self._holder = None

    async def __aenter__(self) -> None:
        await self.acquire()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        raised: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()
