"""Counters of the agent since its start.

They are part of the agent's state (``context.state.counters``). So they survive a restart of the
metrics service, and services count even without it. No counter imports prometheus-client::

    counters.allocated("nvidia.com/gpu", seconds, OK)

Rules
- A counter has at most :data:`MOST` combinations of labels. Further ones are counted together under
  :data:`OTHERS`, to bound the memory of the agent and of Prometheus.
- Only the event loop changes the counters, so there are no locks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from integration.nvml.values import GpuEvent, now

OK: Final = "ok"
REFUSED: Final = "refused"
"""The agent or the kubelet refused the request, with a reason."""
FAILED: Final = "failed"
"""The operation failed unexpectedly."""

SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
"""The upper bounds of the histogram's buckets, in seconds; the last bucket has no bound."""

MOST: Final = 512
OTHERS: Final = "others"

Labels = tuple[str, ...]


@dataclass(slots=True)
class Durations:
    """A histogram of durations."""

    # durations up to each bound of SECONDS; the last bucket has those above all bounds
    counts: list[int] = field(default_factory=lambda: [0] * (len(SECONDS) + 1))
    total: float = 0.0  # seconds in all

    def add(self, seconds: float) -> None:
        """Add a duration."""
        self.counts[bisect_left(SECONDS, seconds)] += 1
        self.total += seconds


class Counters:
    """The agent's counters.

    Attributes:
        allocations: responses to Allocate, by resource and result.
        allocation_durations: how long these took, by resource.
        registrations: registrations with a kubelet, by resource and result.
        updates: lists of devices sent to a kubelet, by resource.
        last_xids: when the driver last reported an error, in seconds since boot, by the GPU's UUID
            and the error's number. The state's ``xid_counts`` has the number of errors.
        switch_errors: errors of NVSwitches, by the switch, its PCI address, the error's number and
            its severity.
        faults: faults that hit containers, by kind, number ("" for none) and cause.
        restarts: restarts of services, by name.
        checks: checks of the node, by result; a check that found a fault has the result failed.
        check_durations: how long these took.
        latest_check: when the latest check was made, in seconds since boot; None if there was none.
        last_good_check: when the latest check without a fault was made, in seconds since boot; None
            if there was none.
        nri_answers: answers to NRI about containers with GPUs, by result.
    """

    def __init__(self) -> None:
        self.allocations: dict[Labels, int] = {}
        self.allocation_durations: dict[Labels, Durations] = {}
        self.registrations: dict[Labels, int] = {}
        self.updates: dict[Labels, int] = {}
        self.last_xids: dict[Labels, float] = {}
        self.switch_errors: dict[Labels, int] = {}
        self.faults: dict[Labels, int] = {}
        self.restarts: dict[Labels, int] = {}
        self.checks: dict[Labels, int] = {}
        self.check_durations = Durations()
        self.latest_check: float | None = None
        self.last_good_check: float | None = None
        self.nri_answers: dict[Labels, int] = {}

    def allocated(self, resource: str, seconds: float, result: str) -> None:
        """Count a response to Allocate.

        Args:
            result: :data:`OK`, :data:`REFUSED` or :data:`FAILED`.
        """
        _count(self.allocations, (resource, result))
        key = _bounded(self.allocation_durations, (resource,))
        self.allocation_durations.setdefault(key, Durations()).add(seconds)

    def registered(self, resource: str, result: str) -> None:
        """Count a registration of a resource with a kubelet, or a failed one.

        Args:
            result: :data:`OK`, :data:`REFUSED` (by the kubelet) or :data:`FAILED`.
        """
        _count(self.registrations, (resource, result))

    def updated(self, resource: str) -> None:
        """Count a list of a resource's devices sent to a kubelet."""
        _count(self.updates, (resource,))

    def add_event(self, event: GpuEvent) -> None:
        """Note the time of an Xid, and count an NVSwitch's error.

        The state calls this for each of its ``gpu_events``.
        """
        if (error := event.switch) is not None:
            labels = (error.switch, event.bus_id, str(error.number), error.severity)
            _count(self.switch_errors, labels, event.times)
        if event.xid:
            key = _bounded(self.last_xids, (event.gpu, str(event.xid)))
            self.last_xids[key] = event.when

    def faulted(self, kind: str, code: int, whose: str) -> None:
        """Count a fault that hit a container (:class:`shim.causes.record.Fault`)."""
        _count(self.faults, (kind, str(code or ""), str(whose)))

    def restarted(self, service: str) -> None:
        """Count a restart of a service."""
        _count(self.restarts, (service,))

    def nri_answered(self, result: str) -> None:
        """Count an answer to NRI: :data:`OK`, :data:`REFUSED` or :data:`FAILED`."""
        _count(self.nri_answers, (result,))

    def checked(self, seconds: float, *, faults: bool) -> None:
        """Count a check of the node."""
        _count(self.checks, (FAILED if faults else OK,))
        self.check_durations.add(seconds)
        self.latest_check = now()
        if not faults:
            self.last_good_check = self.latest_check


def _bounded(counted: Mapping[Labels, object], key: Labels) -> Labels:
    """Return the key, or the common key for all further ones if there are too many."""
    if key in counted or len(counted) < MOST:
        return key
    return (OTHERS,) * len(key)


def _count(counted: dict[Labels, int], key: Labels, times: int = 1) -> None:
    key = _bounded(counted, key)
    counted[key] = counted.get(key, 0) + times
