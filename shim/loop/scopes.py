"""Cancel scopes, the groups in which tasks start, and :func:`run`.

Scopes form a tree; each contains tasks and other scopes. Cancelling a scope ends all waits below
it, except those below a shield, until the scope is left. A :class:`Cancelled` cannot pass a shield.
The outermost cancelled scope that it reaches catches it.

A group has a scope. Leaving it waits until all its tasks have ended, and raises their exceptions.

Source: trio's documentation, "Nurseries and spawning"; anyio's, "Creating and managing tasks".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from shim.loop import core
from shim.loop.core import Task, Timer

Result = TypeVar("Result")


class CancelScope:
    """A part of a task, and of the tasks in its groups, that can be cancelled separately.

    Args:
        deadline: the time of its cancellation, on the loop's clock.
        shield: whether its content continues when an outer scope is cancelled.

    Attributes:
        cancel_called: whether the scope is cancelled.
        cancelled_caught: whether the cancellation ended something inside.
        parent: the surrounding scope; None before it is entered.
        inside: the tasks and scopes directly in it.
    """

    __slots__ = (
        "_deadline",
        "_entered",
        "_shield",
        "_task",
        "_timer",
        "cancel_called",
        "cancelled_caught",
        "inside",
        "parent",
    )

    def __init__(self, *, deadline: float = math.inf, shield: bool = False) -> None:
        self.cancel_called = False
        self.cancelled_caught = False
        self._shield = shield
        self._deadline = deadline
        self._timer: Timer | None = None
        self.parent: CancelScope | None = None
        self._task: Task | None = None
        # Ordered, so that waits cancelled together always end in the same order.
        self.inside: dict[Task | CancelScope, None] = {}
        self._entered = False

    @classmethod
    def below(cls, parent: CancelScope, *, deadline: float = math.inf) -> CancelScope:
        """Return a scope within another one for tasks to start in. No task enters or leaves it."""
        scope = cls(deadline=deadline)
        scope.parent = parent
        parent.inside[scope] = None
        scope._start_timer()
        return scope

    def dissolve(self) -> None:
        """Remove a scope from :meth:`below` whose tasks have ended."""
        self._stop_timer()
        if self.parent is not None:
            del self.parent.inside[self]

    def __enter__(self) -> Self:
        if self._entered:
            message = "a scope is entered once"
            raise RuntimeError(message)
        self._entered = True
        task = core.current_task()
        self._task, self.parent = task, task.scope
        task.scope.remove(task)
        task.scope.inside[self] = None
        task.scope = self
        self.add(task)
        self._start_timer()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        raised: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        task, parent = self._task, self.parent
        if task is None or parent is None or task.scope is not self:
            message = "scopes are left in the order in which they were entered, by the same task"
            raise RuntimeError(message)
        self._task = None
        self._stop_timer()
        self.remove(task)
        del parent.inside[self]
        parent.add(task)
        task.scope = parent
        caught: bool = (
            self.cancel_called
            and isinstance(raised, core.Cancelled)
            and (self._shield or not parent.effectively_cancelled)
        )
        self.cancelled_caught = caught
        return caught

    @property
    def deadline(self) -> float:
        """The time of its cancellation, on the loop's clock; may be changed."""
        return self._deadline

    @deadline.setter
    def deadline(self, value: float) -> None:
        self._deadline = value
        if self._task is not None or self._timer is not None:
            self._stop_timer()
            self._start_timer()

    @property
    def effectively_cancelled(self) -> bool:
        """Whether it, or a scope around it without a shield in between, is cancelled."""
        scope: CancelScope | None = self
        while scope is not None:
            if scope.cancel_called:
                return True
            if scope._shield:  # noqa: SLF001 - each wait evaluates this
                return False
            scope = scope.parent
        return False

    def cancel(self) -> None:
        """Cancel everything inside: all present and later waits."""
        if self.cancel_called:
            return
        self.cancel_called = True
        self._stop_timer()
        if self.inside:
            self._end_waits()

    def add(self, task: Task) -> None:
        """Make it a task's innermost scope."""
        self.inside[task] = None

    def remove(self, task: Task) -> None:
        """Record that the task is no longer inside."""
        del self.inside[task]

    def _end_waits(self) -> None:
        """End the waits inside, except behind a shield."""
        loop = core.current()
        for member in tuple(self.inside):
            if not isinstance(member, CancelScope):
                loop.cancel(member)
            elif not member._shield and not member.cancel_called:  # noqa: SLF001
                member._end_waits()  # noqa: SLF001

    def _start_timer(self) -> None:
        if self._deadline == math.inf or self.cancel_called:
            return
        if self._deadline <= core.now():
            self.cancel()
        else:
            self._timer = core.current().timers.at(self._deadline, self.cancel)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            core.current().timers.stop(self._timer)
            self._timer = None


