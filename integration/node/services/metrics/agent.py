"""Metrics of the agent itself, and of its device plugin."""

from __future__ import annotations

import platform
import resource
from collections import Counter
from collections.abc import Iterable
from typing import Final

from prometheus_client import PROCESS_COLLECTOR

from integration.node.mps.clients import MpsDaemon
from integration.node.services.metrics.metric import Group, Metric, Rows, single
from integration.node.services.metrics.snapshot import Labels, Snapshot
from integration.node.values.counters import FAILED, OK, REFUSED
from integration.node.values.health import HealthState
from shim import VERSION


def _driver(snapshot: Snapshot) -> Rows:
    node = snapshot.state.node.value
    cuda = node.inventory.cuda_version if node.inventory is not None else ""
    return {(node.driver, cuda): 1} if node.driver else {}


def _sampled_at(snapshot: Snapshot) -> float | None:
    return snapshot.at(snapshot.sample.when) if snapshot.sample and snapshot.answered else None


def _services(snapshot: Snapshot) -> Rows:
    faults = snapshot.state.faults.lines
    return {(name,): name not in faults for name in (*snapshot.services, *faults)}


def _restarts(snapshot: Snapshot) -> Rows:
    return {(name,): 0 for name in snapshot.services} | snapshot.state.counters.restarts


def own_process() -> dict[str, float]:
    """Return prometheus-client's values of this process, by the names of metrics."""
    read = PROCESS_COLLECTOR.collect()
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        **{sample.name: sample.value for metric in read for sample in metric.samples},
        "nvshim_children_cpu_seconds_total": round(ended.ru_utime + ended.ru_stime, 6),
    }


def _process(name: str, meaning: str) -> Metric:
    return single(name, meaning, lambda snapshot: snapshot.process.get(name))


AGENT: Final = Group("The agent", (
    Metric("nvshim_build_info", "The agent.", ("version", "python"),
           lambda _: {(VERSION, platform.python_version()): 1}),
    Metric("nvshim_driver_info", "The driver of this node; absent if there is none.",
           ("version", "cuda_version"), _driver),
    single("nvshim_nvml_up",
           "Whether NVML answered for this scrape; if not, metrics that need NVML are absent.",
           lambda snapshot: snapshot.answered),
    single("nvshim_nvml_sample_timestamp_seconds", "When NVML's values of this scrape were read.",
           _sampled_at),
    single("nvshim_nvml_sample_duration_seconds", "How long this scrape waited for NVML.",
           lambda snapshot: None if snapshot.sample is None else snapshot.waited),
    single("nvshim_nvml_disbelieved", "Impossible values from NVML that were left out.",
           lambda s: len(s.sample.notes) if s.sample and s.answered else None),
    Metric("nvshim_looks_total",
           "Checks of the node; the result is failed if one found a fault.", ("result",),
           lambda snapshot: snapshot.state.counters.checks),
    single("nvshim_look_duration_seconds", "How long checks of the node took.",
           lambda snapshot: snapshot.state.counters.check_durations, is_histogram=True),
    single("nvshim_last_good_look_timestamp_seconds",
           "Time of the last check that found no fault; absent if there was none.",
           lambda snapshot: snapshot.at(snapshot.state.counters.last_good_check)),
    single("nvshim_node_faults", "Faults that the last check found; the log names them.",
           lambda snapshot: len(snapshot.state.node.value.faults)),
    Metric("nvshim_nri_answers_total",
           "Answers to NRI about containers to which the kubelet allocated a GPU, by result.",
           ("result",),
           lambda s: dict.fromkeys(((OK,), (REFUSED,), (FAILED,)), 0)
           | s.state.counters.nri_answers),
    Metric("nvshim_part_up", "Whether a service of the agent works.", ("part",), _services),
    Metric("nvshim_part_restarts_total", "How often a service was restarted.",
           ("part",), _restarts),
    _process("process_cpu_seconds_total", "Processor time of the agent."),
    _process("nvshim_children_cpu_seconds_total",
             "Processor time of programs that the agent ran and that have exited."),
    _process("process_resident_memory_bytes", "Memory of the agent."),
    _process("process_virtual_memory_bytes", "Address space of the agent."),
    _process("process_start_time_seconds", "When the agent started."),
    _process("process_open_fds", "Open descriptors of the agent."),
    _process("process_max_fds", "Limit of the agent's open descriptors."),
))  # fmt: skip


# -- the device plugin ------------------------------------------------------------------------


def _states(snapshot: Snapshot) -> Rows:
    return {
        (each.name, state.value): sum(device.state is state for device in each.devices)
        for each in snapshot.state.resources.value
        for state in HealthState
    }


def _unheld(snapshot: Snapshot) -> Rows:
    ledger = snapshot.state.ledger.value
    unheld: Counter[Labels] = Counter((each.resource,) for each in ledger.unheld)
    return {(each.name,): 0 for each in snapshot.state.resources.value} | unheld


def _never(snapshot: Snapshot) -> dict[Labels, int]:
    """Return 0 for each event that has not happened yet, so that the first is an increase."""
    return {
        (r.name, result): 0
        for r in snapshot.state.resources.value
        for result in (OK, REFUSED, FAILED)
    }


def _no_updates(snapshot: Snapshot) -> dict[Labels, int]:
    return {(each.name,): 0 for each in snapshot.state.resources.value}


def _daemons(snapshot: Snapshot) -> Iterable[MpsDaemon]:
    return snapshot.state.mps_daemons.value.values()


PLUGIN: Final = Group("The device plugin", (
    Metric("nvshim_resource_info", "A resource that the agent announces to the kubelet.",
           ("resource", "original", "sharing"),
           lambda snapshot: {
               (each.name, each.original or each.name, each.sharing): 1
               for each in snapshot.state.resources.value
           }),
    Metric("nvshim_resource_replicas", "How many containers may share one device.", ("resource",),
           lambda s: {(each.name,): each.replicas for each in s.state.resources.value}),
    Metric("nvshim_resource_devices",
           "Devices of a resource, or shares of them, that are in the state.",
           ("resource", "state"), _states),
    Metric("nvshim_resource_devices_unheld",
           "Devices of a resource that the kubelet has allocated to containers that do not have "
           "them yet.",
           ("resource",), _unheld),
    Metric("nvshim_mps_daemon_up",
           "Whether containers can use the MPS control daemon of a resource.", ("resource",),
           lambda snapshot: {(each.resource,): not each.unready for each in _daemons(snapshot)}),
    Metric("nvshim_mps_daemon_restarts_total",
           "How often the agent restarted a daemon that had stopped by itself.", ("resource",),
           lambda snapshot: {(each.resource,): each.restarts for each in _daemons(snapshot)}),
    Metric("nvshim_kubelet_registrations_total", "Registrations with a kubelet, by result.",
           ("resource", "result"), lambda s: _never(s) | s.state.counters.registrations),
    Metric("nvshim_kubelet_device_lists_total", "Lists of devices sent to a kubelet.",
           ("resource",),
           lambda snapshot: _no_updates(snapshot) | snapshot.state.counters.updates),
    Metric("nvshim_allocations_total", "Answers to the kubelet's Allocate, by result.",
           ("resource", "result"), lambda s: _never(s) | s.state.counters.allocations),
    Metric("nvshim_allocation_duration_seconds", "How long answers to Allocate took.",
           ("resource",), lambda s: s.state.counters.allocation_durations, is_histogram=True),
))  # fmt: skip
