"""What the agent has done and heard since it began: numbers that only grow.

They are the state's (``context.state.counters``), so that they outlive the service that shows
them, and a service counts whether or not anybody looks. Nothing of Prometheus is imported for it::

    counters.allocated("nvidia.com/gpu", seconds, OK)

Rules
- A name that becomes a label's value (a resource, a result) is one of few; what comes beyond
  :data:`MOST` of a kind is counted together under :data:`OTHERS`, so that nobody makes the agent
  and the one who scrapes it grow.
- For one event loop: nothing is locked.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from integration.nvml.values import GpuEvent, now

OK: Final = "ok"
REFUSED: Final = "refused"
"""What was asked cannot be had: the one who asked is told why."""
FAILED: Final = "failed"
"""It could not be done, and that was nobody's wish."""

SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
"""The upper bounds of what durations are counted by; there is none for the last."""

MOST: Final = 512
OTHERS: Final = "others"

Labels = tuple[str, ...]


@dataclass(slots=True)
class Durations:
    """How long something took, each time."""

    # how often it took up to each of SECONDS, and longer than the one before; and how often it took
    # longer than all of them
    counts: list[int] = field(default_factory=lambda: [0] * (len(SECONDS) + 1))
    total: float = 0.0  # seconds in all

    def add(self, seconds: float) -> None:
        """Count one more."""
        self.counts[bisect_left(SECONDS, seconds)] += 1
        self.total += seconds


class Counters:
    """What was counted.

    Attributes:
        allocations: answers to Allocate, by resource and result.
        allocating: how long they took, by resource.
        registrations: with a kubelet, by resource and result.
        updates: lists of devices that were sent to a kubelet, by resource.
        last_xids: when a GPU's driver last reported an error, in seconds since boot, by the GPU's
            UUID and the number. How many there were is the state's ``xid_counts``.
        faults: that containers had to do with, by kind, number ("" for none) and whose they were.
        restarts: how often a service was restarted, by its name.
        looks: at the node, by result; one that found something wrong has failed.
        looking: how long they took.
        latest_look: when the last was, in seconds since boot; None if there was none.
        last_look: when the last that found nothing wrong was, in seconds since boot; None if there
            was none.
    """

    def __init__(self) -> None:
        self.allocations: dict[Labels, int] = {}
        self.allocating: dict[Labels, Durations] = {}
        self.registrations: dict[Labels, int] = {}
        self.updates: dict[Labels, int] = {}
        self.last_xids: dict[Labels, float] = {}
        self.faults: dict[Labels, int] = {}
        self.restarts: dict[Labels, int] = {}
        self.looks: dict[Labels, int] = {}
        self.looking = Durations()
        self.latest_look: float | None = None
        self.last_look: float | None = None

    def allocated(self, resource: str, seconds: float, result: str) -> None:
        """An Allocate of the kubelet's was answered.

        Args:
            result: :data:`OK`, :data:`REFUSED` or :data:`FAILED`.
        """
        _count(self.allocations, (resource, result))
        key = _bounded(self.allocating, (resource,))
        self.allocating.setdefault(key, Durations()).add(seconds)

    def registered(self, resource: str, result: str) -> None:
        """A resource was registered with a kubelet, or was not.

        Args:
            result: :data:`OK`, :data:`REFUSED` (the kubelet said no) or :data:`FAILED`.
        """
        _count(self.registrations, (resource, result))

    def updated(self, resource: str) -> None:
        """A kubelet was sent a resource's list of devices."""
        _count(self.updates, (resource,))

    def happened(self, event: GpuEvent) -> None:
        """Something happened to a GPU. Called for each of the state's ``gpu_events``."""
        if event.xid:
            key = _bounded(self.last_xids, (event.gpu, str(event.xid)))
            self.last_xids[key] = event.when

    def faulted(self, kind: str, code: int, whose: str) -> None:
        """A container had to do with a fault (:class:`shim.causes.record.Fault`)."""
        _count(self.faults, (kind, str(code or ""), str(whose)))

    def restarted(self, service: str) -> None:
        """A service has ended, and is started again."""
        _count(self.restarts, (service,))

    def looked(self, seconds: float, *, faults: bool) -> None:
        """The node was looked at."""
        _count(self.looks, (FAILED if faults else OK,))
        self.looking.add(seconds)
        self.latest_look = now()
        if not faults:
            self.last_look = self.latest_look


def _bounded(counted: Mapping[Labels, object], key: Labels) -> Labels:
    """The key to count under: itself, or that of all others if there are too many already."""
    if key in counted or len(counted) < MOST:
        return key
    return (OTHERS,) * len(key)


def _count(counted: dict[Labels, int], key: Labels) -> None:
    key = _bounded(counted, key)
    counted[key] = counted.get(key, 0) + 1
