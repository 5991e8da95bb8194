"""Keeping the child that waits for NVML's events, and telling what it says.

Rules
- A child that hangs, crashes or fails is ended, and another is begun after a while. Meanwhile all
  GPUs are *unwatched*, and that is logged and posted, with the reason; what happens is then known
  from the kernel's log only. So is a GPU that alone cannot be watched.
- The child waits as long as :data:`BEAT` before it says that it is there; one that is silent for
  longer, by NVML's time-out, hangs.
- A GPU that could not be watched is tried again now and then, by a new child: NVML takes no notice
  of one that was reset. One that was lost is tried as soon as it answers those who sample it.
- MIG mode that was switched by hand shows in nothing but NVML's answer, as long as there are no
  instances; and nobody can switch it while a child runs. So each child says it when it begins.
- A GPU that the child finds lost is posted at once; that it is back, samples prove.
- When the driver or the GPUs change, the child is ended at once and a new one begun with what there
  is then: NVML does not see GPUs that come later, and keeps the kernel module in use.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import anyio

from integration.backoff import Backoff
from integration.node.state.topic import version_of, wait_any
from integration.node.values.service_name import ServiceName
from integration.nvml.child import EVENTS
from integration.nvml.errors import ChildFailed
from integration.nvml.session import Child, Children, identity_of, library_of, uuids_of
from integration.nvml.values import GpuEvent, now
from integration.watcher import first_of

if TYPE_CHECKING:
    from integration.node.state.store import State
    from integration.nvml.snapshot import NodeSnapshot

BEAT: Final = 60.0
"""Seconds after which a child that has nothing to say says so."""

# Seconds until another child is begun, at most; and until what could not be watched is tried again,
# the first time.
_LONGEST_PAUSE: Final = 300.0
_RETRY: Final = 60.0

# Seconds besides NVML's time-out: without persistence mode it takes one or two for each GPU to
# begin, and nobody waits for that here.
_TO_BEGIN: Final = 30.0

_LATE: Final = 5.0  # on a busy node

# After so many lines a storm is left to itself for a while: the pipe is full then, and waits.
_BATCH: Final = 256
_PAUSE: Final = 0.1

_FAULT: Final = "monitor.events"
_NO_EVENTS: Final = "of no GPU events can be had"


class Watch:
    """Who keeps the child.

    Args:
        state: has the node, and gets who is not watched.
        to_answer: seconds that NVML may take.
        beat: seconds of silence.
    """

    def __init__(
        self,
        state: State,
        children: Children,
        tell: Callable[[GpuEvent], None],
        say: Callable[..., None],
        *,
        to_answer: float,
        beat: float = BEAT,
    ) -> None:
        self._state, self._children, self._tell, self._say = state, children, tell, say
        self._unwatched = state.unwatched.publisher(ServiceName.MONITOR)
        self._lost = state.lost_gpus.publisher(ServiceName.MONITOR)
        self._mig_modes = state.mig_modes.publisher(ServiceName.MONITOR)
        self._to_answer, self._beat, self._retry = to_answer, beat, _RETRY
        self._said_lost = math.inf  # when the child did so last

    async def keep(self) -> None:
        """Keep a child as long as there is something to watch, until cancelled."""
        backoff = Backoff(longest=_LONGEST_PAUSE)
        while True:
            version, seen = version_of(*self._state.nvml_inputs), self._state.node.value
            if self._state.nvml_unavailable or not library_of(seen):
                if not self._state.nvml_closed.value:  # which is but a moment
                    self._lost.publish({})
                    self._post(
                        {"": self._state.nvml_pause.value} if self._state.nvml_pause.value else {},
                        "",
                    )
                await wait_any(*self._state.nvml_inputs, since=version)
                continue
            begun = time.monotonic()
            try:
                await self._one(seen)
            except ChildFailed as error:
                unwatched = self._state.unwatched.value
                if not seen.gpus or not unwatched.keys() >= set(seen.gpus):
                    unwatched = {"": error.found}
                self._post(unwatched, str(error))  # what is known of each says more
                pause = backoff.pause(time.monotonic() - begun)
                version = version_of(*self._state.nvml_inputs)
                await wait_any(*self._state.nvml_inputs, since=version, timeout=pause)
            else:
                backoff = Backoff(longest=_LONGEST_PAUSE)

    async def _one(self, seen: NodeSnapshot) -> None:
        """Hear one child, until there is another driver, or other GPUs, or it is time to try again.

        Raises:
            ChildFailed: there is nothing more to hear from it.
        """
        child = self._children.start(EVENTS, library_of(seen))
        self._said_lost = math.inf
        try:
            await first_of(
                partial(self._until_other, seen), self._until_back, partial(self._hear, child, seen)
            )
        finally:
            self._mig_modes.publish({})  # which may be switched from now on
            await self._children.end(child)

    async def _until_other(self, seen: NodeSnapshot) -> None:
        version = version_of(*self._state.nvml_inputs)
        while not self._state.nvml_unavailable and identity_of(
            self._state.node.value
        ) == identity_of(seen):
            version = await wait_any(*self._state.nvml_inputs, since=version)

    async def _until_back(self) -> None:
        """End it when a GPU that was lost answers others, of which the child takes no notice."""
        async for sample in self._state.sample.changes():
            if sample is not None and sample.when > self._said_lost:
                there = {gpu.uuid for gpu in sample.gpus if not gpu.lost}
                if not there.isdisjoint(self._state.lost_gpus.value):
                    return

    async def _hear(self, child: Child, seen: NodeSnapshot) -> None:
        patience = self._to_answer + _TO_BEGIN
        begun, count = time.monotonic(), 0
        child.ask({"gpus": uuids_of(seen), "beat": self._beat})
        while not (self._state.unwatched.value and time.monotonic() - begun > self._retry):
            word = await child.answer(patience)
            patience = self._beat + self._to_answer + _LATE
            if "lost" in word:
                self._said_lost = now()
                self._lost.publish(word["lost"])
            elif "unwatched" in word:
                unwatched = word["unwatched"]
                in_vain = bool(seen.gpus) and unwatched.keys() >= set(seen.gpus)
                failed = ChildFailed("events of NVML", found=_NO_EVENTS)
                self._post(unwatched, str(failed) if in_vain else "")
            elif "mig" in word:
                self._mig_modes.publish(word["mig"])
                if self._state.mig_modes_differ:
                    self._state.look_requested.send()
            elif "event" in word:
                self._tell(_event_of(word["event"], seen))
            count += 1
            if count % _BATCH == 0:
                await anyio.sleep(_PAUSE)
        self._retry = min(2 * self._retry, _LONGEST_PAUSE)

    def _post(self, unwatched: Mapping[str, str], fault: str) -> None:
        """Say which GPUs are not watched, and log those where that has changed."""
        before = self._state.unwatched.value
        if not unwatched:
            self._retry = _RETRY
        if unwatched.keys() - before.keys() and not self._state.nvml_unavailable:
            self._state.look_requested.send()
        if fault and self._state.faults.lines.get(_FAULT) != fault:
            self._say("error", fault)
        self._unwatched.publish(unwatched)
        self._state.faults.report(_FAULT, fault)
        for gpu in sorted(before.keys() - unwatched.keys()):
            self._say("info", "events of it are heard again", gpu=gpu or "all")
        for gpu, why in sorted(unwatched.items()):
            if gpu not in before:
                self._say("warning", "its events cannot be heard", gpu=gpu or "all", reason=why)


def _event_of(said: dict[str, Any], seen: NodeSnapshot) -> GpuEvent:
    """An event as it was heard now; one of a GPU that the node does not have is nobody's."""
    event = GpuEvent(now(), **said)
    gpus = seen.inventory.gpus if seen.inventory is not None else ()
    bus_id = next((gpu.bus_id for gpu in gpus if gpu.uuid == event.gpu), None)
    if bus_id is not None:
        return replace(event, bus_id=bus_id)
    text = f"of {event.gpu or 'a GPU without a name'}, which the node does not have"
    return replace(event, gpu="", text=text)
