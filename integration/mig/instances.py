"""Bring a GPU to a given partition with nvidia-smi. The calls block.

::

    NVML ─▶ nvidia-smi mig -dci, -dgi ─▶ nvidia-smi -mig ─▶ --gpu-reset ─▶ mig -cgi, -cci ─▶ NVML
            what is not wanted           if the mode        if the mode    what is missing
                                         differs            is pending

Rules
- Only NVML's answer counts, before and after: the output of nvidia-smi is meant for people, and it
  also exits with 0 if it has switched nothing.
- Steps that are already done are skipped. So the same call continues one that was killed, and a
  call with the previous partition undoes it.
- A GPU instance that lacks only compute instances gets them. This is needed to undo a step: if an
  instance is in use, its compute instances may be destroyed although the instance itself cannot be.
- All our processes close NVML before MIG mode is switched or a GPU is reset
  (:mod:`integration.nvml.lock`).

Source: NVIDIA's MIG user guide; nvidia-smi(1), nvidia-smi mig -h.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final

from hooks.config import Config
from hooks.node.driver import Driver
from hooks.node.gpus import Gpu
from integration.mig.profiles import ProfileName
from integration.mig.state import Cut, Partition, partition_of
from integration.nvml.mig_parts import GpuParts, Instance, ask_parts
from integration.nvml.nvidia_smi import SmiFailed, run_alone, run_nvidia_smi
from integration.timeouts import PATIENCE

__all__ = ["Instances"]

# The driver's numbers of compute instance profiles, by their slices (nvmlComputeInstanceProfile).
_COMPUTE_PROFILES: Final = {1: 0, 2: 1, 3: 2, 4: 3, 7: 4, 8: 5, 6: 6}
_TO_ACT: Final = 30.0 * PATIENCE
_TO_RESET: Final = 180.0 * PATIENCE


class Instances:
    """Creates and destroys the instances of GPUs.

    Args:
        config: where the driver is.
        driver: the driver whose nvidia-smi is used.
        say: receives a line before each step.
    """

    def __init__(self, config: Config, driver: Driver, say: Callable[[str], None]) -> None:
        self._config = config
        self._driver = driver
        self._say = say

    def reach(self, gpu: Gpu, wanted: Partition) -> None:
        """Bring a GPU to a partition, and check the result.

        Raises:
            SmiFailed: a step failed.
        """
        parts, now = self._now(gpu)
        instances = {(each.start, each.profile): each for each in parts.instances}
        there = {(cut.start, cut.profile): Counter(cut.computes) for cut in now.cuts}
        for cut in sorted(now.cuts - wanted.cuts):
            if not any(_is_part(cut, each) for each in wanted.cuts):
                del there[cut.start, cut.profile]
                self._destroy(gpu, cut, instances[cut.start, cut.profile])
        if (parts.mode, parts.pending) != (wanted.mode, wanted.mode):
            self._switch(gpu, on=wanted.mode)
        whole = {each.id: _slices(each.name) for each in parts.profiles}
        for cut in sorted(wanted.cuts - now.cuts):
            is_whole = cut.computes == (whole.get(cut.profile),)
            has = there.get((cut.start, cut.profile))
            if has is None:
                self._create(gpu, cut, *["-C"] * is_whole)
            if has is not None or not is_whole:
                lacking = Counter(cut.computes) - (has or Counter())
                self._fill(gpu, cut, () if is_whole else lacking.elements())
        if self._now(gpu)[1] != wanted:
            raise SmiFailed("nvidia-smi succeeded, but NVML lists other instances than were made")

    def _now(self, gpu: Gpu) -> tuple[GpuParts, Partition]:
        parts = ask_parts(self._config)
        if gpu.uuid not in parts.gpus:
            raise SmiFailed("NVML does not list it")
        return parts.gpus[gpu.uuid], partition_of(parts, gpu.uuid)

    def _destroy(self, gpu: Gpu, cut: Cut, instance: Instance) -> None:
        self._say(f"GPU {gpu.index}: destroys the instance {instance.id}, {_title(cut)}")
        where = ("mig", "-i", gpu.uuid, "-gi", str(instance.id))
        if cut.computes:
            self._smi(*where, "-dci")
        self._smi(*where, "-dgi")

    def _create(self, gpu: Gpu, cut: Cut, *more: str) -> None:
        self._say(f"GPU {gpu.index}: creates an instance, {_title(cut)}")
        self._smi("mig", "-i", gpu.uuid, "-cgi", f"{cut.profile}:{cut.start}", *more)

    def _fill(self, gpu: Gpu, cut: Cut, computes: Iterable[int]) -> None:
        """Create compute instances in a GPU instance; by default the one that fills it."""
        profiles = [str(_COMPUTE_PROFILES.get(each, each)) for each in sorted(computes)[::-1]]
        for instance in self._now(gpu)[0].instances:
            if (instance.start, instance.profile) == (cut.start, cut.profile) and cut.computes:
                where = ("mig", "-i", gpu.uuid, "-gi", str(instance.id))
                self._smi(*where, "-cci", *filter(None, [",".join(profiles)]))

    def _switch(self, gpu: Gpu, *, on: bool) -> None:
        self._say(f"GPU {gpu.index}: switches MIG mode {'on' if on else 'off'}")
        mode = ["-i", gpu.bus_id, "-mig", str(int(on))]
        said = run_alone(self._driver, self._config, mode, _TO_ACT)
        parts, _ = self._now(gpu)
        if parts.mode is not on and parts.pending is on:
            self._say(f"GPU {gpu.index}: resets it, which its MIG mode needs")
            reset = ["--gpu-reset", "-i", gpu.bus_id]
            said = run_alone(self._driver, self._config, reset, _TO_RESET)
            parts, _ = self._now(gpu)
        if parts.mode is not on:
            raise SmiFailed(f"its MIG mode has not changed: {said}")

    def _smi(self, *arguments: str) -> None:
        run_nvidia_smi(self._driver, self._config, arguments, _TO_ACT, ends_with_us=True)


def _slices(name: str) -> int | None:
    """Return how many compute slices fill a GPU instance, by its profile's name."""
    parsed = ProfileName.parse(name)
    return None if parsed is None else parsed.slices


def _is_part(cut: Cut, wanted: Cut) -> bool:
    """Return whether a GPU instance lacks only compute instances that are wanted."""
    is_same = (cut.start, cut.profile) == (wanted.start, wanted.profile)
    return is_same and Counter(cut.computes) <= Counter(wanted.computes)


def _title(cut: Cut) -> str:
    return f"profile {cut.profile} at slice {cut.start}"