class _FailAfter:
    """A scope with a deadline that raises TimeoutError if the deadline cancelled it."""

    __slots__ = ("_scope",)

    def __init__(self, deadline: float) -> None:
        self._scope = CancelScope(deadline=deadline)

    def __enter__(self) -> CancelScope:
        return self._scope.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        raised: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        caught = self._scope.__exit__(kind, raised, traceback)
        if caught and self._scope.deadline <= core.now():
            raise TimeoutError
        return caught


def move_on_after(delay: float | None, *, shield: bool = False) -> CancelScope:
    """Return a scope that is cancelled after some time.

    Args:
        delay: in seconds; None for never.
        shield: whether its content continues when an outer scope is cancelled.
    """
    return CancelScope(deadline=_deadline(delay), shield=shield)


def fail_after(delay: float | None) -> _FailAfter:
    """Return a scope that is cancelled after some time, and then raises TimeoutError.

    Args:
        delay: in seconds; None for never.
    """
    return _FailAfter(_deadline(delay))


def _deadline(delay: float | None) -> float:
    return math.inf if delay is None else core.now() + delay


class Tasks(Protocol):
    """A place to start tasks: a group, guarded or not."""

    def start_soon(
        self, function: Callable[..., Coroutine[Any, Any, Any]], /, *arguments: Any
    ) -> object:
        """Start one, without waiting for its first step."""


class TaskGroup:
    """A group of tasks; leaving it waits until all have ended.

    The first exception in a task cancels the others; leaving the group raises it in an exception
    group.

    Attributes:
        cancel_scope: contains everything in the group, including the task that has entered it.
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
                raise ends_by from None  # the exceptions in the group explain everything
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
        """Start a task, without waiting for its first step.

        Args:
            function: a coroutine function.
            arguments: the arguments of the function.
            name: what it does, for messages.

        Raises:
            RuntimeError: the group has not been entered.
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
        """Start a task in a separate scope.

        Args:
            scope: a scope made by :meth:`CancelScope.below`, in the group's scope or below it.
            coro: the coroutine.
            ended: called with the task's exception or None; returns an exception for the group to
                raise.
            name: what it does, for messages.

        Raises:
            RuntimeError: the group has not been entered.
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
        """Handle the end of a task."""
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


class GuardedTasks:
    """Tasks in a group that do not end each other by failing.

    Normally a group ends with its first exception. But one shim serves a whole pod, so a bug
    triggered by one container's output must not end its neighbours.

    Args:
        group: the group.
        report: called with a task's exception.
    """

    __slots__ = ("_group", "_report")

    def __init__(self, group: Tasks, report: Callable[[Exception], object]) -> None:
        self._group = group
        self._report = report

    def start_soon(
        self, function: Callable[..., Coroutine[Any, Any, Any]], /, *arguments: Any
    ) -> None:
        """Start one, without waiting for its first step."""
        self._group.start_soon(self._run, function, arguments)

    async def _run(
        self, function: Callable[..., Coroutine[Any, Any, Any]], arguments: tuple[Any, ...]
    ) -> None:
        try:
            await function(*arguments)
        except Exception as error:  # noqa: BLE001 - no error may end the pod
            self._report(error)


def run(function: Callable[..., Coroutine[Any, Any, Result]], *arguments: Any) -> Result:
    """Run a coroutine function in a new loop, until it returns.

    Args:
        function: the function; called here.
        arguments: the arguments of the function.

    Returns:
        Its return value.

    Raises:
        RuntimeError: a loop is already running.
        BaseException: the function's exception; or that of a signal handler which raises while all
            tasks wait (KeyboardInterrupt), after everything was cancelled and has ended.
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
