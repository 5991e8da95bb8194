"""Metrics of containers that hold devices, and of other processes that use devices.

Containers of the same name count as one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final

from integration.containers.bundles import Container
from integration.node.holders.values import DeviceUse, Holding
from integration.node.services.metrics.gpus import ratio
from integration.node.services.metrics.metric import CONTAINER, DEVICE, Group, Metric, Rows, single
from integration.node.services.metrics.snapshot import Labels, Snapshot


def _name(container: Container) -> Labels:
    pod, name = container.pod, container.name or container.id
    return ("", "", name) if pod is None else (pod.namespace, pod.name, name)


def _infos(snapshot: Snapshot) -> Rows:
    containers = [each.container for each in snapshot.state.ledger.value.holdings]
    return {
        (*_name(each), each.id, each.namespace, each.pod.uid if each.pod else ""): 1
        for each in containers
    }


def _flag(name: str, meaning: str, flag: Callable[[Holding], str]) -> Metric:
    """Return a metric that is 1 if the flag is set for any container of a name."""

    def rows(snapshot: Snapshot) -> Rows:
        flags: dict[Labels, bool] = {}
        for each in snapshot.state.ledger.value.holdings:
            labels = _name(each.container)
            flags[labels] = flags.get(labels, False) or bool(flag(each))
        return flags

    return Metric(name, meaning, CONTAINER, rows)


def _missing(snapshot: Snapshot) -> Rows:
    ledger = snapshot.state.ledger.value
    missing = Counter((each.namespace, each.pod, each.container) for each in ledger.missing)
    return {_name(each.container): 0 for each in ledger.holdings} | missing


def _devices(snapshot: Snapshot) -> Rows:
    return {
        (*_name(each.container), *snapshot.names.of(uuid)): 1
        for each in snapshot.state.ledger.value.holdings
        for uuid in each.devices
    }


def _inside(name: str, meaning: str, value: Callable[[DeviceUse], float | None]) -> Metric:
    """Return a metric that adds up the use of each device by containers of a name."""

    def rows(snapshot: Snapshot) -> Rows:
        sums: dict[Labels, float] = {}
        for use in snapshot.state.usage.value if snapshot.answered else ():
            amount = value(use)
            if use.holding is not None and amount is not None:
                labels = (*_name(use.holding.container), *snapshot.names.of(use.device))
                sums[labels] = sums.get(labels, 0) + amount
        return sums

    return Metric(name, meaning, (*CONTAINER, *DEVICE), rows)


def _outside(name: str, meaning: str, value: Callable[[DeviceUse], float | None]) -> Metric:
    """Return a metric of the use of each device by processes in no container."""

    def rows(snapshot: Snapshot) -> Rows:
        usage = snapshot.state.usage.value if snapshot.answered else ()
        uses = [use for use in usage if use.holding is None]
        return {snapshot.names.of(use.device): value(use) for use in uses}

    return Metric(name, meaning, DEVICE, rows)


CONTAINERS: Final = Group("Containers", (
    Metric("nvshim_container_info", "A container that holds a device.",
           (*CONTAINER, "container_id", "runtime_namespace", "pod_uid"), _infos),
    _flag("nvshim_container_stale",
          "Whether it was created with a driver or devices that are gone: drain its pod.",
          lambda holding: holding.stale),
    _flag("nvshim_container_orphan",
          "Whether it holds a device, and nothing seems to manage it any longer.",
          lambda holding: holding.orphan),
    Metric("nvshim_container_devices_missing",
           "Devices that the kubelet has allocated to it and that it lacks.", CONTAINER, _missing),
    Metric("nvshim_container_device_info", "A device that a container holds.",
           (*CONTAINER, *DEVICE), _devices),
    _inside("nvshim_container_gpu_memory_used_bytes",
            "Memory of the device that the container uses.", lambda use: use.memory_bytes),
    _inside("nvshim_container_gpu_sm_utilization_ratio",
            "Share of the time in which kernels of the container ran.",
            lambda use: ratio(use.sm_percent)),
    _inside("nvshim_container_gpu_memory_busy_ratio",
            "Share of the time in which the container read or wrote the device's memory.",
            lambda use: ratio(use.memory_percent)),
    _inside("nvshim_container_gpu_encoder_utilization_ratio",
            "Share of the time in which the encoder worked for the container.",
            lambda use: ratio(use.encoder_percent)),
    _inside("nvshim_container_gpu_decoder_utilization_ratio",
            "Share of the time in which the decoder worked for the container.",
            lambda use: ratio(use.decoder_percent)),
    _inside("nvshim_container_gpu_energy_joules_total",
            "The container's share of the device's energy since the agent started to measure.",
            lambda use: use.energy_joules),
    _inside("nvshim_container_gpu_processes", "Processes of the container that use the device.",
            lambda use: len(use.processes)),
    _outside("nvshim_outside_gpu_memory_used_bytes",
             "Memory of the device that processes of no known container use.",
             lambda use: use.memory_bytes),
    _outside("nvshim_outside_gpu_processes",
             "Processes of no known container that use the device.",
             lambda use: len(use.processes)),
    Metric("nvshim_container_faults_total",
           "Faults that hit containers since the agent started: the kind, the number of an Xid, "
           "and who caused it (device, host, neighbour, application, unclear).",
           ("kind", "xid", "whose"), lambda snapshot: snapshot.state.counters.faults),
    single("nvshim_containers_unreadable",
           "Containers whose devices the agent could not read.",
           lambda snapshot: len(snapshot.state.ledger.value.unknown)),
))  # fmt: skip
