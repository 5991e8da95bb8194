"""Small programs of scopes, groups, events, locks and delays, and their results.

The clock of a program stands still while any task can run, and jumps to the next deadline when
none can. Every delay has a different length, so that only things that one step does happen at the
same time. So the results do not depend on the order in which a loop runs tasks that are due at the
same time.
"""

from __future__ import annotations

import asyncio
import selectors
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

import anyio
import anyio.lowlevel
import pytest
from hypothesis import strategies as st

from shim import loop
from shim.loop import core
from shim.loop.core import Descriptors
from shim.loop.scopes import CancelScope
from tests.harness import loop_backend

EVENTS = 3
LOCKS = 2

Kind = Literal[
    "sleep", "checkpoint", "wait", "set", "lock", "scope", "move_on_after", "fail_after", "group",
    "spawn", "raise", "finally", "cancel", "set_then_cancel",
    "cancel_then_set", "let_go_then_cancel", "cancel_group", "deadline", "catch",
]  # fmt: skip


@dataclass
class Step:
    """One step of a program, perhaps with steps inside."""

    kind: Kind
    number: int = 0
    seconds: int = 1
    shield: bool = False
    body: list[Step] = field(default_factory=list)
    then: list[Step] = field(default_factory=list)


_SIMPLE: list[Kind] = [
    "sleep", "sleep", "sleep", "checkpoint", "wait", "wait", "set", "raise", "cancel",
    "cancel", "set_then_cancel", "cancel_then_set", "cancel_group", "deadline",
]  # fmt: skip
_AROUND: list[Kind] = [
    "lock", "scope", "scope", "move_on_after", "fail_after", "group", "group", "spawn", "spawn",
    "spawn", "finally", "let_go_then_cancel", "catch",
]  # fmt: skip

_numbers = st.integers(0, 5)
_seconds = st.integers(0, 4)


def programs() -> st.SearchStrategy[list[Step]]:
    """Generate nested lists of steps."""
    simple = st.builds(Step, st.sampled_from(_SIMPLE), _numbers, _seconds)
    return st.recursive(
        st.lists(simple, min_size=2, max_size=4),
        lambda bodies: st.lists(
            st.one_of(
                simple,
                st.builds(
                    Step, st.sampled_from(_AROUND), _numbers, _seconds, st.booleans(), bodies,
                    bodies,
                ),
            ),
            min_size=2,
            max_size=5,
        ),
        max_leaves=20,
    )  # fmt: skip


class Error(Exception):
    """The error that programs raise."""


@dataclass
class _Around:
    """The context of a task: its name, the innermost group, how many tasks it has started."""

    name: str
    group: Any
    children: int = 0


