"""What share of a GPU's energy each container has used, since it is watched.

Rules
- Between two samples a GPU has drawn energy; it is shared out by the time that each one's kernels
  ran on the multiprocessors, as the later sample says. What is drawn while nobody computes is
  nobody's, and so is that of the first sample.
- Processes of no container count: what they have used is not a container's.
- Where NVML does not say who computed (MIG), nobody's share is known.
- A counter that goes back (a driver that was loaded anew) begins anew. A container's sum never goes
  back, and is forgotten with the container.
- A sample is counted once, however often it is asked about.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from integration.nvml.values import Sample

# Of an interval without a look, so many seconds are taken for ones of the work that is seen at its
# end; nobody can tell whose the rest was.
_LONGEST: Final = 120.0


class Meter:
    """The sums so far, by container (its bundle) and GPU."""

    def __init__(self) -> None:
        self._when = 0.0
        self._before: dict[str, tuple[float, float]] = {}
        self._sums: dict[tuple[str, str], float] = {}

    def update(self, sample: Sample, busy: Mapping[tuple[str, str], int]) -> None:
        """Share out what was drawn since the sample before.

        Args:
            busy: for how much of the time each computed, in percent, by container ("" for none)
                and GPU; those of whom it is known.
        """
        if sample.failure or sample.when <= self._when:
            return
        self._when = sample.when
        for gpu in sample.gpus:
            if gpu.energy_joules is None:
                self._before.pop(gpu.uuid, None)
                continue
            when, joules = self._before.get(gpu.uuid, (0.0, gpu.energy_joules))
            self._before[gpu.uuid] = (sample.when, gpu.energy_joules)
            drawn = gpu.energy_joules - joules
            shares = {whose: n for (whose, uuid), n in busy.items() if uuid == gpu.uuid and n > 0}
            total = sum(shares.values())
            if drawn <= 0 or not total:
                continue
            drawn *= _LONGEST / max(sample.when - when, _LONGEST)
            for whose, percent in shares.items():
                if whose:
                    key = (whose, gpu.uuid)
                    self._sums[key] = self._sums.get(key, 0.0) + drawn * percent / total

    def keep(self, containers: Iterable[str]) -> None:
        """Forget all containers but these.

        Args:
            containers: bundles.
        """
        kept = frozenset(containers)
        self._sums = {key: joules for key, joules in self._sums.items() if key[0] in kept}

    def joules(self, container: str, gpu: str) -> float:
        """What a container has used of a GPU's energy."""
        return self._sums.get((container, gpu), 0.0)
