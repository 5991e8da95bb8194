"""What each container uses of each GPU: NVML's processes, the containers' cgroups, the ledger.

Rules
- A process is whose its cgroup says (:mod:`integration.node.ledger.cgroups`); one that is in no
  container's is nobody's, and listed so.
- NVML lists a process once as computing and once as drawing; it is one process, with one memory.
- A container that holds a device and has no process on it uses nothing of it: that is said too. One
  that has a process on a device that it does not hold (a privileged one) is listed with it.
- What NVML does not say of any process is not known of the container; what it says of some is their
  sum. Percents are of the device, and at most 100.
- Nothing is asked unless somebody wants to know.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio.to_thread

from integration.inspection.procfs import Procfs
from integration.node.ledger.cgroups import Owners
from integration.node.ledger.values import DeviceUse, Holding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from integration.inspection.bundles import Container
    from integration.node.ledger.energy import Meter
    from integration.node.ledger.values import Ledger
    from integration.node.monitor.values import ProcessUse, Sample
    from integration.node.parts import Context

__all__ = ["join", "merged", "owners_of", "usage", "usage_by", "usage_of"]


async def usage(context: Context, max_age: float) -> tuple[DeviceUse, ...]:
    """What each container uses of each device now; it is posted on the board as well.

    Args:
        context: the agent's.
        max_age: seconds that NVML's answer may be old.

    Returns:
        An entry for each container and device, and one without a container for each device that
        has processes of none. If NVML does not answer, what is held, and nothing of its use.
    """
    return await usage_by(context, await context.board.sampler.sample(max_age=max_age))


async def usage_by(context: Context, sample: Sample) -> tuple[DeviceUse, ...]:
    """What each container uses of each device, for one who has asked NVML already.

    Args:
        context: the agent's.
        sample: what NVML said.

    Returns:
        As :func:`usage`.
    """
    ledger, meter = context.board.ledger, context.board.energy
    owners = await anyio.to_thread.run_sync(
        owners_of, sample, ledger.containers, "/proc", abandon_on_cancel=True
    )
    uses = usage_of(sample, ledger, owners, meter)
    context.board.post(usage=uses)
    return uses


def owners_of(
    sample: Sample, containers: Iterable[Container], proc: str
) -> Mapping[int, Container | None]:
    """Whose the processes of a sample are.

    Args:
        sample: what NVML said.
        containers: those of the node.
        proc: where processes are shown.
    """
    pids = {process.pid for process in sample.processes}
    if not pids:
        return {}
    owners = Owners(containers, Procfs(proc))
    return {pid: owners.of(pid) for pid in pids}


def usage_of(
    sample: Sample, ledger: Ledger, owners: Mapping[int, Container | None], meter: Meter
) -> tuple[DeviceUse, ...]:
    """What each container uses, with its share of energy.

    Args:
        sample: what NVML said.
        ledger: who holds what.
        owners: whose each process is.
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
        _with_energy(use, meter.joules(use.holding.container.bundle, use.device))
        if use.holding is not None and use.device in metered
        else use
        for use in uses
    )


def _with_energy(use: DeviceUse, joules: float) -> DeviceUse:
    fields = {name: getattr(use, name) for name in DeviceUse.__slots__}
    return DeviceUse(**{**fields, "energy_joules": joules})


def join(
    sample: Sample, ledger: Ledger, owners: Mapping[int, Container | None]
) -> tuple[DeviceUse, ...]:
    """What each container uses of each device.

    Args:
        sample: what NVML said.
        ledger: who holds what.
        owners: whose each process is; one that is not there is nobody's.

    Returns:
        By container and device; those of no container come last.
    """
    holdings = {each.container.bundle: each for each in ledger.holdings}
    found: dict[tuple[str, str], list[ProcessUse]] = {}
    for holding in ledger.holdings:
        for device in holding.devices:
            found[holding.container.bundle, device] = []
    for process in merged(sample.processes):
        owner = owners.get(process.pid)
        if owner is not None:
            holdings.setdefault(owner.bundle, Holding(owner, ()))
        found.setdefault((owner.bundle if owner else "", process.device), []).append(process)
    says = _Says.of(sample)
    uses = [
        _use(holdings.get(bundle), device, processes, says)
        for (bundle, device), processes in found.items()
    ]
    return tuple(sorted(uses, key=_order))


def _order(use: DeviceUse) -> tuple[bool, str, str, str]:
    if use.holding is None:
        return True, "", "", use.device
    container = use.holding.container
    return False, container.namespace, container.id, use.device


@dataclass(frozen=True, slots=True)
class _Says:
    """What NVML tells at all, so that a container without processes is known to use nothing."""

    answers: bool
    wholes: frozenset[str]

    @classmethod
    def of(cls, sample: Sample) -> _Says:
        wholes = frozenset(gpu.uuid for gpu in sample.gpus if not gpu.lost and not gpu.mig)
        return cls(not sample.failure, wholes)


def merged(processes: Iterable[ProcessUse]) -> list[ProcessUse]:
    """Each process once for each device: of what NVML says twice, the greater.

    Args:
        processes: as NVML lists them.
    """
    found: dict[tuple[int, str], ProcessUse] = {}
    for each in processes:
        key = (each.pid, each.device)
        known = found.get(key)
        found[key] = each if known is None else _united(known, each)
    return list(found.values())


_AMOUNTS = (
    "memory_bytes", "sm_percent", "memory_percent", "encoder_percent", "decoder_percent",
)  # fmt: skip


def _united(one: ProcessUse, other: ProcessUse) -> ProcessUse:
    amounts = {name: _known([getattr(one, name), getattr(other, name)], max) for name in _AMOUNTS}
    return type(one)(one.pid, one.device, one.kind, **amounts)


def _use(
    holding: Holding | None, device: str, processes: list[ProcessUse], says: _Says
) -> DeviceUse:
    def total(name: str) -> int | None:
        if not processes:
            # Of MIG devices NVML knows nothing but memory.
            is_told = name == "memory_bytes" or device in says.wholes
            return 0 if says.answers and is_told else None
        return _known([getattr(process, name) for process in processes], sum)

    def percent(name: str) -> int | None:
        value = total(name)
        return None if value is None else min(100, value)

    return DeviceUse(
        holding,
        device,
        tuple(sorted(process.pid for process in processes)),
        total("memory_bytes"),
        percent("sm_percent"),
        percent("memory_percent"),
        percent("encoder_percent"),
        percent("decoder_percent"),
    )


def _known(values: Iterable[int | None], unite: Callable[[list[int]], int]) -> int | None:
    known = [value for value in values if value is not None]
    return unite(known) if known else None
