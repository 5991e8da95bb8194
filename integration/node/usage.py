"""Compute the GPU use of each container from NVML's processes, cgroups and the ledger.

Rules
- A process belongs to the container of its cgroup (:mod:`integration.containers.cgroups`). A
  process outside containers is listed without a container. So is a process that started after NVML
  reported its id: the kernel has reused the id, and the usage was that of an earlier process.
- NVML lists a process once for compute and once for graphics. It counts as one process.
- A container without a process on its device is listed with no use. A privileged container with a
  process on a device that it does not hold is listed with that device.
- A figure is the sum over the container's processes for which NVML reports it. It is unknown if
  NVML reports it for none of them. Percentages are of the device, and at most 100.
- The caller samples NVML, and only on demand.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from integration.containers.bundles import Container
from integration.containers.owners import Owners
from integration.containers.procfs import Procfs
from integration.detached import run_detached
from integration.node.holders.energy import Meter
from integration.node.holders.values import DeviceUse, Holding, Ledger
from integration.node.service import Context
from integration.node.values.service_name import ServiceName
from integration.nvml.values import ProcessUse, Sample

# Fields that ProcessUse and DeviceUse have in common.
_AMOUNTS: Final = (
    "memory_bytes", "sm_percent", "memory_percent", "encoder_percent", "decoder_percent",
)  # fmt: skip


_SLACK: Final = 0.1  # seconds: the kernel rounds a process's start to hundredths


async def usage_by(context: Context, sample: Sample) -> tuple[DeviceUse, ...]:
    """Return what each container uses of each device in a sample, and publish it as ``usage``.

    Returns:
        An entry for each container and device, and one without a container for each device with
        processes outside of containers. If NVML did not answer, the entries have no figures.
    """
    state = context.state
    ledger, meter = state.ledger.value, state.energy_meter
    owners = await run_detached(owners_of, sample, ledger.containers, "/proc")
    uses = usage_of(sample, ledger, owners, meter)
    state.usage.publisher(ServiceName.AGENT).publish(uses)
    return uses


def owners_of(
    sample: Sample, containers: Iterable[Container], proc: str
) -> Mapping[int, Container | None]:
    """Return the container of each process of a sample, by process id."""
    pids = {process.pid for process in sample.processes}
    if not pids:
        return {}
    procfs = Procfs(proc)
    owners = Owners(containers, procfs)
    return {pid: owners.of(pid) if _is_same(procfs, pid, sample.when) else None for pid in pids}


def _is_same(procfs: Procfs, pid: int, when: float) -> bool:
    """Return whether the process with that id was running at a time, in seconds since boot."""
    status = procfs.status(pid)
    return status is None or status.existed_at(when, _SLACK)


def usage_of(
    sample: Sample, ledger: Ledger, owners: Mapping[int, Container | None], meter: Meter
) -> tuple[DeviceUse, ...]:
    """Return what each container uses, with its energy.

    Args:
        meter: adds up the energy, including that of this sample.
    """
    uses = join(sample, ledger, owners)
    known = {gpu.uuid for gpu in sample.gpus}
    busy = {
        (use.holding.container.bundle if use.holding else "", use.device): use.sm_percent
        for use in uses
        if use.device in known and use.sm_percent is not None
    }
    meter.update(sample, busy)
    meter.keep(container.bundle for container in ledger.containers)
    metered = {gpu.uuid for gpu in sample.gpus if gpu.energy_joules is not None and not gpu.mig}
    return tuple(
        replace(use, energy_joules=meter.joules(use.holding.container.bundle, use.device))
        if use.holding is not None and use.device in metered
        else use
        for use in uses
    )


def join(
    sample: Sample, ledger: Ledger, owners: Mapping[int, Container | None]
) -> tuple[DeviceUse, ...]:
    """Return what each container uses of each device.

    Args:
        owners: the container of each process; a process that is missing here is in none.

    Returns:
        Sorted by container and device; processes without a container come last.
    """
    holdings = {each.container.bundle: each for each in ledger.holdings}
    by_device: dict[tuple[str, str], dict[int, ProcessUse]] = {
        (each.container.bundle, device): {} for each in ledger.holdings for device in each.devices
    }
    for process in sample.processes:
        owner = owners.get(process.pid)
        if owner is not None:
            holdings.setdefault(owner.bundle, Holding(owner, ()))
        processes = by_device.setdefault((owner.bundle if owner else "", process.device), {})
        processes[process.pid] = _greater(process, processes.get(process.pid, process))
    uses = [
        _use(holdings.get(bundle), device, processes, sample)
        for (bundle, device), processes in by_device.items()
    ]
    return tuple(sorted(uses, key=_order))


def _order(use: DeviceUse) -> tuple[bool, str, str, str]:
    if use.holding is None:
        return True, "", "", use.device
    container = use.holding.container
    return False, container.namespace, container.id, use.device


def _greater(one: ProcessUse, other: ProcessUse) -> ProcessUse:
    """Merge two entries of NVML for one process: the greater figures count."""
    amounts: dict[str, Any] = {}
    for name in _AMOUNTS:
        both = (getattr(one, name), getattr(other, name))
        amounts[name] = max((each for each in both if each is not None), default=None)
    return replace(one, **amounts)


def _use(
    holding: Holding | None, device: str, processes: Mapping[int, ProcessUse], sample: Sample
) -> DeviceUse:
    # For MIG devices NVML reports only memory. So the other use of one by a container without
    # processes is unknown, not 0.
    is_whole = any(gpu.uuid == device and not (gpu.lost or gpu.mig) for gpu in sample.gpus)

    def total(name: str) -> int | None:
        if not processes:
            is_reported = name == "memory_bytes" or is_whole
            return 0 if is_reported and not sample.failure else None
        figures = (getattr(process, name) for process in processes.values())
        known: list[int] = [each for each in figures if each is not None]
        if not known:
            return None
        return sum(known) if name == "memory_bytes" else min(100, sum(known))

    return DeviceUse(
        holding, device, tuple(sorted(processes)), **{name: total(name) for name in _AMOUNTS}
    )
