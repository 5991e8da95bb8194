"""Asking NVML what the GPUs are like, for all who want to know.

Rules
- The child begins with the first question and is ended when nobody has asked for a good minute:
  between scrapes of a minute or less it stays, and on a node that nobody looks at there is none.
- One question at a time. Who asks meanwhile gets the same answer.
- Each of the many questions to NVML has to be answered in time, of however many GPUs, or it is a
  failure, and the child is ended. After a failure NVML is left alone for a while, twice as long
  each time, and the failure stands for an answer.
- No GPU takes the others with it. One that does not answer while others do, and one on which NVML
  crashes, which is found by asking one after the other, is told as lost, and left alone for a
  minute, or for as long as the driver holds a child that asked it. What crashes or hangs on all of
  them is NVML.
- When the driver or the GPUs change, the child is ended at once, in the middle of an answer if it
  must be, and the next question goes to a new one.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

import anyio

from hooks.config import Config
from integration.agent_errors import ChildFailed
from integration.backoff import Backoff
from integration.nvml.monitor_child import SAMPLES
from integration.nvml.monitor_children import (
    CRASHED,
    Child,
    Children,
    identity_of,
    library_of,
    uuids_of,
)
from integration.nvml.values import DeviceSample, GpuSample, ProcessUse, Sample, now

if TYPE_CHECKING:
    from integration.nvml.snapshot import NodeSnapshot


_IDLE: Final = 75.0
_LONGEST_PAUSE: Final = 60.0
_TO_BEGIN: Final = 5.0
# Of the time that an answer may take, how much one GPU may.
_OF_ONE: Final = 0.6
# Seconds until a GPU that was given up is asked again.
_GIVEN_UP: Final = 60.0
# So many times of what one question may take, all of them may take.
_ALL: Final = 12


class NvmlSampler:
    """Who asks. See :class:`~integration.nvml.values.Sampler`.

    Args:
        to_answer: seconds that NVML may take to begin, and then for each of its answers.
        idle: seconds without a question after which the child is ended.
    """

    def __init__(
        self,
        look: Callable[[], NodeSnapshot],
        children: Children,
        *,
        to_answer: float,
        post: Callable[[Sample], None] = lambda _: None,
        idle: float = _IDLE,
    ) -> None:
        self._look, self._children, self._post = look, children, post
        self._to_answer, self._idle = to_answer, idle
        self._last: Sample | None = None
        self._backoff, self._retry = Backoff(longest=_LONGEST_PAUSE), -math.inf
        self._wake, self._answered = anyio.Event(), anyio.Event()
        self._is_asked = False
        self._asking = anyio.CancelScope()
        self._child: Child | None = None
        self._asked_of: tuple[object, ...] = ()
        self._given_up: dict[int, str] = {}
        self._leave_until = -math.inf
        self._asks: int | None = None
        self._over = False

    async def sample(self, *, max_age: float) -> Sample:
        """What the GPUs are like now, or were ``max_age`` seconds ago at most."""
        last, at = self._last, now()
        if self._over:
            return _failed("nobody asks NVML")
        if last is not None and identity_of(self._look()) == self._asked_of:
            stands = at < self._retry if last.failure else at - last.when <= max_age
            if stands:
                return last
        self._is_asked = True
        self._wake.set()
        await self._answered.wait()
        return self._last or _failed("nobody asks NVML")

    def look_again(self) -> None:
        """The node may have changed: if so, nobody keeps what it had."""
        if identity_of(self._look()) != self._asked_of:  # a child may be about to be ready
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
                self._tell(sample)
                self._post(sample)
        finally:
            self._over = True
            self._tell(_failed("the agent has stopped to ask NVML"))
            await self._end()

    def _tell(self, sample: Sample) -> None:
        """Give all who wait the same answer."""
        if sample.failure:
            self._retry = now() + self._backoff.pause()
        else:
            self._backoff = Backoff(longest=_LONGEST_PAUSE)
        self._last, self._is_asked = sample, False
        answered, self._answered = self._answered, anyio.Event()
        answered.set()

    async def _ask(self) -> Sample:
        seen = self._look()
        library, of = library_of(seen), identity_of(seen)
        if self._asked_of != of:
            await self._end()
            self._given_up = {}
        self._asked_of = of
        if not library:
            return _failed("; ".join(seen.faults) or "no driver with NVML, or no GPU")
        if now() > self._leave_until and not self._children.abandoned:
            self._given_up = {}
        try:
            said = await self._said(library, seen)
        except ChildFailed as error:
            await self._end()
            return _failed(error.found or "NVML failed")
        if said["hanging"]:
            self._give_up({int(index): why for index, why in said["hanging"].items()})
            await self._end()  # it still waits for them
        return _sample_of(said)

    async def _said(self, library: str, seen: NodeSnapshot) -> dict[str, Any]:
        """What is said of all GPUs; of those that were given up, why.

        Raises:
            ChildFailed: NVML hangs or crashes, and that is not one GPU's doing.
        """
        try:
            return await self._answer(library, seen, alone=False)
        except ChildFailed as error:
            if self._child is None or not error.found.startswith(CRASHED):
                raise
            whole = error
        while len(self._given_up) + 1 < len(seen.gpus):
            await self._end()
            self._asks = None
            try:
                return await self._answer(library, seen, alone=True)
            except ChildFailed as error:
                if not self._blame(f"{error.found}, whenever it is asked"):
                    raise
        self._given_up = {}
        raise whole

    def _blame(self, why: str) -> bool:
        """Give up the GPU that was asked last; whether there is one that was not yet."""
        if self._asks is None or self._asks in self._given_up:
            return False
        self._give_up({self._asks: why})
        return True

    def _give_up(self, gpus: Mapping[int, str]) -> None:
        self._given_up = {**self._given_up, **gpus}
        self._leave_until = now() + _GIVEN_UP

    async def _answer(self, library: str, seen: NodeSnapshot, *, alone: bool) -> dict[str, Any]:
        """What a child says once it has asked NVML everything.

        Args:
            alone: whether GPUs are asked one after the other.

        Raises:
            ChildFailed: NVML hangs or crashes. There is no child if it did so at its begin.
        """
        if self._child is None:
            child = self._children.start(SAMPLES, library)
            try:
                await child.word(self._to_answer + _TO_BEGIN)  # that it is ready
            except BaseException:
                await self._children.end(child)
                raise
            self._child = child
        patience = self._to_answer * _OF_ONE
        self._child.ask(
            {
                "gpus": uuids_of(seen), "given_up": self._given_up,
                "alone": alone, "patience": patience,
            }
        )  # fmt: skip
        latest = now() + _ALL * self._to_answer
        while True:
            word = await self._child.word(self._to_answer)
            if "asks" in word:
                self._asks = word["asks"]
            elif "beat" not in word:
                return word
            if now() > latest:
                found = f"no whole answer within {_ALL * self._to_answer:g} s"
                raise ChildFailed("samples of NVML", found=found)

    async def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            await self._children.end(child)


@asynccontextmanager
async def sampling(
    look: Callable[[], NodeSnapshot], say: Callable[..., None], config: Config
) -> AsyncIterator[NvmlSampler]:
    """Sample in a program that is not the agent.

    Args:
        config: where the lock of NVML is, and how long that may take to answer.
    """
    sampler = NvmlSampler(look, Children(say, config.state), to_answer=config.nvml_timeout)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sampler.serve)
        yield sampler
        tasks.cancel_scope.cancel()


def _sample_of(said: dict[str, Any]) -> Sample:
    """The sample that a child's answer is."""
    return Sample(
        now(),
        driver=said["driver"],
        gpus=tuple(
            GpuSample(**gpu | {"mig": tuple(DeviceSample(**part) for part in gpu.get("mig", ()))})
            for gpu in said["gpus"]
        ),
        processes=tuple(ProcessUse(*each) for each in said["processes"]),
        notes=tuple(said["notes"]),
        uncounted=tuple(said["uncounted"]),
    )


def _failed(why: str) -> Sample:
    return Sample(now(), failure=why)
