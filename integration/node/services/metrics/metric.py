"""What a family of metrics is: a name, a meaning, and a function that finds its values.

Rules
- Names and units are by Prometheus' conventions: base units (bytes, seconds, joules, hertz; ratios
  from 0 to 1), ``_total`` for what only grows, ``_info`` for facts whose value is 1.
- A series has few labels, and the same ones everywhere, so that any two families can be joined:
  ``gpu`` and ``uuid`` are always those of the GPU, ``mig`` and ``mig_uuid`` those of a MIG device
  on it (absent for the GPU itself). What is only good to know is in the ``_info`` families.
- A container is known by ``namespace``, ``pod`` and ``container``, as everywhere in Kubernetes, and
  not by its id: a pod that is restarted all day long must not make a new series each time. One
  without a pod has a ``container`` only: its name, or else its id.
- What is not known is absent, and not 0. What is gone is absent with the next scrape.
- Published names are never changed; new ones may be added.

Source: Prometheus' "Metric and label naming" and "Writing exporters"; OpenMetrics 1.0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from integration.node.services.metrics.snapshot import Moment
from integration.node.values.counters import Durations

GPU: Final = ("gpu", "uuid", "pci_bus_id", "model")
MIG: Final = ("gpu", "uuid", "mig", "mig_uuid", "profile")
DEVICE: Final = ("gpu", "uuid", "mig", "mig_uuid")
CONTAINER: Final = ("namespace", "pod", "container")

_KINDS: Final = {"total": "counter", "info": "info"}

Rows = Mapping[tuple[str, ...], float | Durations | None]
"""The value of each series by its labels' values; None for one that is not known."""


@dataclass(frozen=True, slots=True)
class Family:
    """Metrics of one name."""

    name: str  # as it is queried; of a histogram without its endings
    help: str  # one line
    labels: tuple[str, ...] = ()  # their names, in order
    rows: Callable[[Moment], Rows] = lambda _: {}  # finds the series in what the agent knows
    is_histogram: bool = False  # whether its values are Durations

    @property
    def kind(self) -> str:
        """What Prometheus calls its kind, which its name tells."""
        if self.is_histogram:
            return "histogram"
        return _KINDS.get(self.name.rpartition("_")[2], "gauge")

    @property
    def samples(self) -> tuple[str, ...]:
        """The names that its series have."""
        if self.is_histogram:
            return tuple(f"{self.name}_{ending}" for ending in ("bucket", "sum", "count"))
        return (self.name,)


class Group(NamedTuple):
    """Families that belong together."""

    title: str  # what they are of
    families: tuple[Family, ...]  # in the order in which they are written


def single(
    name: str,
    meaning: str,
    value: Callable[[Moment], float | Durations | None],
    *,
    is_histogram: bool = False,
) -> Family:
    """A family that has one series, without labels."""
    rows: Callable[[Moment], Rows] = lambda moment: {(): value(moment)}  # noqa: E731 - typed
    return Family(name, meaning, (), rows, is_histogram)
