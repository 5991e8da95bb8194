"""Metrics of the containers that hold devices, and of who uses devices without holding them.

Two containers of one name count as one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from integration.node.services.metrics.gpus import ratio
from integration.node.services.metrics.metric import CONTAINER, DEVICE, Family, Group, Rows, single
from integration.node.services.metrics.snapshot import Labels, Moment

if TYPE_CHECKING:
    from integration.containers.bundles import Container
    from integration.node.holders.values import DeviceUse, Holding


def _name(container: Container) -> Labels:
    pod, name = container.pod, container.name or container.id
    return ("", "", name) if pod is None else (pod.namespace, pod.name, name)


def _infos(moment: Moment) -> Rows:
    found = [each.container for each in moment.state.ledger.value.holdings]
    return {(*_name(each), each.id, each.namespace): 1 for each in found}


def _flag(name: str, meaning: str, flag: Callable[[Holding], str]) -> Family:
    """Whether something is so of any container of a name."""

    def rows(moment: Moment) -> Rows:
        found: dict[Labels, bool] = {}
        for each in moment.state.ledger.value.holdings:
            labels = _name(each.container)
            found[labels] = found.get(labels, False) or bool(flag(each))
        return found

    return Family(name, meaning, CONTAINER, rows)


def _missing(moment: Moment) -> Rows:
    missing = Counter((m.namespace, m.pod, m.container) for m in moment.state.ledger.value.missing)
    return {_name(each.container): 0 for each in moment.state.ledger.value.holdings} | missing


def _devices(moment: Moment) -> Rows:
    return {
        (*_name(each.container), *moment.names.of(uuid)): 1
        for each in moment.state.ledger.value.holdings
        for uuid in each.devices
    }


def _inside(name: str, meaning: str, value: Callable[[DeviceUse], float | None]) -> Family:
    """The sum of what containers of a name use of each device."""

    def rows(moment: Moment) -> Rows:
        sums: dict[Labels, float] = {}
        for use in moment.state.usage.value if moment.answered else ():
            amount = value(use)
            if use.holding is not None and amount is not None:
                labels = (*_name(use.holding.container), *moment.names.of(use.device))
                sums[labels] = sums.get(labels, 0) + amount
        return sums

    return Family(name, meaning, (*CONTAINER, *DEVICE), rows)


def _outside(name: str, meaning: str, value: Callable[[DeviceUse], float | None]) -> Family:
    """What processes of no container use of each device."""

    def rows(moment: Moment) -> Rows:
        uses = [use for use in moment.state.usage.value if use.holding is None and moment.answered]
        return {moment.names.of(use.device): value(use) for use in uses}

    return Family(name, meaning, DEVICE, rows)


CONTAINERS: Final = Group("Containers", (
    Family("nvshim_container_info", "A container that holds a device.",
           (*CONTAINER, "container_id", "runtime_namespace"), _infos),
    _flag("nvshim_container_stale",
          "Whether it was made with a driver or devices that are no more: drain its pod.",
          lambda holding: holding.stale),
    _flag("nvshim_container_orphan",
          "Whether it holds a device and nobody seems to know of it any more.",
          lambda holding: holding.orphan),
    Family("nvshim_container_devices_missing",
           "How many devices the kubelet has given it that it runs without.", CONTAINER, _missing),
    Family("nvshim_container_device_info", "A device that a container holds.",
           (*CONTAINER, *DEVICE), _devices),
    _inside("nvshim_container_gpu_memory_used_bytes",
            "How much of the device's memory the container uses.", lambda use: use.memory_bytes),
    _inside("nvshim_container_gpu_sm_utilization_ratio",
            "Of the time, how long kernels of the container ran.",
            lambda use: ratio(use.sm_percent)),
    _inside("nvshim_container_gpu_memory_busy_ratio",
            "Of the time, how long the container read or wrote the device's memory.",
            lambda use: ratio(use.memory_percent)),
    _inside("nvshim_container_gpu_encoder_utilization_ratio",
            "Of the time, how long the encoder worked for the container.",
            lambda use: ratio(use.encoder_percent)),
    _inside("nvshim_container_gpu_decoder_utilization_ratio",
            "Of the time, how long the decoder worked for the container.",
            lambda use: ratio(use.decoder_percent)),
    _inside("nvshim_container_gpu_energy_joules_total",
            "The container's share of what the device has drawn since it is watched.",
            lambda use: use.energy_joules),
    _inside("nvshim_container_gpu_processes", "How many processes of the container use the device.",
            lambda use: len(use.processes)),
    _outside("nvshim_outside_gpu_memory_used_bytes",
             "Memory of the device that processes of no known container use.",
             lambda use: use.memory_bytes),
    _outside("nvshim_outside_gpu_processes",
             "How many processes of no known container use the device.",
             lambda use: len(use.processes)),
    Family("nvshim_container_faults_total",
           "Faults that containers had to do with, since the agent began: the kind, the number of "
           "an Xid, and whose fault it was (device, host, neighbour, application, unclear).",
           ("kind", "xid", "whose"), lambda moment: moment.state.counters.faults),
    single("nvshim_containers_unreadable",
           "How many containers there are of which it is not known what they hold.",
           lambda moment: len(moment.state.ledger.value.unknown)),
))  # fmt: skip
