"""Sample the GPUs for all callers.

Rules
- A question starts the child. It is stopped after :data:`_IDLE` seconds without another one if
  the last two questions were as close together as that, or asked for the activity of GPUs, and
  otherwise after :data:`_ALONE`. So it keeps running if there is a scrape every minute. On a node
  where only the health of devices is sampled, every few minutes, there is no child most of the
  time.
- Only one question is asked at a time. Callers that ask in the meantime share its answer.
- NVML has to answer each of its many calls in time, however many GPUs there are; otherwise the
  sample is a failure, and the child is stopped. After a failure NVML is not asked for a while,
  twice as long each time; until then the failure is the answer.
- One bad GPU does not affect the others. A GPU that does not answer while others do, or on which
  NVML crashes (found by asking one GPU after the other), is reported as lost. It is not asked for a
  minute, or for as long as the driver blocks a child that asked it. If NVML crashes or hangs on all
  GPUs, the sample is a failure.
- If a question for the activity of GPUs crashes or hangs NVML, it is repeated without the activity.
  The activity is then left out for :data:`_NO_PROFILE` seconds, unless a GPU fails both times.
- When the driver or the GPUs change, the child is stopped at once, even in the middle of an answer,
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
from integration.nvml.values import (
    Activity,
    DeviceSample,
    Fabric,
    GpuSample,
    ProcessUse,
    Sample,
    now,
)

_IDLE: Final = 75.0
_ALONE: Final = 3.0
_LONGEST_PAUSE: Final = 60.0
_TO_START: Final = 5.0
# One GPU may take this part of the time for an answer.
_OF_ONE: Final = 0.6
# Seconds until a GPU that was given up is asked again.
_GIVEN_UP: Final = 60.0
# Seconds without the activity of GPUs, after NVML failed to tell it.
_NO_PROFILE: Final = 600.0
# All calls together may take this many times as long as one.
_ALL: Final = 12


class NvmlSampler:
    """Keeps the child, and asks it. See :class:`~integration.nvml.values.Sampler`.

    Args:
        look: returns what the agent knows about the node.
        children: starts and ends the child.
        to_answer: the seconds that NVML may take to start, and then for each of its answers.
        post: called with each sample.
        idle: seconds without a question after which the child is stopped, if questions are
            frequent.
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
        self._wants_profile = False  # whether the next question includes it
        self._asks_profile = False  # whether the last question did, which may have no answer yet
        self._has_profile = False  # whether the last sample was asked for with it
        self._no_profile_until = -math.inf

    async def sample(self, *, max_age: float, profile: bool = False) -> Sample:
        """Return a sample that is at most ``max_age`` seconds old."""
        last, at = self._last, now()
        if self._has_stopped:
            return _failed("the sampler does not run")
        if last is not None and identity_of(self._look()) == self._asked_of:
            is_new = at - last.when <= max_age and (self._has_profile or not profile)
            if at < self._retry if last.failure else is_new:
                return last
        while True:
            self._wants_profile |= profile
            if not self._is_asked:  # else a question is due, or about to be answered
                self._is_asked = True
                self._wake.set()
            await self._answered.wait()
            # The answer may be to an earlier question.
            if self._has_profile or not profile or self._has_stopped:
                return self._last or _failed("the sampler does not run")

    def look_again(self) -> None:
        """End the child if the driver or the GPUs have changed."""
        if identity_of(self._look()) != self._asked_of:  # a child may be starting
            self._asking.cancel()
            self._wake.set()

    async def serve(self) -> None:
        """Answer questions until cancelled."""
        asked, stays = -math.inf, 0.0
        try:
            while True:
                with anyio.move_on_after(stays if self._child else math.inf):
                    await self._wake.wait()
                self._wake = anyio.Event()
                if not self._is_asked:  # it was idle, or the node has changed
                    await self._end()
                    continue
                before, asked = asked, now()
                is_frequent = self._wants_profile or asked - before <= self._idle
                stays = self._idle if is_frequent else min(self._idle, _ALONE)
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
        self._has_profile = self._asks_profile
        answered, self._answered = self._answered, anyio.Event()
        answered.set()

    async def _ask(self) -> Sample:
        self._asks_profile, self._wants_profile = self._wants_profile, False
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
        before, given_up = self._no_profile_until, self._given_up
        if self._asks_profile and now() > before:
            answer = await self._ask_profile(library, seen)
            if answer is not None:
                return _sample_of(answer)
        sample = await self._ask_rest(library, seen)
        if not sample.failure and self._given_up != given_up:
            self._no_profile_until = before  # it was that GPU, and not its activity
        return sample

    async def _ask_rest(self, library: str, seen: NodeSnapshot) -> Sample:
        """Return a sample without the activity of GPUs."""
        try:
            answer = await self._ask_child(library, seen)
        except ChildFailed as error:
            await self._end()
            return _failed(error.found or "NVML failed")
        if answer["hanging"]:
            self._give_up({int(index): why for index, why in answer["hanging"].items()})
            await self._end()  # it still waits for these GPUs
        return _sample_of(answer)

    async def _ask_profile(self, library: str, seen: NodeSnapshot) -> dict[str, Any] | None:
        """Return the child's answer with the activity of GPUs; None if NVML fails or hangs."""
        try:
            answer = await self._answer(library, seen, alone=False, profile=True)
        except ChildFailed:
            if self._child is None:  # it did not start, and was not asked
                return None
            answer = None
        if answer is None or answer["hanging"]:
            self._no_profile_until = now() + _NO_PROFILE
            await self._end()
            return None
        return answer

    async def _ask_child(self, library: str, seen: NodeSnapshot) -> dict[str, Any]:
        """Return the child's answer, with the reason for each GPU that was given up.

        Raises:
            ChildFailed: NVML hangs or crashes, and not because of one GPU.
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

    async def _answer(
        self, library: str, seen: NodeSnapshot, *, alone: bool, profile: bool = False
    ) -> dict[str, Any]:
        """Return a child's answer to one question.

        Args:
            alone: whether GPUs are asked one after the other.
            profile: whether to ask for their activity.

        Raises:
            ChildFailed: NVML hangs or crashes. If that happened at the start, there is no child.
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
                "alone": alone, "patience": patience, "profile": profile,
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
        config: locates the lock of NVML, and sets the time limit of NVML.
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
        gpus=tuple(_gpu_of(gpu) for gpu in answer["gpus"]),
        processes=tuple(ProcessUse(*each) for each in answer["processes"]),
        notes=tuple(answer["notes"]),
        uncounted=tuple(answer["uncounted"]),
    )


def _gpu_of(document: dict[str, Any]) -> GpuSample:
    mig = tuple(DeviceSample(**_with_activity(part)) for part in document.get("mig", ()))
    place = document.get("fabric")
    fabric = None if place is None else Fabric(**place)
    return GpuSample(**_with_activity(document) | {"mig": mig, "fabric": fabric})


def _with_activity(document: dict[str, Any]) -> dict[str, Any]:
    return document | {"activity": Activity(**document.get("activity", {}))}


def _failed(why: str) -> Sample:
    return Sample(now(), failure=why)
