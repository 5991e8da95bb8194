"""Find containers over their GPU memory limit, and devices whose memory is full.

Rules
- The operator's limit (``gpu-memory`` in ``[guard]`` of config.toml) applies to devices that
  several containers hold: the only holder of a device takes memory from no other container.
- A pod's own limit (the annotation :data:`ANNOTATION`) applies to every device of its containers.
  If both apply, the smaller one counts, so no pod can raise its limit.
- A share from a resource claim limits the container on the GPU of that share; several shares are
  added up (:mod:`.shares`).
- A container's use of a device is the sum that NVML reports for its processes. A process that NVML
  does not report counts as zero.
- A device is full if less than :data:`FREE` of its memory is free. A refused allocation is not
  visible, so a fault for full memory is never certain.

No I/O. Amounts are bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

from api.values import dataclass
from integration.containers.bundles import Container
from integration.node.faults.fault_log import GPU_MEMORY
from integration.node.faults.hits import Hit
from integration.node.holders.values import DeviceUse, Ledger
from integration.nvml.values import DeviceSample, GpuSample, Sample
from shim.causes.record import Fault, Whose

ANNOTATION: Final = "io.containerd.nvidia.v1.gpu-memory-limit"
"""A pod's own limit: "8Gi" or "8GiB", "512Mi", "25%"."""

MEMORY_LIMIT: Final = "memory-limit"
FREE: Final = 0.02

_LIMIT: Final = re.compile(r"([1-9][0-9]{0,6})(Mi|Gi|MiB|GiB|%)", re.ASCII)
_UNITS: Final = {"M": 1 << 20, "G": 1 << 30}
_WHOLE: Final = 100


@dataclass(frozen=True, slots=True)
class Limit:
    """How much of a device's memory one container may use."""

    amount: int  # bytes, or percent of the device's memory
    is_percent: bool = False

    def of(self, total: int | None) -> int | None:
        """Return the limit in bytes; None if unknown.

        Args:
            total: the device's memory in bytes; None if unknown.
        """
        if not self.is_percent:
            return self.amount
        return None if total is None else total * self.amount // _WHOLE


def parse_limit(text: str) -> Limit | None:
    """Parse the limit in a file or annotation; None if it is invalid."""
    found = _LIMIT.fullmatch(text.strip())
    if found is None:
        return None
    amount, unit = int(found[1]), found[2]
    if unit == "%":
        return Limit(amount, is_percent=True) if amount <= _WHOLE else None
    return Limit(amount * _UNITS[unit[0]])


@dataclass(frozen=True, slots=True)
class Excess:
    """A container over its limit."""

    container: Container
    device: str  # UUID of the GPU or MIG device
    gpu: str  # UUID of the device's GPU
    used: int  # bytes
    limit: int  # bytes

    def hit(self, at: float, done: str = "") -> Hit:
        """Return the fault to report to the container.

        Args:
            at: when it was seen, in seconds since the epoch.
            done: the action taken; "" for none.
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
    """Format an amount of memory in GiB."""
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
    """Return the containers over their limit.

    Args:
        uses: each container's use according to the sample.
        limit: the operator's limit; None for none.
        own: the pods' own limits, by the container's bundle.
        shares: bytes of the container's shares, by its bundle and the device's UUID.
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
    """Return the containers whose device has no memory left.

    Args:
        uses: each container's use according to the sample.
        at: when the sample was taken, in seconds since the epoch.
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
    """Return the GPU of each MIG device, by UUID."""
    return {part.uuid: gpu.uuid for gpu in sample.gpus for part in gpu.mig}
