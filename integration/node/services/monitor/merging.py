"""Merge the events of NVML and the kernel log, and limit their rate.

::

    NVML: gpu, xid, MIG instances ─┐
                                   ├─ held for a moment ─▶ one event ─▶ at most one per second
    log:  gpu, xid, process ───────┘                       with all facts   of a kind

Rules
- An Xid of one source waits :data:`HOLD` seconds for the same GPU and number from the other source.
  If both arrive they become one event; otherwise the event is sent alone. An event to which the
  other source cannot add anything does not wait, because a container's exit message needs it soon.
- An Xid whose counterpart was sent alone a few seconds ago is dropped: each error counts once.
- The first event of a combination (GPU, number, instances, process) is sent at once. Those of the
  following second are sent as one; ``times`` is their number. Events of different severity stay
  separate.
- The memory is bounded. In a storm of hundreds of processes, events no longer name the process.

The module does no I/O and reads no clock; callers pass the time.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Final

from integration.node.faults.policy import action_of
from integration.node.faults.sxids import is_fatal
from integration.nvml.values import GpuEvent
from shim.causes.xids import is_nonfatal

HOLD: Final = 0.5
"""Seconds that an Xid waits for its counterpart. Both sources report within milliseconds. The wait
spares the other MIG devices of the GPU, because only one of the sources may name the instance."""

_LATE: Final = 5.0
_QUIET: Final = 1.0
_MOST: Final = 256

_XID: Final = "xid"


@dataclass(slots=True)
class _Lone:
    """An event whose counterpart may arrive until a time."""

    event: GpuEvent
    until: float


class Merger:
    """The events that wait, and those that were sent recently."""

    def __init__(self) -> None:
        self._held: deque[_Lone] = deque()
        self._unpaired: deque[_Lone] = deque()
        self._ready: list[GpuEvent] = []
        self._sent_until: dict[tuple[object, ...], float] = {}
        self._more: dict[tuple[object, ...], GpuEvent] = {}

    def add(self, event: GpuEvent, now: float, *, is_whole: bool = False) -> None:
        """Add an event.

        Args:
            event: an event from one of the sources.
            now: the time in seconds, on a monotonic clock.
            is_whole: whether the other source cannot add anything.
        """
        if event.kind != _XID or not event.gpu:
            self._send(event, now)
            return
        other = _take(self._held, event)
        if other is not None:
            self._send(_joined(event, other), now)
            return
        self._unpaired = deque(each for each in self._unpaired if each.until > now)
        if _take(self._unpaired, event) is not None:
            return
        if is_whole:
            self._send_unpaired(event, now)
            return
        self._held.append(_Lone(event, now + HOLD))
        while len(self._held) > _MOST:
            self._send_oldest(now)

    def due(self, now: float) -> list[GpuEvent]:
        """Return the events to send now, in order.

        Args:
            now: the time in seconds, on the same clock.
        """
        while self._held and self._held[0].until <= now:
            self._send_oldest(now)
        for key in [key for key, until in self._sent_until.items() if until <= now]:
            more = self._more.pop(key, None)
            if more is None:
                del self._sent_until[key]
            else:
                self._ready.append(more)
                self._sent_until[key] = now + _QUIET
        ready, self._ready = self._ready, []
        return ready

    def wake(self) -> float | None:
        """Return when :meth:`due` will have an event; None if no event waits."""
        times = [self._held[0].until] if self._held else []
        times += [self._sent_until[key] for key in self._more]
        return min(times, default=None)

    def _send_oldest(self, now: float) -> None:
        self._send_unpaired(self._held.popleft().event, now)

    def _send_unpaired(self, event: GpuEvent, now: float) -> None:
        self._unpaired.append(_Lone(event, now + _LATE))
        while len(self._unpaired) > _MOST:
            self._unpaired.popleft()
        self._send(event, now)

    def _send(self, event: GpuEvent, now: float) -> None:
        key: tuple[object, ...] = (event.kind, event.gpu, event.xid, *_facts(event))
        if len(self._sent_until) >= _MOST and key not in self._sent_until:
            event = replace(event, pid=0, process="", cgroups="")
            key = (event.kind, event.gpu, event.xid, None, None, 0, _severity(event), None)
        if self._sent_until.get(key, now) <= now and key not in self._more:
            self._sent_until[key] = now + _QUIET
            self._ready.append(event)
            return
        before = self._more.get(key)
        times = event.times + (before.times if before else 0)
        self._more[key] = replace(before or event, times=times)


def _take(among: deque[_Lone], event: GpuEvent) -> GpuEvent | None:
    """Remove and return the counterpart of an event; None if there is none."""
    for lone in among:
        other = lone.event
        if (
            other.source != event.source
            and (other.gpu, other.xid) == (event.gpu, event.xid)
            and _agree(other.gpu_instance, event.gpu_instance)
            and _agree(other.compute_instance, event.compute_instance)
        ):
            among.remove(lone)
            return other
    return None


def _agree(one: int | None, other: int | None) -> bool:
    return one is None or other is None or one == other


def _facts(event: GpuEvent) -> tuple[object, ...]:
    switch = event.switch and (event.bus_id, event.switch)
    return event.gpu_instance, event.compute_instance, event.pid, _severity(event), switch


def _severity(event: GpuEvent) -> object:
    """Return the severity that the text adds to the number."""
    return action_of(event), is_nonfatal(event.xid, event.text), is_fatal(event)


def _joined(one: GpuEvent, other: GpuEvent) -> GpuEvent:
    """Return NVML's event with the facts that only the log has."""
    nvml, log = (one, other) if one.source == "nvml" else (other, one)
    return replace(
        nvml,
        when=min(one.when, other.when),
        gpu_instance=log.gpu_instance if nvml.gpu_instance is None else nvml.gpu_instance,
        compute_instance=(
            log.compute_instance if nvml.compute_instance is None else nvml.compute_instance
        ),
        bus_id=log.bus_id or nvml.bus_id,
        pid=log.pid,
        process=log.process,
        cgroups=log.cgroups,
        text=log.text or nvml.text,
    )
