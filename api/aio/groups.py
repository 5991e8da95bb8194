"""Groups of tasks.

Nothing goes on behind the back of who has left its group, and nothing of what a task raises is
lost, but for one that is started by who is cancelled before it has begun.

Source: trio's documentation, "Nurseries and spawning"; anyio's, "Creating and managing tasks".
"""

from __future__ import annotations

from api.aio import loop as loops
from api.aio.scopes import CancelScope

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from types import TracebackType
    from typing import Any, Protocol, Self, TypeVar, overload

    from api.aio.loop import Task

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


class _Beginning:
    """A task that has not begun yet, and who waits for it to.

    Attributes:
        begun: whether it has said so.
        over: whether it has ended.
        heard: whether who waits learns of it; otherwise they were cancelled before.
        raised: what it has raised before it has begun.
        value: what it has said.
    """

    __slots__ = ("_waiting", "begun", "heard", "over", "raised", "value")

    def __init__(self) -> None:
        self.begun = False
        self.over = False
        self.heard = True
        self.raised: BaseException | None = None
        self.value: Any = None
        self._waiting: Task | None = None

    def started(self, value: Any = None) -> None:
        """See :class:`TaskStatus`.

        Raises:
            RuntimeError: it has said so before.
        """
        if self.begun:
            message = "a task begins once"
            raise RuntimeError(message)
        self.begun = True
        if self.heard:
            self.value = value
            self._tell()

    def end(self, raised: BaseException | None) -> BaseException | None:
        """The task is over.

        Returns:
            What its group hears of it.
        """
        self.over = True
        if self.begun and self.heard:
            return raised
        self.raised = raised
        self._tell()
        return None

    def _tell(self) -> None:
        task, self._waiting = self._waiting, None
        if task is not None:
            loops.current().schedule(task)

    async def wait(self) -> None:
        """Wait until one or the other is true."""
        self._waiting = loops.current_task()
        await loops.park(self._forget)

    async def wait_for_end(self) -> None:
        """Wait until it is over, however the waiting task is cancelled."""
        if not self.over:
            self._waiting = loops.current_task()
            await loops.park(loops.unyielding)
        self.raised = None  # its traceback has this object

    def _forget(self) -> None:
        self._waiting = None
        self.heard = False


class TaskGroup:
    """Tasks that are over when the group is left.

    The first exception of one cancels the others; it is raised, in an exception group, when the
    group is left.

    Attributes:
        cancel_scope: everything in it, the task that has entered it included.
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
            if not isinstance(raised, loops.Cancelled):
                self._errors.append(raised)
        while self._count:
            self._host = loops.current_task()
            try:
                await loops.park(self._forget_host if ends_by is None else loops.unyielding)
            except loops.Cancelled as error:
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
                raise ends_by from None  # those within say all that there is to say
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
            name: what it does.

        Raises:
            RuntimeError: the group has been left, or not been entered.
        """
        self._expect_active()
        coro = function(*arguments)
        self._start(loops.Task(coro, name or _name_of(function), self.cancel_scope, self._end))

    async def start(
        self,
        function: Callable[..., Coroutine[Any, Any, Any]],
        /,
        *arguments: Any,
        name: str | None = None,
    ) -> Any:
        """Start a task, and wait until it says that it has begun.

        If the wait is cancelled, so is the task; the wait is over when the task is, and what it
        raises then is not heard of.

        Args:
            function: a coroutine function with a keyword argument ``task_status``.
            arguments: what else it is called with.
            name: what it does.

        Returns:
            What it has said.

        Raises:
            BaseException: what it has raised before it began.
            RuntimeError: it was over before, or cancelled; or as for :meth:`start_soon`.
        """
        self._expect_active()
        beginning = _Beginning()
        coro = function(*arguments, task_status=beginning)
        scope = CancelScope.below(self.cancel_scope)

        def end(raised: BaseException | None) -> None:
            scope.dissolve()
            self._end(beginning.end(raised))

        self._start(loops.Task(coro, name or _name_of(function), scope, end))
        try:
            await beginning.wait()
        except loops.Cancelled:
            scope.cancel()
            await beginning.wait_for_end()
            raise
        if beginning.begun:
            return beginning.value
        error, beginning.raised = beginning.raised, None
        try:
            if error is None or isinstance(error, loops.Cancelled):
                message = "the task was over before it said that it had begun"
                raise RuntimeError(message)
            raise error
        finally:
            del error  # its traceback has this frame

    def _expect_active(self) -> None:
        if not self._active:
            message = "tasks are started in a group while it is entered"
            raise RuntimeError(message)

    def _start(self, task: Task) -> None:
        self._count += 1
        loops.current().start(task)

    def _end(self, raised: BaseException | None) -> None:
        """One of the tasks is over."""
        self._count -= 1
        if raised is not None:
            if not isinstance(raised, loops.Cancelled):
                self._errors.append(raised)
            if not self.cancel_scope.effectively_cancelled:
                self.cancel_scope.cancel()
        if not self._count and self._host is not None:
            host, self._host = self._host, None
            loops.current().schedule(host)

    def _forget_host(self) -> None:
        self._host = None


def _name_of(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__qualname__", function))
