"""What tasks wait for among each other."""

from __future__ import annotations

from collections import deque

from api.aio import loop as loops

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType

    from api.aio.loop import Task


class Event:
    """Something that happens once, and that any number of tasks can wait for."""

    __slots__ = ("_set", "_waiting")

    def __init__(self) -> None:
        self._set = False
        self._waiting: dict[Task, None] | None = None

    def is_set(self) -> bool:
        """Whether it has happened."""
        return self._set

    def set(self) -> None:
        """It happens."""
        self._set = True
        waiting, self._waiting = self._waiting, None
        if waiting:
            loop = loops.current()
            for task in waiting:
                loop.schedule(task)

    async def wait(self) -> None:
        """Return when it has happened."""
        if self._set:
            loops.raise_if_cancelled()
            return
        task = loops.current_task()
        if self._waiting is None:
            self._waiting = {}
        waiting = self._waiting
        waiting[task] = None
        await loops.park(lambda: waiting.pop(task))


class Lock:
    """What one task holds at a time; handed on in the order in which it was asked for."""

    __slots__ = ("_holder", "_waiting")

    def __init__(self) -> None:
        self._holder: Task | None = None
        self._waiting: deque[Task] | None = None

    def locked(self) -> bool:
        """Whether somebody holds it."""
        return self._holder is not None

    async def acquire(self) -> None:
        """Take it, when it is free.

        Raises:
            RuntimeError: the task holds it already.
        """
        task = loops.current_task()
        loops.raise_if_cancelled()
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
        await loops.park(lambda: waiting.remove(task))

    def release(self) -> None:
        """Hand it on.

        Raises:
            RuntimeError: the task does not hold it.
        """
        if self._holder is not loops.current_task():
            message = "a task releases a lock that it does not hold"
            raise RuntimeError(message)
        if self._waiting:
            self._holder = self._waiting.popleft()
            loops.current().schedule(self._holder)
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
