"""Structured concurrency, as much of it as ttrpc and the shim need, under anyio's names.

In a program that runs anyio all of it *is* anyio: :mod:`api.ttrpc` serves and calls in a program's
own loop. A shim runs once per pod, and starts for each: there :func:`run` runs the coroutines on a
loop of our own (:mod:`api.aio.loop`), and neither anyio nor asyncio is even imported. That is a
hundred modules, half of a cold start, and two megabytes in every shim that was forked warm.

What differs on our own loop from anyio on asyncio:

- What need not wait does not give up its turn: an event that is set, a lock that is free, a group
  without tasks. All but the last are points of cancellation all the same.
- A task cannot be cancelled but by a scope; there is one loop in a process, in its main thread.
- A task that is started in a group whose scope is cancelled, from behind a shield, is cancelled
  when it waits, as with trio. On asyncio it may be overlooked.
- A task that :meth:`TaskGroup.start` has started, and that is cancelled with its group before it
  has begun while the one who waits is not in that group, is a RuntimeError to them, as with trio.
- KeyboardInterrupt and SystemExit of a task are its group's, as any exception is. What a signal's
  handler raises while all wait cancels everything, and is raised by :func:`run`.
- A second wait for the same side of a descriptor is a RuntimeError; nobody is told of a
  descriptor's closing, so who closes one ends the waits for it before.
- A scope is entered once. It does not look for a cancellation inside an exception group: groups
  never put one there.
- :func:`call_in_loop` does not wait for the call. Its exception is raised where the thread is
  waited for, unless nobody does any more.
- There is one contextvars context, that of the thread, for all tasks.
- Nobody finishes an asynchronous generator that is left: it is closed at once, and must not wait
  then. ``contextlib.aclosing`` does it in time.
- :class:`EndOfStream` is our own class on either.

Source: anyio's documentation, "Cancellation and timeouts" and "Creating and managing tasks".
"""

from __future__ import annotations

import math

from api.aio import loop as _loop
from api.aio import scopes as _scopes
from api.aio import signals as _signals
from api.aio import sync as _sync
from api.aio import threads as _threads
from api.aio import timers as _timers
from api.aio.groups import TaskGroup
from api.aio.loop import run

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager
    from typing import Any, TypeVar

    from api.aio.loop import TaskInfo
    from api.aio.scopes import CancelScope
    from api.aio.signals import SignalReceiver
    from api.aio.sync import Event, Lock

    Result = TypeVar("Result")

__all__ = [
    "CancelScope",
    "EndOfStream",
    "Event",
    "Lock",
    "TaskGroup",
    "call_in_loop",
    "checkpoint",
    "create_task_group",
    "current_effective_deadline",
    "current_time",
    "fail_after",
    "get_cancelled_exc_class",
    "get_running_tasks",
    "move_on_after",
    "open_signal_receiver",
    "run",
    "run_in_thread",
    "sleep",
    "wait_readable",
    "wait_writable",
]


class EndOfStream(Exception):
    """There is nothing more to receive."""


if not TYPE_CHECKING:
    # Types to a reader and to mypy; callables that choose the loop when they are called.

    def Event() -> _sync.Event:  # noqa: N802 - see above
        """Something that happens once, and that any number of tasks can wait for."""
        return _sync.Event() if _loop.running() else _anyio().Event()

    def Lock() -> _sync.Lock:  # noqa: N802
        """What one task holds at a time; handed on in the order in which it was asked for."""
        return _sync.Lock() if _loop.running() else _anyio().Lock()

    def CancelScope(*, deadline: float = math.inf, shield: bool = False) -> _scopes.CancelScope:  # noqa: N802
        """A part of a task that can be cancelled by itself."""
        kind = _scopes.CancelScope if _loop.running() else _anyio().CancelScope
        return kind(deadline=deadline, shield=shield)


def create_task_group() -> TaskGroup:
    """A group of tasks, to be entered; leaving it waits for them."""
    if _loop.running():
        return TaskGroup()
    group: TaskGroup = _anyio().create_task_group()
    return group


