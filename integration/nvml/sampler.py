"""Samples of the GPUs for all callers.

Rules
- The child starts with the first question and is ended after :data:`_IDLE` seconds without one:
  with a scrape every minute it stays, and a node without scrapes has none.
- One question at a time. Callers that ask meanwhile share its answer.
- NVML has to answer each of its many calls in time, however many GPUs there are; otherwise the
  sample is a failure, and the child is ended. After a failure NVML is not asked for a while, twice
  as long each time, and the failure is the answer.
- No GPU takes the others with it. A GPU that does not answer while others do, or on which NVML
  crashes (found by asking one GPU after the other), is reported as lost. It is not asked for a
  minute, or for as long as the driver holds a child that asked it. If NVML crashes or hangs on all
  of them, the sample is a failure.
- When the driver or the GPUs change, the child is ended at once, even in the middle of an answer,
  and the next question goes to a new child.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

import anyio

from hooks.config import Config
from integration.backoff import Backoff
from integration.nvml.child import SAMPLES
from integration.nvml.errors import ChildFailed
from integration.nvml.session import (
    CRASHED,
    Child,
    Children,
    identity_of,
    library_of,
    uuids_of,
)
from integration.nvml.snapshot import NodeSnapshot
from integration.nvml.values import DeviceSample, GpuSample, ProcessUse, Sample, now

_IDLE: Final = 75.0
_LONGEST_PAUSE: Final = 60.0
_TO_START: Final = 5.0
# One GPU may take this part of the time for an answer.
_OF_ONE: Final = 0.6
# Seconds until a GPU that was given up is asked again.
_GIVEN_UP: Final = 60.0
# All calls together may take so many times the time of one.
_ALL: Final = 12


class NvmlSampler:
    """Keeps the child, and asks it. See :class:`~integration.nvml.values.Sampler`.

    Args:
        look: returns what the agent knows of the node.
        children: starts and ends the child.
        to_answer: seconds that NVML may take to start, and then for each of its answers.
        post: is called with each sample.
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
        self._has_stopped = False

    async def sample(self, *, max_age: float) -> Sample:
        """Return a sample that is at most ``max_age`` seconds old."""
        last, at = self._last, now()
        if self._has_stopped:
            return _failed("the sampler does not run")
        if last is not None and identity_of(self._look()) == self._asked_of:
            stands = at < self._retry if last.failure else at - last.when <= max_age
            if stands:
                return last
        self._is_asked = True
        self._wake.set()
        await self._answered.wait()
        return self._last or _failed("the sampler does not run")

    def look_again(self) -> None:
        """End the child if the driver or the GPUs have changed."""
        if identity_of(self._look()) != self._asked_of:  # a child may be starting
            self._asking.cancel()
            self._wake.set()

    async def serve(self) -> None:
        """Answer questions until cancelled."""
        try:
            while True:
                with anyio.move_on_after(self._idle if self._child else math.inf):
                    await self._wake.wait()
                self._wake = anyio.Event()
                if not self._is_asked:  # it was idle, or the node has changed
                    await self._end()
                    continue
                sample = _failed("the driver or the GPUs have changed")
                with anyio.CancelScope() as self._asking:
                    sample = await self._ask()
                if self._asking.cancelled_caught:
                    await self._end()
                self._answer_all(sample)
                self._post(sample)
        finally:
            self._has_stopped = True
            self._answer_all(_failed("the sampler has stopped"))
            await self._end()

    def _answer_all(self, sample: Sample) -> None:
        """Give all callers that wait the same answer."""
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
            answer = await self._ask_child(library, seen)
        except ChildFailed as error:
            await self._end()
            return _failed(error.found or "NVML failed")
        if answer["hanging"]:
            self._give_up({int(index): why for index, why in answer["hanging"].items()})
            await self._end()  # it still waits for them
        return _sample_of(answer)

    async def _ask_child(self, library: str, seen: NodeSnapshot) -> dict[str, Any]:
        """Return the child's answer, with the reason for each GPU that was given up.

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
        """Give up the GPU that was asked last; return False if it was given up before."""
        if self._asks is None or self._asks in self._given_up:
            return False
        self._give_up({self._asks: why})
        return True

    def _give_up(self, gpus: Mapping[int, str]) -> None:
        self._given_up = {**self._given_up, **gpus}
        self._leave_until = now() + _GIVEN_UP

    async def _answer(self, library: str, seen: NodeSnapshot, *, alone: bool) -> dict[str, Any]:
        """Return a child's answer to one question.

        Args:
            alone: whether GPUs are asked one after the other.

        Raises:
            ChildFailed: NVML hangs or crashes. There is no child if that happened as it started.
        """
        if self._child is None:
            child = self._children.start(SAMPLES, library)
            try:
                await child.answer(self._to_answer + _TO_START)  # that it is ready
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
            line = await self._child.answer(self._to_answer)
            if "asks" in line:
                self._asks = line["asks"]
            elif "beat" not in line:
                return line
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
    """Sample in a program other than the agent.

    Args:
        look: returns the node.
        say: logs a line.
        config: where the lock of NVML is, and how long NVML may take.
    """
    sampler = NvmlSampler(look, Children(say, config.state), to_answer=config.nvml_timeout)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sampler.serve)
        yield sampler
        tasks.cancel_scope.cancel()


def _sample_of(answer: dict[str, Any]) -> Sample:
    """Make a sample of a child's answer."""
    return Sample(
        now(),
        driver=answer["driver"],
        gpus=tuple(
            GpuSample(**gpu | {"mig": tuple(DeviceSample(**part) for part in gpu.get("mig", ()))})
            for gpu in answer["gpus"]
        ),
        processes=tuple(ProcessUse(*each) for each in answer["processes"]),
        notes=tuple(answer["notes"]),
        uncounted=tuple(answer["uncounted"]),
    )


def _failed(why: str) -> Sample:
    return Sample(now(), failure=why)
