"""Metrics of the node's GPUs and MIG devices, and of their health.

Source: NVML's nvmlClocksEventReasons for the reasons of throttling.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from integration.node.services.metrics.metric import (
    CONTAINER,
    DEVICE,
    GPU,
    MIG,
    Family,
    Group,
    Rows,
)
from integration.node.services.metrics.snapshot import Labels, Moment
from integration.node.values.counters import MOST
from integration.node.values.health import HealthState
from integration.nvml.values import DeviceSample, GpuSample

if TYPE_CHECKING:
    from integration.node.device_health.device_state import Condition

_REASONS: Final = {
    0x1: "gpu_idle",
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}
"""NVML's bits of why clocks are low."""


def ratio(percent: int | None) -> float | None:
    """A percentage as a ratio from 0 to 1."""
    return None if percent is None else percent / 100


def _sampled(name: str, meaning: str, value: Callable[[GpuSample], float | None]) -> Family:
    """One value of each GPU that answers."""

    def rows(moment: Moment) -> Rows:
        return {moment.names.gpu[gpu.uuid]: value(gpu) for gpu in moment.answering}

    return Family(name, meaning, GPU, rows)


def _sampled_mig(name: str, meaning: str, value: Callable[[DeviceSample], int | None]) -> Family:
    """One value of each MIG device of a GPU that answers."""

    def rows(moment: Moment) -> Rows:
        parts = (part for gpu in moment.answering for part in gpu.mig)
        return {moment.names.mig[part.uuid]: value(part) for part in parts}

    return Family(name, meaning, MIG, rows)


def _infos(moment: Moment) -> Rows:
    names, yes_no = moment.names, ("false", "true")
    return {
        (
            *names.gpu[key], str(gpu.minor), yes_no[gpu.mig], gpu.compute_capability, gpu.brand,
            yes_no[gpu.excluded],
        ): 1
        for key, gpu in names.known.items()
    }  # fmt: skip


def _up(moment: Moment) -> Rows:
    if not moment.answered:
        return {}
    there = {each.uuid for each in moment.answering}
    return {labels: uuid in there for uuid, labels in moment.names.gpu.items()}


def _watched(moment: Moment) -> Rows:
    return {
        labels: moment.state.unwatched.value.keys().isdisjoint({"", uuid})
        for uuid, labels in moment.names.gpu.items()
    }


def _throttled(moment: Moment) -> Rows:
    return {
        (*moment.names.gpu[each.uuid], reason): bool(each.throttle_reasons & bit)
        for each in moment.answering
        if each.throttle_reasons is not None
        for bit, reason in _REASONS.items()
    }


def _ecc(moment: Moment) -> Rows:
    return {
        (*moment.names.gpu[each.uuid], kind): count
        for each in moment.answering
        for kind, count in (
            ("corrected", each.ecc_corrected), ("uncorrected", each.ecc_uncorrected),
        )
    }  # fmt: skip


def _xids(moment: Moment) -> Rows:
    counted: Counter[Labels] = Counter()
    for number, ((uuid, xid, title), count) in enumerate(moment.state.xid_counts.value.items()):
        # Beyond so many their containers are not named any more; they are counted all the same.
        whose = _of_title(title if number < MOST else "")
        counted[*moment.names.of(uuid)[:2], str(xid), *whose] += count
    return counted


def _of_title(title: str) -> Labels:
    """Namespace, pod and container of what people call a container."""
    parts = title.split("/")
    return tuple(parts) if len(parts) == len(CONTAINER) else ("", "", title)


def _last_xids(moment: Moment) -> Rows:
    return {
        (*moment.names.of(uuid)[:2], xid): moment.at(when)
        for (uuid, xid), when in moment.state.counters.last_xids.items()
    }


def _mig_infos(moment: Moment) -> Rows:
    inventory = moment.state.node.value.inventory
    return {
        (*moment.names.mig[each.uuid], str(each.gpu_instance), str(each.compute_instance)): 1
        for each in (inventory.mig_devices if inventory is not None else ())
    }


