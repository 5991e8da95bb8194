"""A metric: a name, a help text, labels, and a function that returns its values.

Rules
- Names and units follow Prometheus' conventions: base units (bytes, seconds, joules, hertz; ratios
  from 0 to 1), ``_total`` for counters, ``_info`` for facts whose value is 1.
- A series has few labels, the same ones everywhere, so that a query can join any two metrics:
  ``gpu`` and ``uuid`` are always those of the GPU, ``mig`` and ``mig_uuid`` those of a MIG device
  on it (absent for the GPU itself). Further details are labels of the ``_info`` metrics.
- The labels ``namespace``, ``pod`` and ``container`` identify a container, as everywhere in
  Kubernetes, not its id: a pod that restarts all day must not create a new series each time. A
  container without a pod has the label ``container`` only: its name, or else its id.
- An unknown value is absent, not 0. A device or container that no longer exists is absent from the
  next scrape on.
- Published names are never changed; new ones may be added.

Source: Prometheus' "Metric and label naming" and "Writing exporters"; OpenMetrics 1.0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from integration.node.services.metrics.snapshot import Snapshot
from integration.node.values.counters import Durations

GPU: Final = ("gpu", "uuid", "pci_bus_id", "model")
MIG: Final = ("gpu", "uuid", "mig", "mig_uuid", "profile")
DEVICE: Final = ("gpu", "uuid", "mig", "mig_uuid")
CONTAINER: Final = ("namespace", "pod", "container")

_KINDS: Final = {"total": "counter", "info": "info"}

Rows = Mapping[tuple[str, ...], float | Durations | None]
"""The value of each series, by the values of its labels; None if it is unknown."""


@dataclass(frozen=True, slots=True)
class Metric:
    """All series of one name; Prometheus calls that a metric family."""

    name: str  # the name in queries; for a histogram without the suffixes
    help: str  # one line
    labels: tuple[str, ...] = ()  # the names of the labels, in order
    rows: Callable[[Snapshot], Rows] = lambda _: {}  # returns the series for a snapshot
    is_histogram: bool = False  # whether its values are Durations
    type: str = ""  # Prometheus' type, for a name that does not tell it

    @property
    def kind(self) -> str:
        """Prometheus' type of the metric, derived from its name."""
        if self.is_histogram:
            return "histogram"
        return self.type or _KINDS.get(self.name.rpartition("_")[2], "gauge")

    @property
    def samples(self) -> tuple[str, ...]:
        """The names of its series."""
        if self.is_histogram:
            return tuple(f"{self.name}_{suffix}" for suffix in ("bucket", "sum", "count"))
        return (self.name,)


class Group(NamedTuple):
    """Metrics that belong together."""

    title: str  # a heading for the documentation
    metrics: tuple[Metric, ...]  # in the order of the output


def single(
    name: str,
    meaning: str,
    value: Callable[[Snapshot], float | Durations | None],
    *,
    is_histogram: bool = False,
) -> Metric:
    """Return a metric with one series, without labels."""
    rows: Callable[[Snapshot], Rows] = lambda snapshot: {(): value(snapshot)}  # noqa: E731 - typed
    return Metric(name, meaning, (), rows, is_histogram)
