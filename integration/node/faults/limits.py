"""How much of a GPU's memory a container may use, and who uses more; and whose memory is full.

Rules
- The operator's limit (``gpu-memory`` in ``[guard]`` of config.toml) counts on devices that several
  containers hold: who has a device alone takes nothing from anybody.
- A pod's own limit (the annotation :data:`ANNOTATION`) counts on every device of its containers.
  Where both do, the smaller one does: no pod can allow itself more.
- A share that a resource claim has given a container counts on the GPU of which it is one; several
  are added up (:mod:`.shares`).
- What a container uses of a device is the sum of what NVML says of its processes there. Who does
  not exceed the limit by what is known is not over it: a process of which NVML says nothing counts
  for nothing.
- A device's memory is full if less than :data:`FREE` of it is free. That an allocation was refused
  for it cannot be seen, so this is never sure; and a refused one may have asked for more than that.

Pure. Amounts are bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from integration.node.faults.fault_log import GPU_MEMORY
from integration.node.faults.hits import Hit
from integration.node.holders.values import DeviceUse, Ledger
from shim.causes.record import Fault, Whose

if TYPE_CHECKING:
    from integration.containers.bundles import Container
    from integration.nvml.values import DeviceSample, GpuSample, Sample

ANNOTATION: Final = "io.containerd.nvidia.v1.gpu-memory-limit"
"""A pod's own limit: "8Gi" or "8GiB", "512Mi", "25%"."""

MEMORY_LIMIT: Final = "memory-limit"
FREE: Final = 0.02

_LIMIT: Final = re.compile(r"([1-9][0-9]{0,6})(Mi|Gi|MiB|GiB|%)", re.ASCII)
_UNITS: Final = {"M": 1 << 20, "G": 1 << 30}
_WHOLE: Final = 100


@dataclass(frozen=True, slots=True)
class Limit:
    """How much of a device one container may use."""

    amount: int  # bytes, or percent
    is_percent: bool = False  # whether it is the latter, of the device's memory

    def of(self, total: int | None) -> int | None:
        """The limit in bytes; None if it cannot be known.

        Args:
            total: the device's memory; None if that is not known.
        """
        if not self.is_percent:
            return self.amount
        return None if total is None else total * self.amount // _WHOLE


def parse_limit(text: str) -> Limit | None:
    """A limit, as a file or an annotation has it; None if it is none."""
    found = _LIMIT.fullmatch(text.strip())
    if found is None:
        return None
    amount, unit = int(found[1]), found[2]
    if unit == "%":
        return Limit(amount, is_percent=True) if amount <= _WHOLE else None
    return Limit(amount * _UNITS[unit[0]])


@dataclass(frozen=True, slots=True)
class Excess:
    """A container that uses more than it may."""

    container: Container  # which
    device: str  # UUID of the GPU or MIG device
    gpu: str  # UUID of that one's GPU
    used: int  # how much it uses
    limit: int  # how much it may

    def hit(self, at: float, done: str = "") -> Hit:
        """What it is told.

        Args:
            at: when that was seen, in seconds since the epoch.
            done: what was done about it; "" for nothing.
        """
        name = f"{gibibytes(self.used)} of GPU memory, over its limit of {gibibytes(self.limit)}"
        fault = Fault(
            at,
            MEMORY_LIMIT,
            name=f"{name}, {done}" if done else name,
            gpu=self.gpu,
            mig=self.device if self.device != self.gpu else "",
            whose=Whose.APPLICATION,
            sure=True,
        )
        return Hit(self.container, fault)


def gibibytes(amount: int) -> str:
    """An amount of memory for people."""
    return f"{amount / (1 << 30):.1f} GiB"


def excesses(
    sample: Sample,
    uses: Iterable[DeviceUse],
    ledger: Ledger,
    limit: Limit | None,
    own: Mapping[str, Limit],
    *,
    shares: Mapping[str, Mapping[str, int]] | None = None,
) -> tuple[Excess, ...]:
    """Who uses more memory than it may.

    Args:
        uses: what each container uses, by that sample.
        limit: the operator's; None for none.
        own: pods' own limits, by the bundle of the container.
        shares: bytes of the shares that it has of a device, by its bundle and the device's UUID.
    """
    totals = {each.uuid: each.memory_total_bytes for each in _devices(sample)}
    gpus = _gpus(sample)
    found = []
    for use in uses:
        if use.holding is None or not use.memory_bytes:
            continue
        container = use.holding.container
        is_shared = len(ledger.holders(use.device)) > 1
        total = totals.get(use.device)
        limits = (limit if is_shared else None, own.get(container.bundle))
        share = (shares or {}).get(container.bundle, {}).get(use.device, 0)
        allowed = [n for each in limits if each is not None and (n := each.of(total)) is not None]
        allowed += [share] if share else []
        if allowed and use.memory_bytes > min(allowed):
            gpu = gpus.get(use.device, use.device)
            found.append(Excess(container, use.device, gpu, use.memory_bytes, min(allowed)))
    return tuple(found)


def full_memory(sample: Sample, uses: Iterable[DeviceUse], at: float) -> tuple[Hit, ...]:
    """Whose device has no memory left.

    Args:
        uses: what each container uses, by that sample.
        at: when it was so, in seconds since the epoch.
    """
    full = {
        each.uuid: (each.memory_used_bytes, each.memory_total_bytes)
        for each in _devices(sample)
        if each.memory_used_bytes is not None
        and each.memory_total_bytes is not None
        and each.memory_total_bytes - each.memory_used_bytes < FREE * each.memory_total_bytes
    }
    gpus = _gpus(sample)
    found = []
    for use in uses:
        if use.holding is None or use.device not in full:
            continue
        used, total = full[use.device]
        gpu = gpus.get(use.device, use.device)
        is_own = 2 * (use.memory_bytes or 0) >= used
        fault = Fault(
            at,
            GPU_MEMORY,
            name=f"GPU memory full: {gibibytes(used)} of {gibibytes(total)}",
            gpu=gpu,
            mig=use.device if use.device != gpu else "",
            whose=Whose.APPLICATION if is_own else Whose.NEIGHBOUR,
        )
        found.append(Hit(use.holding.container, fault))
    return tuple(found)


def _devices(sample: Sample) -> list[GpuSample | DeviceSample]:
    return [*sample.gpus, *(part for gpu in sample.gpus for part in gpu.mig)]


def _gpus(sample: Sample) -> dict[str, str]:
    """The GPU of each MIG device."""
    return {part.uuid: gpu.uuid for gpu in sample.gpus for part in gpu.mig}
