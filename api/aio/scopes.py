"""Scopes, by which tasks are cancelled, and groups of tasks.

Scopes are a tree: in each are tasks and further scopes. Cancelling one cancels all waits below
it, but for those below a shield.
"""

from __future__ import annotations

import math

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from types import TracebackType
    from typing import Any, Protocol, Self, TypeVar, overload

    from api.aio.loop import Task, Timer

    Value_contra = TypeVar("Value_contra", contravariant=True)

    class TaskStatus(Protocol[Value_contra]):
        """How a task that was started by :meth:`TaskGroup.start` says that it has begun."""

        @overload
        def started(self: TaskStatus[None]) -> None: ...

        @overload
        def started(self, value: Value_contra) -> None: ...

        def started(self, value: Value_contra | None = None) -> None:
            """It has begun.

            Args:
                value: what ``start`` returns.
            """

    class Tasks(Protocol):
        """Where tasks can be started: a group of ours, or of anyio's."""

        def start_soon(
            self, function: Callable[..., Coroutine[Any, Any, Any]], /, *arguments: Any
        ) -> object:
            """See :meth:`TaskGroup.start_soon`."""

        async def start(
            self, function: Callable[..., Coroutine[Any, Any, Any]], /, *arguments: Any
        ) -> Any:
            """See :meth:`TaskGroup.start`."""


class CancelScope:
    """A part of a task, and of the tasks in its groups, that can be cancelled by itself.

    Args:
        deadline: when it is cancelled, on the loop's clock.
        shield: whether what is cancelled outside goes on inside.

    Attributes:
        cancel_called: whether it is cancelled.
        cancelled_caught: whether something inside was cancelled by it.
        shield: see above.
        parent: the scope that it is in; None before it is entered.
        inside: the tasks of which it is the innermost scope, and the scopes in it.
    """

    __slots__ = (
        "_deadline",
        "_entered",
        "_task",
        "_timer",
        "cancel_called",
        "cancelled_caught",
        "inside",
        "parent",
        "shield",
    )

    def __init__(self, *, deadline: float = math.inf, shield: bool = False) -> None:
        self.cancel_called = False
        self.cancelled_caught = False
        self.shield = shield
        self._deadline = deadline
        self._timer: Timer | None = None
        self.parent: CancelScope | None = None
        self._task: Task | None = None
        self.inside: set[Task | CancelScope] = set()
        self._entered = False

    @classmethod
    def below(cls, parent: CancelScope) -> CancelScope:
        """A scope in another, that no task enters: one is born in it."""
        scope = cls()
        scope.parent = parent
        parent.inside.add(scope)
        return scope

    def __enter__(self) -> Self:
        if self._entered:
            message = "a scope is entered once"
            raise RuntimeError(message)
        self._entered = True
        task = loops.current_task()
        self._task, self.parent = task, task.scope
        task.scope.give(task)
        task.scope.inside.add(self)
        task.scope = self
        self.inside.add(task)
        self._watch()
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
        self._unwatch()
        self.inside.discard(task)
        parent.inside.discard(self)
        parent.take(task)
        task.scope = parent
        if (
            self.cancel_called
            and isinstance(raised, loops.Cancelled)
            and not parent.effectively_cancelled
        ):
            self.cancelled_caught = True
        return self.cancelled_caught

    @property
    def deadline(self) -> float:
        """When it is cancelled, on the loop's clock; may be changed."""
        return self._deadline

    @deadline.setter
    def deadline(self, value: float) -> None:
        self._deadline = value
        if self._task is not None:
            self._unwatch()
            self._watch()

    @property
    def effectively_cancelled(self) -> bool:
        """Whether it is cancelled, or one around it that no shield keeps off."""
        scope: CancelScope | None = self
        while scope is not None:
            if scope.cancel_called:
                return True
            if scope.shield:
                return False
            scope = scope.parent
        return False

    def effective_deadline(self) -> float:
        """When it is cancelled, by itself or from outside; minus infinity if it is."""
        deadline = math.inf
        scope: CancelScope | None = self
        while scope is not None:
            if scope.cancel_called:
                return -math.inf
            deadline = min(deadline, scope.deadline)
            if scope.shield:
                break
            scope = scope.parent
        return deadline

    def cancel(self) -> None:
        """Cancel what is inside, now and whatever it waits for later."""
        if self.cancel_called:
            return
        self.cancel_called = True
        self._unwatch()
        self.spread()

    def take(self, task: Task) -> None:
        """A task is in it from now on."""
        self.inside.add(task)

    def give(self, task: Task) -> None:
        """A task is no longer in it."""
        self.inside.discard(task)

    def dissolve(self) -> None:
        """Of one made by :meth:`below`: its task is over."""
        if self.parent is not None:
            self.parent.inside.discard(self)

    def spread(self) -> None:
        """End the waits inside, where no shield keeps it off."""
        loop = loops.current()
        for member in tuple(self.inside):
            if not isinstance(member, CancelScope):
                loop.cancel(member)
            elif not member.shield and not member.cancel_called:
                member.spread()

    def _watch(self) -> None:
        if self._deadline == math.inf or self.cancel_called:
            return
        if self._deadline <= loops.now():
            self.cancel()
        else:
            self._timer = loops.current().at(self._deadline, self.cancel)

    def _unwatch(self) -> None:
        if self._timer is not None:
            loops.current().stop(self._timer)
            self._timer = None


