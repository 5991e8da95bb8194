"""What each container uses of each GPU: NVML's processes, the containers' cgroups, the ledger.

Rules
- A process is whose its cgroup says (:mod:`integration.containers.cgroups`); one that is in no
  container's is nobody's, and listed so. So is one that was started after NVML had named its
  number: what the one before it used is not its.
- NVML lists a process once as computing and once as drawing; it is one process, with one memory.
- A container that holds a device and has no process on it uses nothing of it: that is said too. One
  that has a process on a device that it does not hold (a privileged one) is listed with it.
- What NVML does not say of any process is not known of the container; what it says of some is their
  sum. Percents are of the device, and at most 100.
- Nothing is asked unless somebody wants to know.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from integration.containers.cgroups import Owners
from integration.containers.procfs import Procfs
from integration.detached import run_detached
from integration.node.holders.energy import Meter
from integration.node.holders.values import DeviceUse, Holding, Ledger
from integration.node.values.service_name import ServiceName

if TYPE_CHECKING:
    from integration.containers.bundles import Container
    from integration.node.service import Context
    from integration.nvml.values import ProcessUse, Sample

# What is known of a process and of a container by the same names.
_AMOUNTS: Final = (
    "memory_bytes", "sm_percent", "memory_percent", "encoder_percent", "decoder_percent",
)  # fmt: skip


_SLACK: Final = 0.1  # seconds: a process's beginning is told in hundredths


async def usage_by(context: Context, sample: Sample) -> tuple[DeviceUse, ...]:
    """What each container uses of each device by a sample; it is published as well.

    Returns:
        An entry for each container and device, and one without a container for each device that
        has processes of none. If NVML does not answer, what is held, and nothing of its use.
    """
    ledger, meter = context.state.ledger.value, context.state.energy_meter
    owners = await run_detached(owners_of, sample, ledger.containers, "/proc")
    uses = usage_of(sample, ledger, owners, meter)
    context.state.usage.publisher(ServiceName.AGENT).publish(uses)
    return uses


def owners_of(
    sample: Sample, containers: Iterable[Container], proc: str
) -> Mapping[int, Container | None]:
    """Whose the processes of a sample are."""
    pids = {process.pid for process in sample.processes}
    if not pids:
        return {}
    procfs = Procfs(proc)
    owners = Owners(containers, procfs)
    return {pid: owners.of(pid) if _is_it(procfs, pid, sample.when) else None for pid in pids}


def _is_it(procfs: Procfs, pid: int, when: float) -> bool:
    """Whether a process was there at a time, in seconds since boot, as far as that is known."""
    status = procfs.status(pid)
    return status is None or status.started_since_boot <= when + _SLACK


def usage_of(
    sample: Sample, ledger: Ledger, owners: Mapping[int, Container | None], meter: Meter
) -> tuple[DeviceUse, ...]:
    """What each container uses, with its share of energy.

    Args:
        meter: of energy; this sample is counted.
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
    """What each container uses of each device.

    Args:
        owners: whose each process is; one that is not there is nobody's.

    Returns:
        By container and device; those of no container come last.
    """
    holdings = {each.container.bundle: each for each in ledger.holdings}
    found: dict[tuple[str, str], dict[int, ProcessUse]] = {
        (each.container.bundle, device): {} for each in ledger.holdings for device in each.devices
    }
    for process in sample.processes:
        owner = owners.get(process.pid)
        if owner is not None:
            holdings.setdefault(owner.bundle, Holding(owner, ()))
        processes = found.setdefault((owner.bundle if owner else "", process.device), {})
        processes[process.pid] = _greater(process, processes.get(process.pid, process))
    uses = [
        _use(holdings.get(bundle), device, processes, sample)
        for (bundle, device), processes in found.items()
    ]
    return tuple(sorted(uses, key=_order))


def _order(use: DeviceUse) -> tuple[bool, str, str, str]:
    if use.holding is None:
        return True, "", "", use.device
    container = use.holding.container
    return False, container.namespace, container.id, use.device


def _greater(one: ProcessUse, other: ProcessUse) -> ProcessUse:
    """Of what NVML says twice of a process, the greater."""
    amounts: dict[str, Any] = {}
    for name in _AMOUNTS:
        both = (getattr(one, name), getattr(other, name))
        amounts[name] = max((each for each in both if each is not None), default=None)
    return replace(one, **amounts)


def _use(
    holding: Holding | None, device: str, processes: Mapping[int, ProcessUse], sample: Sample
) -> DeviceUse:
    # Of MIG devices NVML knows nothing but memory, so a container without processes on one may
    # have used something else.
    is_whole = any(gpu.uuid == device and not (gpu.lost or gpu.mig) for gpu in sample.gpus)

    def total(name: str) -> int | None:
        if not processes:
            is_told = name == "memory_bytes" or is_whole
            return 0 if is_told and not sample.failure else None
        said = (getattr(process, name) for process in processes.values())
        known: list[int] = [each for each in said if each is not None]
        if not known:
            return None
        return sum(known) if name == "memory_bytes" else min(100, sum(known))

    return DeviceUse(
        holding, device, tuple(sorted(processes)), **{name: total(name) for name in _AMOUNTS}
    )