def move_on_after(delay: float | None, *, shield: bool = False) -> CancelScope:
    """A scope that is cancelled after some time.

    Args:
        delay: in seconds; None for never.
        shield: whether what is cancelled outside goes on inside.
    """
    if not _loop.running():
        scope: CancelScope = _anyio().move_on_after(delay, shield=shield)
        return scope
    deadline = math.inf if delay is None else _timers.now() + delay
    return _scopes.CancelScope(deadline=deadline, shield=shield)


def fail_after(delay: float | None) -> AbstractContextManager[CancelScope]:
    """The same, raising a TimeoutError if that has happened.

    Args:
        delay: in seconds; None for never.
    """
    if not _loop.running():
        guard: AbstractContextManager[CancelScope] = _anyio().fail_after(delay)
        return guard
    return _scopes.FailAfter(math.inf if delay is None else _timers.now() + delay)


async def sleep(delay: float) -> None:
    """Wait for some seconds."""
    await (_loop.sleep(delay) if _loop.running() else _anyio().sleep(delay))


async def checkpoint() -> None:
    """Let the others have their turn; a point of cancellation."""
    if _loop.running():
        await _loop.checkpoint()
    else:
        import anyio.lowlevel  # noqa: PLC0415 - see _anyio

        await anyio.lowlevel.checkpoint()


async def wait_readable(what: socket.socket | int) -> None:
    """Wait until there is something to read, an end or an error."""
    await (_loop.wait_readable(what) if _loop.running() else _anyio().wait_readable(what))


async def wait_writable(what: socket.socket | int) -> None:
    """Wait until something can be written, or there is an error."""
    await (_loop.wait_writable(what) if _loop.running() else _anyio().wait_writable(what))


def current_time() -> float:
    """The loop's clock, in seconds."""
    now: float = _timers.now() if _loop.running() else _anyio().current_time()
    return now


def current_effective_deadline() -> float:
    """When the task is cancelled, on the loop's clock; minus infinity if it is already."""
    if _loop.running():
        return _scopes.current_effective_deadline()
    deadline: float = _anyio().current_effective_deadline()
    return deadline


def get_cancelled_exc_class() -> type[BaseException]:
    """The exception by which a task learns that it is cancelled. It has to be let through."""
    if _loop.running():
        return _loop.Cancelled
    kind: type[BaseException] = _anyio().get_cancelled_exc_class()
    return kind


def get_running_tasks() -> Sequence[TaskInfo]:
    """The tasks that there are: of each a ``name``, and where its ``coro`` stands."""
    tasks: Sequence[TaskInfo] = (
        _loop.running_tasks() if _loop.running() else _anyio().get_running_tasks()
    )
    return tasks


def open_signal_receiver(*numbers: int) -> AbstractContextManager[SignalReceiver]:
    """Receive signals, by iterating asynchronously, while the context lasts."""
    if _loop.running():
        return _signals.SignalReceiver(numbers)
    receiver: AbstractContextManager[SignalReceiver] = _anyio().open_signal_receiver(*numbers)
    return receiver


async def run_in_thread(function: Callable[[], Result]) -> Result:
    """Call a function in a thread of its own; if the task is cancelled, the thread goes on.

    Raises:
        RuntimeError: no thread is to be had.
    """
    if _loop.running():
        return await _threads.run_in_thread(function)
    import anyio.to_thread  # noqa: PLC0415 - see _anyio

    limiter = anyio.CapacityLimiter(1)  # not one shared with others, who may wait long
    return await anyio.to_thread.run_sync(function, limiter=limiter, abandon_on_cancel=True)


def call_in_loop(function: Callable[[], object]) -> None:
    """Have a function called in the loop, from a thread of :func:`run_in_thread`.

    Args:
        function: what it raises, :func:`run_in_thread` raises.

    Raises:
        RuntimeError: the loop is over.
    """
    work = _threads.work_of_thread()
    if work is not None:
        work.call_in_loop(function)
    else:
        import anyio.from_thread  # noqa: PLC0415 - see _anyio

        anyio.from_thread.run_sync(function)


def _anyio() -> Any:
    """Anyio, which only programs have that run it: the shim's starts are to stay short."""
    import anyio  # noqa: PLC0415

    return anyio