class FailAfter:
    """A scope with a deadline that raises a TimeoutError if it was cancelled by that.

    Args:
        deadline: on the loop's clock.
    """

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
    ) -> bool:
        caught = self._scope.__exit__(kind, raised, traceback)
        if caught and self._scope.deadline <= loops.now():
            raise TimeoutError
        return caught


class _Beginning:
    """What :meth:`TaskGroup.start` waits for."""

    __slots__ = ("begun", "over", "raised", "value", "waiting")

    def __init__(self) -> None:
        self.begun = False
        self.over = False
        self.raised: BaseException | None = None
        self.value: Any = None
        self.waiting: Task | None = None

    def started(self, value: Any = None) -> None:
        """See :class:`TaskStatus`."""
        self.begun = True
        self.value = value
        self.tell()

    def tell(self) -> None:
        task, self.waiting = self.waiting, None
        if task is not None:
            loops.current().schedule(task)

    def forget(self) -> None:
        self.waiting = None


class TaskGroup:
    """Tasks that are over when the group is left.

    The first exception of one cancels the others; it is raised, in an exception group, when the
    group is left.

    Attributes:
        cancel_scope: everything in it, the task that has entered it included.
    """

    def __init__(self) -> None:
        self.cancel_scope = CancelScope()
        self._count = 0
        self._errors: list[BaseException] = []
        self._host: Task | None = None

    async def __aenter__(self) -> Self:
        self.cancel_scope.__enter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        raised: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        cancelled: BaseException | None = None
        if raised is not None:
            self.cancel_scope.cancel()
            if isinstance(raised, loops.Cancelled):
                cancelled = raised
            else:
                self._errors.append(raised)
        while self._count:
            self._host = loops.current_task()
            try:
                await loops.park(self._forget_host if cancelled is None else loops.unyielding)
            except loops.Cancelled as error:
                cancelled = error
                self.cancel_scope.cancel()
        if self._errors:
            errors, self._errors = self._errors, []
            group = BaseExceptionGroup("unhandled errors in a TaskGroup", errors)
            self.cancel_scope.__exit__(type(group), group, None)
            raise group
        caught = self.cancel_scope.__exit__(
            type(cancelled) if cancelled is not None else None, cancelled, traceback
        )
        if cancelled is not None and not caught and cancelled is not raised:
            raise cancelled
        return caught

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
            name: what it does.
        """
        coro = function(*arguments)
        self._count += 1
        loop = loops.current()
        scope = self.cancel_scope
        loop.start(loops.Task(coro, name or _name_of(function), scope, self._end))

    async def start(
        self,
        function: Callable[..., Coroutine[Any, Any, Any]],
        /,
        *arguments: Any,
        name: str | None = None,
    ) -> Any:
        """Start a task, and wait until it says that it has begun.

        Args:
            function: a coroutine function with a keyword argument ``task_status``.
            arguments: what else it is called with.
            name: what it does.

        Returns:
            What it has said.

        Raises:
            BaseException: what it has raised before it began.
            RuntimeError: it was over before.
        """
        beginning = _Beginning()
        scope = CancelScope.below(self.cancel_scope)

        def end(raised: BaseException | None) -> None:
            scope.dissolve()
            if beginning.begun:
                self._end(raised)
                return
            beginning.raised, beginning.over = raised, True
            beginning.tell()
            self._end(None)

        coro = function(*arguments, task_status=beginning)
        self._count += 1
        loops.current().start(loops.Task(coro, name or _name_of(function), scope, end))
        beginning.waiting = loops.current_task()
        try:
            await loops.park(beginning.forget)
        except loops.Cancelled:
            scope.cancel()
            if not beginning.begun and not beginning.over:
                beginning.waiting = loops.current_task()
                await loops.park(loops.unyielding)
            raise
        if beginning.begun:
            return beginning.value
        if beginning.raised is not None:
            raise beginning.raised
        message = "the task was over before it said that it had begun"
        raise RuntimeError(message)

    def _end(self, raised: BaseException | None) -> None:
        """One of the tasks is over."""
        self._count -= 1
        if raised is not None:
            if not isinstance(raised, loops.Cancelled):
                self._errors.append(raised)
            self.cancel_scope.cancel()
        if not self._count and self._host is not None:
            host, self._host = self._host, None
            loops.current().schedule(host)

    def _forget_host(self) -> None:
        self._host = None


def current_effective_deadline() -> float:
    """When the current task is cancelled; minus infinity if it is already."""
    return loops.current_task().scope.effective_deadline()


def _name_of(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__qualname__", function))


# Below, for the two modules need each other: a task is in a scope, and a scope waits for tasks.
from api.aio import loop as loops  # noqa: E402
