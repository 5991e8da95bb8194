"""Asking NVML what the GPUs are like, for all who want to know.

Rules
- The child begins with the first question and is ended when nobody has asked for a good minute:
  between scrapes of a minute or less it stays, and on a node that nobody looks at there is none.
- One question at a time. Who asks meanwhile gets the same answer.
- Each of the many questions to NVML has to be answered in time, of however many GPUs, or it is a
  failure, and the child is ended. After a failure NVML is left alone for a while, twice as long
  each time, and the failure stands for an answer.
- When the driver or the GPUs change, the child is ended at once, in the middle of an answer if it
  must be, and the next question goes to a new one.
"""

from __future__ import annotations

import math
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import anyio

from integration.node.errors import ChildFailed
from integration.node.monitor import words
from integration.node.monitor.child import SAMPLES
from integration.node.monitor.children import Children, identity_of, library_of
from integration.node.monitor.samples import sample_of
from integration.node.monitor.values import Sample

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from integration.node.monitor.children import Child
    from integration.node.refresh import Seen

__all__ = ["NvmlSampler", "sampling"]

_IDLE: Final = 75.0
_FIRST_PAUSE: Final = 1.0
_LONGEST_PAUSE: Final = 60.0
_TO_BEGIN: Final = 5.0
_BEAT: Final = b'{"beat": 1}'
# So many times of what one question may take, all of them may take.
_ALL: Final = 12


class NvmlSampler:
    """Who asks. See :class:`~integration.node.monitor.values.Sampler`.

    Args:
        to_answer: seconds that NVML may take to begin, and then for each of its answers.
        idle: seconds without a question after which the child is ended.
    """

    def __init__(
        self,
        look: Callable[[], Seen],
        children: Children,
        *,
        to_answer: float,
        post: Callable[[Sample], None] = lambda _: None,
        idle: float = _IDLE,
    ) -> None:
        self._look, self._children, self._post = look, children, post
        self._to_answer, self._idle = to_answer, idle
        self._last: Sample | None = None
        self._pause, self._retry = 0.0, -math.inf
        self._wake, self._answered = anyio.Event(), anyio.Event()
        self._is_asked = False
        self._asking = anyio.CancelScope()
        self._child: Child | None = None
        self._asked_of: tuple[object, ...] = ()
        self._over = False

    async def sample(self, *, max_age: float) -> Sample:
        """What the GPUs are like now, or were ``max_age`` seconds ago at most."""
        last, now = self._last, _now()
        if self._over:
            return _failed("nobody asks NVML")
        if last is not None and identity_of(self._look()) == self._asked_of:
            stands = now < self._retry if last.failure else now - last.when <= max_age
            if stands:
                return last
        self._is_asked = True
        self._wake.set()
        await self._answered.wait()
        return self._last or _failed("nobody asks NVML")

    def look_again(self) -> None:
        """The node may have changed: if so, nobody keeps what it had."""
        if self._child is not None and identity_of(self._look()) != self._asked_of:
            self._asking.cancel()
            self._wake.set()

    async def serve(self) -> None:
        """Ask as long as somebody wants to know, until cancelled."""
        try:
            while True:
                with anyio.move_on_after(self._idle if self._child else math.inf):
                    await self._wake.wait()
                self._wake = anyio.Event()
                if not self._is_asked:  # nobody has, for long enough; or the node has changed
                    await self._end()
                    continue
                sample = _failed("the driver or the GPUs have changed")
                with anyio.CancelScope() as self._asking:
                    sample = await self._ask()
                if self._asking.cancelled_caught:
                    await self._end()
                self._answer(sample)
                self._post(sample)
        finally:
            self._over = True
            self._answer(_failed("the agent has stopped to ask NVML"))
            await self._end()

    def _answer(self, sample: Sample) -> None:
        """Give all who wait the same answer."""
        self._pause = min(2 * self._pause or _FIRST_PAUSE, _LONGEST_PAUSE) if sample.failure else 0
        self._retry = _now() + self._pause
        self._last, self._is_asked = sample, False
        answered, self._answered = self._answered, anyio.Event()
        answered.set()

    async def _ask(self) -> Sample:
        seen = self._look()
        library, of = library_of(seen), identity_of(seen)
        gpus = seen.inventory.gpus if seen.inventory is not None else ()
        if self._asked_of != of:
            await self._end()
        self._asked_of = of
        if not library:
            return _failed("; ".join(seen.faults) or "no driver with NVML, or no GPU")
        try:
            if self._child is None:
                self._child = self._children.start(SAMPLES, library)
                line = await self._child.line(self._to_answer + _TO_BEGIN)
                if "ready" not in words.parse(line):
                    await self._end()
                    return sample_of(line, _now(), {})
            self._child.ask()
            line = await self._answer_of(self._child)
        except ChildFailed as error:
            await self._end()
            return _failed(error.found or "NVML failed")
        sample = sample_of(line, _now(), {gpu.uuid: gpu.index for gpu in gpus if gpu.uuid})
        if sample.failure:
            await self._end()
        return sample

    async def _answer_of(self, child: Child) -> bytes:
        """What a child says once it has asked NVML everything.

        Raises:
            ChildFailed: NVML hangs.
        """
        latest = _now() + _ALL * self._to_answer
        while (line := await child.line(self._to_answer)) == _BEAT:
            if _now() > latest:
                found = f"no whole answer within {_ALL * self._to_answer:g} s"
                raise ChildFailed("samples of NVML", found=found)
        return line

    async def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            await self._children.end(child)


@asynccontextmanager
async def sampling(
    look: Callable[[], Seen], say: Callable[..., None], *, to_answer: float
) -> AsyncIterator[NvmlSampler]:
    """Sample in a program that is not the agent.

    Args:
        to_answer: seconds that NVML may take.
    """
    sampler = NvmlSampler(look, Children(say), to_answer=to_answer)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sampler.serve)
        yield sampler
        tasks.cancel_scope.cancel()


def _failed(why: str) -> Sample:
    return Sample(_now(), failure=why)


def _now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)
