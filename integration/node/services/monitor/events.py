"""Run the child that waits for NVML's events, and forward what it reports.

Rules
- The agent stops a child that hangs, crashes or fails, and starts another after a pause. Until
  then all GPUs are *unwatched*: the agent logs and publishes that with the reason, and gets errors
  only from the kernel log. The same applies to a single GPU that cannot be watched.
- Without events the child sends a heartbeat every :data:`BEAT` seconds. A child that is silent for
  longer than that plus NVML's timeout is considered hung.
- If a GPU could not be watched, the agent retries after a while with a new child, because NVML does
  not notice a reset. It retries a lost GPU as soon as a sample shows that it answers.
- While a GPU has no instances, only NVML shows that an administrator has switched its MIG mode. The
  mode cannot be switched while a child runs. So each child reports the modes when it starts.
- When the child reports a lost GPU, the agent publishes that at once. Samples prove its return.
- While NVML is closed for a reset or a MIG layout, only the GPUs that it changes count as
  unwatched: the pause is short, and the kernel log has the errors of the others.
- When the driver or the GPUs change, the agent replaces the child at once: NVML does not see GPUs
  that are added later, and keeps the kernel module in use.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

import anyio

from integration.backoff import Backoff
from integration.node.state.store import State
from integration.node.state.topic import version_of, wait_any
from integration.node.values.service_name import ServiceName
from integration.nvml.child import EVENTS
from integration.nvml.errors import ChildFailed
from integration.nvml.session import Child, Children, identity_of, library_of, uuids_of
from integration.nvml.snapshot import NodeSnapshot
from integration.nvml.values import GpuEvent, now
from integration.watcher import first_of

BEAT: Final = 60.0
"""Seconds between two heartbeats of a child without events."""

# In seconds: the longest pause before the next child, and the first pause before the agent retries
# a GPU that could not be watched.
_LONGEST_PAUSE: Final = 300.0
_RETRY: Final = 60.0

# Seconds in addition to NVML's timeout for a child's first message: without persistence mode, NVML
# takes one or two seconds to initialize each GPU.
_TO_START: Final = 30.0

_LATE: Final = 5.0  # on a busy node

# In a storm the agent pauses after so many messages. The pipe fills, and the child blocks.
_BATCH: Final = 256
_PAUSE: Final = 0.1

_FAULT: Final = "monitor.events"
_NO_EVENTS: Final = "NVML delivers events of no GPU"


class Watch:
    """Runs the child, restarts it, and publishes which GPUs are not watched.

    Args:
        state: the node and the GPUs to watch.
        children: starts and stops the child.
        tell: called with each event.
        say: writes a log line.
        to_answer: NVML's timeout in seconds.
        beat: seconds between two heartbeats.
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
        # A reset or a MIG layout marks its GPUs one after the other.
        self._inputs = (*state.nvml_inputs, state.resetting_gpus)
        self._to_answer, self._beat, self._retry = to_answer, beat, _RETRY
        self._lost_at = math.inf  # when the child last reported a lost GPU

    async def keep(self) -> None:
        """Run a child while there is a GPU to watch, until cancelled."""
        backoff = Backoff(longest=_LONGEST_PAUSE)
        while True:
            version, node = version_of(*self._inputs), self._state.node.value
            if self._state.nvml_unavailable or not library_of(node):
                # The agent closes NVML only briefly for a look at the node.
                if not self._state.nvml_closed.value:
                    self._lost.publish({})
                    why = self._state.nvml_pause.value
                    gpus = self._state.resetting_gpus.value or {""}
                    self._post(dict.fromkeys(gpus, why) if why else {}, "")
                await wait_any(*self._inputs, since=version)
                continue
            started = time.monotonic()
            try:
                await self._one(node)
            except ChildFailed as error:
                unwatched = self._state.unwatched.value
                if not node.gpus or not unwatched.keys() >= set(node.gpus):
                    unwatched = {"": error.found}
                self._post(unwatched, str(error))  # the reasons of single GPUs say more
                pause = backoff.pause(time.monotonic() - started)
                version = version_of(*self._state.nvml_inputs)
                if not self._has_changed(node):  # while the child was being ended
                    await wait_any(*self._state.nvml_inputs, since=version, timeout=pause)
            else:
                backoff = Backoff(longest=_LONGEST_PAUSE)

    async def _one(self, node: NodeSnapshot) -> None:
        """Run one child until the driver or the GPUs change, or a retry is due.

        Raises:
            ChildFailed: the child hangs, crashed or failed.
        """
        child = self._children.start(EVENTS, library_of(node))
        self._lost_at = math.inf
        try:
            await first_of(
                partial(self._until_changed, node),
                self._until_back,
                partial(self._read, child, node),
            )
        finally:
            self._mig_modes.publish({})  # without a child, the modes can be switched
            await self._children.end(child)

    async def _until_changed(self, node: NodeSnapshot) -> None:
        version = version_of(*self._state.nvml_inputs)
        while not self._has_changed(node):
            version = await wait_any(*self._state.nvml_inputs, since=version)

    def _has_changed(self, node: NodeSnapshot) -> bool:
        """Return whether no child for this node may run any longer."""
        is_same = identity_of(self._state.node.value) == identity_of(node)
        return bool(self._state.nvml_unavailable) or not is_same

    async def _until_back(self) -> None:
        """Return when a sample shows that a lost GPU answers. The child does not notice that."""
        async for sample in self._state.sample.changes():
            if sample is not None and sample.when > self._lost_at:
                answering = {gpu.uuid for gpu in sample.gpus if not gpu.lost}
                if not answering.isdisjoint(self._state.lost_gpus.value):
                    return

    async def _read(self, child: Child, node: NodeSnapshot) -> None:
        patience = self._to_answer + _TO_START
        started, count = time.monotonic(), 0
        child.ask({"gpus": uuids_of(node), "beat": self._beat})
        while not (self._state.unwatched.value and time.monotonic() - started > self._retry):
            message = await child.answer(patience)
            patience = self._beat + self._to_answer + _LATE
            if "lost" in message:
                self._lost_at = now()
                self._lost.publish(message["lost"])
            elif "unwatched" in message:
                unwatched = message["unwatched"]
                is_blind = bool(node.gpus) and unwatched.keys() >= set(node.gpus)
                failed = ChildFailed("events of NVML", found=_NO_EVENTS)
                self._post(unwatched, str(failed) if is_blind else "")
            elif "mig" in message:
                self._mig_modes.publish(message["mig"])
                if self._state.mig_modes_differ:
                    self._state.look_requested.send()
            elif "event" in message:
                self._tell(_event_of(message["event"], node))
            count += 1
            if count % _BATCH == 0:
                await anyio.sleep(_PAUSE)
        self._retry = min(2 * self._retry, _LONGEST_PAUSE)

    def _post(self, unwatched: Mapping[str, str], fault: str) -> None:
        """Publish which GPUs are not watched, and log the changes."""
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
            self._say("info", "NVML delivers its events again", gpu=gpu or "all")
        for gpu, why in sorted(unwatched.items()):
            if gpu not in before:
                self._say(
                    "warning", "NVML does not deliver its events", gpu=gpu or "all", reason=why
                )


def _event_of(fields: dict[str, Any], node: NodeSnapshot) -> GpuEvent:
    """Return an event with the present time; for an unknown GPU, without a GPU but a text on it."""
    event = GpuEvent(now(), **fields)
    gpus = node.inventory.gpus if node.inventory is not None else ()
    bus_id = next((gpu.bus_id for gpu in gpus if gpu.uuid == event.gpu), None)
    if bus_id is not None:
        return replace(event, bus_id=bus_id)
    text = f"of {event.gpu or 'a GPU without a name'}, which the node does not have"
    return replace(event, gpu="", text=text)