GPUS: Final = Group("GPUs and MIG devices", (
    Family("nvshim_gpu_info", "A GPU of this node.",
           (*GPU, "minor", "mig_mode", "compute_capability", "brand", "excluded"), _infos),
    Family("nvshim_gpu_up",
           "Whether the GPU answers; 0 for one that fell off the bus. Absent while NVML is not up.",
           GPU, _up),
    Family("nvshim_gpu_events_watched", "Whether errors of the GPU would be heard of.", GPU,
           _watched),
    _sampled("nvshim_gpu_memory_total_bytes", "The GPU's memory, what is reserved included.",
             lambda gpu: gpu.memory_total_bytes),
    _sampled("nvshim_gpu_memory_used_bytes", "How much of it is in use.",
             lambda gpu: gpu.memory_used_bytes),
    _sampled("nvshim_gpu_utilization_ratio", "Of the time, how long a kernel ran.",
             lambda gpu: ratio(gpu.gpu_percent)),
    _sampled("nvshim_gpu_memory_busy_ratio",
             "Of the time, how long its memory was read or written; not how much of it is used.",
             lambda gpu: ratio(gpu.memory_percent)),
    _sampled("nvshim_gpu_encoder_utilization_ratio",
             "Of the time, how long the video encoder was busy.",
             lambda gpu: ratio(gpu.encoder_percent)),
    _sampled("nvshim_gpu_decoder_utilization_ratio",
             "Of the time, how long the video decoder was busy.",
             lambda gpu: ratio(gpu.decoder_percent)),
    _sampled("nvshim_gpu_power_watts", "What the GPU draws.", lambda gpu: gpu.power_watts),
    _sampled("nvshim_gpu_energy_joules_total", "What it has drawn since the driver was loaded.",
             lambda gpu: gpu.energy_joules),
    _sampled("nvshim_gpu_temperature_celsius", "Temperature of the GPU.",
             lambda gpu: gpu.temperature_celsius),
    _sampled("nvshim_gpu_sm_clock_hertz", "Clock of its multiprocessors.",
             lambda gpu: gpu.sm_clock_hz),
    _sampled("nvshim_gpu_memory_clock_hertz", "Clock of its memory.",
             lambda gpu: gpu.memory_clock_hz),
    Family("nvshim_gpu_clocks_throttled", "Whether its clocks are low for that reason.",
           (*GPU, "reason"), _throttled),
    Family("nvshim_gpu_ecc_errors_total",
           "Memory errors since the driver was loaded: type corrected or uncorrected.",
           (*GPU, "type"), _ecc),
    _sampled("nvshim_gpu_rows_pending",
             "Whether rows of memory wait to be replaced at the next reset.",
             lambda gpu: gpu.rows_pending),
    _sampled("nvshim_gpu_rows_failed",
             "Whether rows of memory could not be replaced: the GPU is to be exchanged.",
             lambda gpu: gpu.rows_failed),
    Family("nvshim_gpu_xid_errors_total",
           "Errors that the driver reported since the agent began, by their number (XID) and the "
           "container that caused them, where that is known.",
           ("gpu", "uuid", "xid", *CONTAINER), _xids),
    Family("nvshim_gpu_xid_last_timestamp_seconds", "When the driver last reported that one.",
           ("gpu", "uuid", "xid"), _last_xids),
    Family("nvshim_mig_info", "A MIG device of this node.",
           (*MIG, "gpu_instance", "compute_instance"), _mig_infos),
    _sampled_mig("nvshim_mig_memory_total_bytes", "The MIG device's memory.",
                 lambda part: part.memory_total_bytes),
    _sampled_mig("nvshim_mig_memory_used_bytes", "How much of it is in use.",
                 lambda part: part.memory_used_bytes),
))  # fmt: skip


# -- health -----------------------------------------------------------------------------------


def _states(moment: Moment) -> Rows:
    return {
        (*moment.names.of(uuid), state.value): each.state is state
        for uuid, each in moment.state.health.value.items()
        for state in HealthState
    }


def _judged(name: str, meaning: str, value: Callable[[Condition], float | None]) -> Family:
    """One value of each device that is judged."""

    def rows(moment: Moment) -> Rows:
        return {
            moment.names.of(uuid): value(each) for uuid, each in moment.state.health.value.items()
        }

    return Family(name, meaning, DEVICE, rows)


def _drained(moment: Moment) -> Rows:
    """Of devices that the inventory has; one whose UUID nobody knows goes by its address."""
    drained = moment.state.node.value.drained
    return {
        labels: uuid in drained
        for uuid, labels in moment.names.device.items()
        if uuid in moment.names.known or uuid in moment.names.mig
    }


def _holders(moment: Moment) -> Rows:
    holdings = moment.state.ledger.value.holdings
    held = Counter(uuid for each in holdings for uuid in {*each.devices, *each.gpus})
    return {moment.names.of(uuid): held[uuid] for uuid in (*moment.names.device, *held)}


HEALTH: Final = Group("Health", (
    Family("nvshim_device_health",
           "Whether a GPU or MIG device is in that state: healthy and suspect ones are given to "
           "containers, unhealthy and recovering ones are not.",
           (*DEVICE, "state"), _states),
    _judged("nvshim_device_health_changed_timestamp_seconds",
            "When it came to be in its state; absent for one that always was healthy.",
            lambda health: health.since or None),
    _judged("nvshim_device_last_xid",
            "The number of the last error that its state is founded on; 0 for none.",
            lambda health: health.xid),
    Family("nvshim_device_out_of_service",
           "Whether a person has taken a GPU or MIG device, or the driver, out of service.",
           DEVICE, _drained),
    Family("nvshim_device_containers",
           "How many containers hold a GPU or MIG device; for a GPU, those with a part of it too.",
           DEVICE, _holders),
))  # fmt: skip
