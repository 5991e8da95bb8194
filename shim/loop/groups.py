"""Task groups and :func:`run`; events and locks, by which tasks wait for each other.

A group is left when all of its tasks have ended, and raises what they raised.

Source: trio's documentation, "Nurseries and spawning"; anyio's, "Creating and managing tasks".
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Self, TypeVar

from shim.loop import core
from shim.loop.scopes import CancelScope

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from types import TracebackType

    from shim.loop.core import Task

Result = TypeVar("Result")


class TaskGroup:
    """Tasks that have ended when the group is left.

    The first exception of a task cancels the others; leaving the group raises it in an exception
    group.

    Attributes:
        cancel_scope: everything in it, including the task that has entered it.
    """

    def __init__(self) -> None:
        self.cancel_scope = CancelScope()
        self._active = False
        self._count = 0
        self._errors: list[BaseException] = []
        self._host: Task | None = None

    async def __aenter__(self) -> Self:
        self.cancel_scope.__enter__()
        self._active = True
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        raised: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        ends_by = raised
        if raised is not None:
            self.cancel_scope.cancel()
            if not isinstance(raised, core.Cancelled):
                self._errors.append(raised)
        while self._count:
            self._host = core.current_task()
            try:
                await core.park(self._forget_host if ends_by is None else core.unyielding)
            except core.Cancelled as error:
                self.cancel_scope.cancel()
                ends_by = error
        self._active = False
        if self._errors:
            errors, self._errors = self._errors, []
            ends_by = BaseExceptionGroup("unhandled errors in a TaskGroup", errors)
        try:
            if self.cancel_scope.__exit__(None, ends_by, None):
                return True
            if ends_by is not raised and ends_by is not None:
                raise ends_by from None  # the exceptions in it say everything
            return False
        finally:
            del ends_by, raised, traceback  # their tracebacks have this frame

    def start_soon(
        self,
        function: Callable[..., Coroutine[Any, Any, Any]],
        /,
        *arguments: Any,
        name: str | None = None,
    ) -> None:
        """Start a task; its first turn comes later.

        Args:
            function: a coroutine function.
            arguments: what it is called with.
            name: what it does, for people.

        Raises:
            RuntimeError: the group is not entered.
        """
        self._require_active()
        coro = function(*arguments)
        self._start(core.Task(coro, name or _name_of(function), self.cancel_scope, self._end))

    def start_in(
        self,
        scope: CancelScope,
        coro: Coroutine[Any, Any, Any],
        ended: Callable[[BaseException | None], BaseException | None],
        *,
        name: str,
    ) -> None:
        """Start a task in a scope of its own.

        Args:
            scope: made by :meth:`CancelScope.below`, in the group's scope or below it.
            coro: the coroutine.
            ended: called with what the task raised, or None; returns what the group is to raise.
            name: what it does, for people.

        Raises:
            RuntimeError: the group is not entered.
        """
        self._require_active()
        self._start(core.Task(coro, name, scope, lambda raised: self._end(ended(raised))))

    def _require_active(self) -> None:
        if not self._active:
            message = "tasks are started in a group while it is entered"
            raise RuntimeError(message)

    def _start(self, task: Task) -> None:
        self._count += 1
        core.current().start(task)

    def _end(self, raised: BaseException | None) -> None:
        """A task has ended."""
        self._count -= 1
        if raised is not None:
            if not isinstance(raised, core.Cancelled):
                self._errors.append(raised)
            if not self.cancel_scope.effectively_cancelled:
                self.cancel_scope.cancel()
        if not self._count and self._host is not None:
            host, self._host = self._host, None
            core.current().schedule(host)

    def _forget_host(self) -> None:
        self._host = None


def run(function: Callable[..., Coroutine[Any, Any, Result]], *arguments: Any) -> Result:
    """Run a coroutine function in a new loop, until it returns.

    Args:
        function: the function; called here.
        arguments: what it is called with.

    Returns:
        What it returns.

    Raises:
        RuntimeError: a loop is running already.
        BaseException: what it raises. What a signal handler raises while all tasks wait
            (KeyboardInterrupt) is raised after everything was cancelled and has ended.
    """
    if core.running():
        message = "a loop is running already"
        raise RuntimeError(message)
    loop = core.Loop()
    core.set_current(loop)
    try:
        everything = CancelScope()
        main = core.Task(function(*arguments), "main", everything, _ignore)
        loop.start(main)
        try:
            result: Result = loop.run(main)
        except BaseException:
            if main in loop.tasks:
                everything.cancel()
                try:
                    loop.run(main)
                except core.Cancelled:
                    pass
            raise
        return result
    finally:
        core.set_current(None)
        loop.close()


def _ignore(_: BaseException | None) -> None:
    """Until a loop runs the task."""


def _name_of(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__qualname__", function))


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
