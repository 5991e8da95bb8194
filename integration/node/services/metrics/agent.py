"""Metrics of the agent itself, and of what it serves to kubelets."""

from __future__ import annotations

import platform
import resource
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from prometheus_client import PROCESS_COLLECTOR

from integration.node.services.metrics.metric import Family, Group, Rows, single
from integration.node.services.metrics.snapshot import Labels, Moment
from integration.node.values.counters import FAILED, OK, REFUSED
from integration.node.values.health import HealthState
from shim import VERSION

if TYPE_CHECKING:
    from integration.node.mps.clients import MpsDaemon


def _driver(moment: Moment) -> Rows:
    seen = moment.state.node.value
    cuda = seen.inventory.cuda_version if seen.inventory is not None else ""
    return {(seen.driver, cuda): 1} if seen.driver else {}


def _sampled_at(moment: Moment) -> float | None:
    return moment.at(moment.sample.when) if moment.sample and moment.answered else None


def _services(moment: Moment) -> Rows:
    faults = moment.state.faults.lines
    return {(name,): name not in faults for name in (*moment.services, *faults)}


def _restarts(moment: Moment) -> Rows:
    return {(name,): 0 for name in moment.services} | moment.state.counters.restarts


def own_process() -> dict[str, float]:
    """What prometheus-client says of this process, by the names of families."""
    read = PROCESS_COLLECTOR.collect()
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        **{sample.name: sample.value for metric in read for sample in metric.samples},
        "nvshim_children_cpu_seconds_total": round(ended.ru_utime + ended.ru_stime, 6),
    }


def _process(name: str, meaning: str) -> Family:
    return single(name, meaning, lambda moment: moment.process.get(name))


AGENT: Final = Group("The agent", (
    Family("nvshim_build_info", "The agent.", ("version", "python"),
           lambda _: {(VERSION, platform.python_version()): 1}),
    Family("nvshim_driver_info", "The driver of this node; absent if there is none.",
           ("version", "cuda_version"), _driver),
    single("nvshim_nvml_up",
           "Whether NVML answered for this scrape; if not, all that only it knows is absent.",
           lambda moment: moment.answered),
    single("nvshim_nvml_sample_timestamp_seconds", "When NVML's values of this scrape are of.",
           _sampled_at),
    single("nvshim_nvml_sample_duration_seconds", "How long this scrape waited for NVML.",
           lambda moment: None if moment.sample is None else moment.waited),
    single("nvshim_nvml_disbelieved", "How much NVML said that cannot be, and was left out.",
           lambda m: len(m.sample.notes) if m.sample and m.answered else None),
    Family("nvshim_looks_total",
           "Looks at the node; one that found something wrong has the result failed.", ("result",),
           lambda moment: moment.state.counters.looks),
    single("nvshim_look_duration_seconds", "How long looks at the node took.",
           lambda moment: moment.state.counters.looking, is_histogram=True),
    single("nvshim_last_good_look_timestamp_seconds",
           "When the last look was that found nothing wrong; absent if there was none.",
           lambda moment: moment.at(moment.state.counters.last_look)),
    single("nvshim_node_faults", "How much the last look found wrong; the log says what.",
           lambda moment: len(moment.state.node.value.faults)),
    Family("nvshim_part_up", "Whether a service of the agent works.", ("part",), _services),
    Family("nvshim_part_restarts_total", "How often a service was restarted.",
           ("part",), _restarts),
    _process("process_cpu_seconds_total", "Processor time of the agent."),
    _process("nvshim_children_cpu_seconds_total",
             "Processor time of programs that the agent has run and that have ended."),
    _process("process_resident_memory_bytes", "Memory of the agent."),
    _process("process_virtual_memory_bytes", "Address space of the agent."),
    _process("process_start_time_seconds", "When the agent began."),
    _process("process_open_fds", "Open descriptors of the agent."),
    _process("process_max_fds", "How many it may have."),
))  # fmt: skip


# -- the device plugin ------------------------------------------------------------------------


def _states(moment: Moment) -> Rows:
    return {
        (each.name, state.value): sum(device.state is state for device in each.devices)
        for each in moment.state.resources.value
        for state in HealthState
    }


def _unheld(moment: Moment) -> Rows:
    unheld: Counter[Labels] = Counter((each.resource,) for each in moment.state.ledger.value.unheld)
    return {(each.name,): 0 for each in moment.state.resources.value} | unheld


def _never(moment: Moment) -> dict[Labels, int]:
    """What has not happened yet is 0, or its first time would not be seen as an increase."""
    return {
        (r.name, result): 0
        for r in moment.state.resources.value
        for result in (OK, REFUSED, FAILED)
    }


def _no_updates(moment: Moment) -> dict[Labels, int]:
    return {(each.name,): 0 for each in moment.state.resources.value}


def _daemons(moment: Moment) -> Iterable[MpsDaemon]:
    return moment.state.mps_daemons.value.values()


PLUGIN: Final = Group("The device plugin", (
    Family("nvshim_resource_info", "A resource that the kubelet is told of.",
           ("resource", "original", "sharing"),
           lambda moment: {
               (each.name, each.original or each.name, each.sharing): 1
               for each in moment.state.resources.value
           }),
    Family("nvshim_resource_replicas", "How many share one device of it.", ("resource",),
           lambda moment: {(each.name,): each.replicas for each in moment.state.resources.value}),
    Family("nvshim_resource_devices",
           "How many devices, or shares of devices, of a resource are in that state.",
           ("resource", "state"), _states),
    Family("nvshim_resource_devices_unheld",
           "How many devices of a resource the kubelet has given to containers that do not have "
           "them yet.",
           ("resource",), _unheld),
    Family("nvshim_mps_daemon_up",
           "Whether containers can use the MPS control daemon of a resource.", ("resource",),
           lambda moment: {(each.resource,): not each.unready for each in _daemons(moment)}),
    Family("nvshim_mps_daemon_restarts_total",
           "How often it was started again because it had ended by itself.", ("resource",),
           lambda moment: {(each.resource,): each.restarts for each in _daemons(moment)}),
    Family("nvshim_kubelet_registrations_total", "Registrations with a kubelet, by result.",
           ("resource", "result"), lambda m: _never(m) | m.state.counters.registrations),
    Family("nvshim_kubelet_device_lists_total", "Lists of devices that a kubelet was sent.",
           ("resource",),
           lambda moment: _no_updates(moment) | moment.state.counters.updates),
    Family("nvshim_allocations_total", "Answers to the kubelet's Allocate, by result.",
           ("resource", "result"), lambda m: _never(m) | m.state.counters.allocations),
    Family("nvshim_allocation_duration_seconds", "How long answers to Allocate took.",
           ("resource",), lambda moment: moment.state.counters.allocating, is_histogram=True),
))  # fmt: skip
