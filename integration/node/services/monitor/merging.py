"""Making one event of what NVML and the kernel's log tell of the same thing, and few of many.

::

    NVML: gpu, xid, MIG instances ─┐
                                   ├─ held for a moment ─▶ one with all of it ─▶ at most one a
    log:  gpu, xid, process ───────┘                                             second of a kind

Rules
- An Xid of one source is held for :data:`HOLD` seconds for that of the other with the same GPU and
  number. Together they are one event; alone it is told as it is. One to which the other could add
  nothing is not held: whoever is told why a container ended should know it before that is over.
- One whose other half was told alone not long ago is not told again: each error is counted once.
- Of the same (GPU, number, instances, process) one is told at once. Those of the next second are
  told together when it is over: ``times`` says how many. Those whose lines say that they are of
  another severity are told apart.
- What is remembered is bounded. In a storm of hundreds of different processes, processes are not
  told apart any more.

This decides by times that it is given, and does nothing itself.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Final

from integration.nvml.values import GpuEvent
from shim.causes.xids import RECOVERY, is_nonfatal, recovery_asked

HOLD: Final = 0.5
"""Seconds that the one waits for the other. They are written within milliseconds; which of them
names the MIG instance spares the GPU's other devices."""

_LATE: Final = 5.0
_QUIET: Final = 1.0
_MOST: Final = 256

_XID: Final = "xid"


@dataclass(slots=True)
class _Lone:
    """An event that its other half may follow until then."""

    event: GpuEvent
    until: float


class Merger:
    """What was told lately."""

    def __init__(self) -> None:
        self._held: deque[_Lone] = deque()
        self._alone: deque[_Lone] = deque()
        self._ready: list[GpuEvent] = []
        self._told: dict[tuple[object, ...], float] = {}
        self._more: dict[tuple[object, ...], GpuEvent] = {}

    def add(self, event: GpuEvent, now: float, *, is_whole: bool = False) -> None:
        """Take one in.

        Args:
            now: seconds of any clock that goes on.
            is_whole: whether the other source knows nothing more of it.
        """
        if event.kind != _XID or not event.gpu:
            self._tell(event, now)
            return
        other = _take(self._held, event)
        if other is not None:
            self._tell(_joined(event, other), now)
            return
        self._alone = deque(each for each in self._alone if each.until > now)
        if _take(self._alone, event) is not None:
            return
        if is_whole:
            self._told_alone(event, now)
            return
        self._held.append(_Lone(event, now + HOLD))
        while len(self._held) > _MOST:
            self._tell_alone(now)

    def due(self, now: float) -> list[GpuEvent]:
        """What is to be told now, in order.

        Args:
            now: of the same clock.
        """
        while self._held and self._held[0].until <= now:
            self._tell_alone(now)
        for key in [key for key, until in self._told.items() if until <= now]:
            more = self._more.pop(key, None)
            if more is None:
                del self._told[key]
            else:
                self._ready.append(more)
                self._told[key] = now + _QUIET
        ready, self._ready = self._ready, []
        return ready

    def wake(self) -> float | None:
        """When :meth:`due` has something new to say; None if never by itself."""
        times = [self._held[0].until] if self._held else []
        times += [self._told[key] for key in self._more]
        return min(times, default=None)

    def _tell_alone(self, now: float) -> None:
        self._told_alone(self._held.popleft().event, now)

    def _told_alone(self, event: GpuEvent, now: float) -> None:
        self._alone.append(_Lone(event, now + _LATE))
        while len(self._alone) > _MOST:
            self._alone.popleft()
        self._tell(event, now)

    def _tell(self, event: GpuEvent, now: float) -> None:
        key: tuple[object, ...] = (event.kind, event.gpu, event.xid, *_facts(event))
        if len(self._told) >= _MOST and key not in self._told:
            event = replace(event, pid=0, process="", cgroups="")
            key = (event.kind, event.gpu, event.xid, None, None, 0, _severity(event))
        if self._told.get(key, now) <= now and key not in self._more:
            self._told[key] = now + _QUIET
            self._ready.append(event)
            return
        before = self._more.get(key)
        times = event.times + (before.times if before else 0)
        self._more[key] = replace(before or event, times=times)


def _take(among: deque[_Lone], event: GpuEvent) -> GpuEvent | None:
    """Take the other half of an event out of these, if it is there."""
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
    return event.gpu_instance, event.compute_instance, event.pid, _severity(event)


def _severity(event: GpuEvent) -> object:
    """What the text says of how serious an error is, and its number does not."""
    if event.xid == RECOVERY:
        return recovery_asked(event.text)
    return is_nonfatal(event.xid, event.text)


def _joined(one: GpuEvent, other: GpuEvent) -> GpuEvent:
    """Both in one: NVML's, with what only the log knows."""
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