class Machine:
    """Runs a program, and records its trace by task."""

    def __init__(self, program: list[Step]) -> None:
        self._program = program
        self.trace: dict[str, list[Any]] = {}
        self._waits = 0

    async def run(self) -> None:
        self._events = [anyio.Event() for _ in range(EVENTS)]
        self._locks = [anyio.Lock() for _ in range(LOCKS)]
        self._scopes: list[Any] = []
        self._cancelled = anyio.get_cancelled_exc_class()
        self._start = anyio.current_time()
        try:
            with anyio.move_on_after(60) as scope:
                async with anyio.create_task_group() as group:
                    await self._steps(self._program, _Around("main", group))
        except BaseException as error:  # noqa: BLE001 - is what comes of it
            self._note("main", "ends with", _shape(error, self._cancelled))
        self._note("main", "over", scope.cancelled_caught)

    def _note(self, task: str, *what: Any) -> None:
        at = round(anyio.current_time() - self._start, 7)
        self.trace.setdefault(task, []).append((at, *what))

    def _length(self, seconds: int) -> float:
        """Return a delay that differs from every sum of others."""
        self._waits += 1
        return seconds + 2.0 ** -(self._waits % 20 + 2)

    def _scope(self, number: int) -> Any:
        return self._scopes[number % len(self._scopes)] if self._scopes else None

    async def _steps(self, steps: list[Step], around: _Around) -> None:
        for step in steps:
            try:
                await self._step(step, around)
            except BaseException as error:
                self._note(around.name, step.kind, _shape(error, self._cancelled))
                raise
            self._note(around.name, step.kind)

    async def _step(self, step: Step, around: _Around) -> None:
        if step.kind not in {"finally", "cancel", "set", "raise"}:
            await anyio.sleep(self._length(0))
        await getattr(self, f"_do_{step.kind}")(step, around)

    # -- steps that do not wait --------------------------------------------------------------

    async def _do_set(self, step: Step, around: _Around) -> None:
        self._events[step.number % EVENTS].set()

    async def _do_raise(self, step: Step, around: _Around) -> None:
        raise Error(step.number)

    async def _do_cancel(self, step: Step, around: _Around) -> None:
        if scope := self._scope(step.number):
            scope.cancel()

    async def _do_set_then_cancel(self, step: Step, around: _Around) -> None:
        self._events[step.seconds % EVENTS].set()
        await self._do_cancel(step, around)

    async def _do_cancel_then_set(self, step: Step, around: _Around) -> None:
        await self._do_cancel(step, around)
        self._events[step.seconds % EVENTS].set()

    async def _do_cancel_group(self, step: Step, around: _Around) -> None:
        around.group.cancel_scope.cancel()

    async def _do_deadline(self, step: Step, around: _Around) -> None:
        if scope := self._scope(step.number):
            scope.deadline = anyio.current_time() + self._length(step.seconds - 1)

    # -- steps that wait -----------------------------------------------------------------------

    async def _do_sleep(self, step: Step, around: _Around) -> None:
        await anyio.sleep(self._length(step.seconds))

    async def _do_checkpoint(self, step: Step, around: _Around) -> None:
        await anyio.lowlevel.checkpoint()

    async def _do_wait(self, step: Step, around: _Around) -> None:
        with anyio.move_on_after(self._length(5)):  # every wait has a timeout, shielded or not
            await self._events[step.number % EVENTS].wait()

    # -- steps with steps inside ----------------------------------------------------------------

    async def _do_lock(self, step: Step, around: _Around) -> None:
        lock = self._locks[step.number % LOCKS]
        with anyio.move_on_after(self._length(5)) as scope:
            await lock.acquire()
        if scope.cancelled_caught:
            return
        self._note(around.name, "holds")
        try:
            await self._steps(step.body, around)
        finally:
            lock.release()

    async def _do_let_go_then_cancel(self, step: Step, around: _Around) -> None:
        await self._do_lock(step, around)
        await self._do_cancel(step, around)

    async def _within(
        self, guard: AbstractContextManager[Any], step: Step, around: _Around
    ) -> None:
        with guard as scope:
            self._scopes.append(scope)
            await self._steps(step.body, around)
        self._note(around.name, "left", scope.cancel_called, scope.cancelled_caught)

    async def _do_scope(self, step: Step, around: _Around) -> None:
        scope = anyio.CancelScope(shield=step.shield)
        if not step.seconds:
            scope.cancel()
        await self._within(scope, step, around)

    async def _do_move_on_after(self, step: Step, around: _Around) -> None:
        delay = self._length(step.seconds - 1)
        await self._within(anyio.move_on_after(delay, shield=step.shield), step, around)

    async def _do_fail_after(self, step: Step, around: _Around) -> None:
        await self._within(anyio.fail_after(self._length(step.seconds - 1)), step, around)

    async def _do_group(self, step: Step, around: _Around) -> None:
        before = around.group
        try:
            async with anyio.create_task_group() as around.group:
                self._scopes.append(around.group.cancel_scope)
                await self._steps(step.body, around)
        finally:
            around.group = before

    def _child(self, around: _Around) -> _Around:
        around.children += 1
        return _Around(f"{around.name}.{around.children}", around.group)

    async def _do_spawn(self, step: Step, around: _Around) -> None:
        if not _is_cancelled(around.group):
            around.group.start_soon(self._task, step.body, self._child(around))
        await self._steps(step.then, around)

    async def _task(self, steps: list[Step], around: _Around) -> None:
        try:
            await self._steps(steps, around)
        finally:
            self._note(around.name, "over")

    async def _do_finally(self, step: Step, around: _Around) -> None:
        try:
            await self._steps(step.body, around)
        finally:
            with anyio.CancelScope(shield=step.shield):
                await self._steps(step.then, around)

    async def _do_catch(self, step: Step, around: _Around) -> None:
        try:
            await self._steps(step.body, around)
        except* (Error, TimeoutError, RuntimeError):
            self._note(around.name, "caught")


def _shape(error: BaseException, cancelled: type[BaseException]) -> Any:
    """Return the parts of an exception that have to match."""
    if isinstance(error, BaseExceptionGroup):
        return sorted(str(_shape(inner, cancelled)) for inner in error.exceptions)
    if isinstance(error, cancelled):
        return "cancelled"
    return f"{type(error).__name__} {error if isinstance(error, Error) else ''}"


def _is_cancelled(group: Any) -> bool:
    """Return whether tasks of a group are cancelled from the start.

    Only a shielded task can still start some. On asyncio it is chance whether anyio cancels them
    then; on our loop they are cancelled, as with trio.
    """
    scope = group.cancel_scope
    ours = isinstance(scope, CancelScope)
    return bool(scope.effectively_cancelled if ours else scope._effectively_cancelled)


class _Clock:
    """A clock that moves only when the loop waits."""

    def __init__(self) -> None:
        self.now = 1000.0

    def wait(self, seconds: float | None) -> None:
        assert seconds is not None, "deadlock: no task can run"
        self.now += max(seconds, 0)


class _Selector(selectors.DefaultSelector):
    def __init__(self, clock: _Clock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> Any:
        self._clock.wait(timeout)
        return super().select(0)


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _Clock()
        super().__init__(_Selector(self._clock))

    def time(self) -> float:
        return self._clock.now


def on_asyncio(program: list[Step]) -> dict[str, list[Any]]:
    """Return the trace on asyncio, with anyio."""
    machine = Machine(program)
    anyio.run(machine.run, backend_options={"loop_factory": _VirtualLoop})
    return machine.trace


def on_ours(program: list[Step], patch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """Return the trace on our own loop."""
    machine = Machine(program)
    clock = _Clock()
    poll = Descriptors.poll

    def turn(descriptors: Descriptors, patience: float | None) -> Any:
        clock.wait(patience)
        return poll(descriptors, 0)

    loop_backend.register()
    with patch.context() as within:
        within.setattr(core, "now", lambda: clock.now)
        within.setattr(Descriptors, "poll", turn)
        loop.run(machine.run)
    return machine.trace
