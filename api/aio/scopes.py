"""Scopes, by which tasks are cancelled.

Scopes are a tree: in each are tasks and further scopes. Cancelling one cancels all waits below
it, but for those below a shield, until it is left. It is the outermost cancelled scope that a
:class:`Cancelled` may reach which catches it; a shield is as far as one from outside reaches.
"""

from __future__ import annotations

import math

from api.aio import timers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from api.aio.loop import Task
    from api.aio.timers import Timer


class CancelScope:
    """A part of a task, and of the tasks in its groups, that can be cancelled by itself.

    Args:
        deadline: when it is cancelled, on the loop's clock.
        shield: whether what is cancelled outside goes on inside.

    Attributes:
        cancel_called: whether it is cancelled.
        cancelled_caught: whether something inside was cancelled by it.
        parent: the scope that it is in; None before it is entered.
        inside: the tasks of which it is the innermost scope, and the scopes in it.
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
        # Ordered, so that what is cancelled together ends in the same order each time.
        self.inside: dict[Task | CancelScope, None] = {}
        self._entered = False

    @classmethod
    def below(cls, parent: CancelScope) -> CancelScope:
        """A scope in another, that no task enters: one is born in it."""
        scope = cls()
        scope.parent = parent
        parent.inside[scope] = None
        return scope

    def __enter__(self) -> Self:
        if self._entered:
            message = "a scope is entered once"
            raise RuntimeError(message)
        self._entered = True
        task = loops.current_task()
        self._task, self.parent = task, task.scope
        task.scope.give(task)
        task.scope.inside[self] = None
        task.scope = self
        self.take(task)
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
        self.give(task)
        del parent.inside[self]
        parent.take(task)
        task.scope = parent
        self.cancelled_caught = (
            self.cancel_called
            and isinstance(raised, loops.Cancelled)
            and (self._shield or not parent.effectively_cancelled)
        )
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
    def shield(self) -> bool:
        """Whether what is cancelled outside goes on inside; may be changed."""
        return self._shield

    @shield.setter
    def shield(self, value: bool) -> None:
        self._shield = value
        if not value and self.effectively_cancelled:
            self.spread()

    @property
    def effectively_cancelled(self) -> bool:
        """Whether it is cancelled, or one around it that no shield keeps off."""
        scope: CancelScope | None = self
        while scope is not None:
            if scope.cancel_called:
                return True
            if scope._shield:  # noqa: SLF001 - each wait asks this
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
            if scope._shield:  # noqa: SLF001
                break
            scope = scope.parent
        return deadline

    def cancel(self) -> None:
        """Cancel what is inside, now and whatever it waits for later."""
        if self.cancel_called:
            return
        self.cancel_called = True
        self._unwatch()
        if self.inside:
            self.spread()

    def take(self, task: Task) -> None:
        """A task is in it from now on."""
        self.inside[task] = None

    def give(self, task: Task) -> None:
        """A task is no longer in it."""
        del self.inside[task]

    def dissolve(self) -> None:
        """Of one made by :meth:`below`: its task is over."""
        if self.parent is not None:
            del self.parent.inside[self]

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
        if self._deadline <= timers.now():
            self.cancel()
        else:
            self._timer = loops.current().timers.at(self._deadline, self.cancel)

    def _unwatch(self) -> None:
        if self._timer is not None:
            loops.current().timers.stop(self._timer)
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
        if caught and self._scope.deadline <= timers.now():
            raise TimeoutError
        return caught


def current_effective_deadline() -> float:
    """When the current task is cancelled; minus infinity if it is already."""
    return loops.current_task().scope.effective_deadline()


# Below, for the two modules need each other: a task is in a scope, and a scope ends its waits.
from api.aio import loop as loops  # noqa: E402
