"""Attribute the energy of each GPU to the containers that use it.

Rules
- The energy that a GPU used between two samples is divided by the SM utilisation of each container
  in the later sample. Energy of an idle GPU is attributed to no container, and neither is the
  energy before the first sample.
- Processes outside containers take their share, so that containers are not charged for it.
- On a MIG GPU NVML reports no utilisation of processes, so energy is unknown there.
- A counter that decreases (the driver was reloaded) starts again. A container's total never
  decreases; it is dropped when the container is gone.
- Each sample counts once, even if it is read several times.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from integration.nvml.values import Sample

# In seconds. If two samples are further apart, the later one describes only this much of the
# interval, and the energy of the rest cannot be attributed.
_LONGEST: Final = 120.0


class Meter:
    """The energy used so far, by container (its bundle) and GPU."""

    def __init__(self) -> None:
        self._when = 0.0
        self._before: dict[str, tuple[float, float]] = {}
        self._sums: dict[tuple[str, str], float] = {}

    def update(self, sample: Sample, busy: Mapping[tuple[str, str], int]) -> None:
        """Attribute the energy used since the previous sample.

        Args:
            busy: the SM utilisation in percent, by container ("" for processes outside containers)
                and GPU, where it is known.
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
            used = gpu.energy_joules - joules
            shares = {
                container: percent
                for (container, uuid), percent in busy.items()
                if uuid == gpu.uuid and percent > 0
            }
            total = sum(shares.values())
            if used <= 0 or not total:
                continue
            used *= _LONGEST / max(sample.when - when, _LONGEST)
            for container, percent in shares.items():
                if container:
                    key = (container, gpu.uuid)
                    self._sums[key] = self._sums.get(key, 0.0) + used * percent / total

    def keep(self, containers: Iterable[str]) -> None:
        """Drop the energy of all containers except these.

        Args:
            containers: the bundles of the containers to keep.
        """
        kept = frozenset(containers)
        self._sums = {key: joules for key, joules in self._sums.items() if key[0] in kept}

    def joules(self, container: str, gpu: str) -> float:
        """Return the energy that a container has used of a GPU, in joules."""
        return self._sums.get((container, gpu), 0.0)
