"""Metrics of the node's GPUs and MIG devices, and of their health.

Source: NVML's nvmlClocksEventReasons for the reasons of throttling.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final

from integration.node.device_health.device_state import Condition
from integration.node.services.metrics.metric import (
    CONTAINER,
    DEVICE,
    GPU,
    MIG,
    Group,
    Metric,
    Rows,
)
from integration.node.services.metrics.snapshot import Labels, Snapshot
from integration.node.values.counters import MOST
from integration.node.values.health import HealthState
from integration.nvml.values import DeviceSample, GpuSample

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
    0x200: "board_limit",
    0x400: "reliability",
}
"""NVML's bits for the reasons of low clocks. Newer drivers may have more."""


_ACTIVITY: Final = (
    ("graphics", "graphics_active_ratio",
     "Share of the time in which the compute or graphics engine was active."),
    ("sm", "sm_active_ratio",
     "Share of the time in which a multiprocessor had work, the mean of all."),
    ("sm_occupancy", "sm_occupancy_ratio",
     "Warps on the multiprocessors, as a share of the most possible."),
    ("tensor", "tensor_active_ratio", "Share of the time in which tensor cores were active."),
    ("dram", "dram_active_ratio", "Share of the time in which memory was read or written."),
    ("fp64", "fp64_active_ratio", "Share of the time in which units for FP64 were active."),
    ("fp32", "fp32_active_ratio", "Share of the time in which units for FP32 were active."),
    ("fp16", "fp16_active_ratio", "Share of the time in which units for FP16 were active."),
)  # fmt: skip
"""Fields of Activity, the ends of their metrics' names, and their meaning."""

_TRAFFIC: Final = (
    ("pcie_sent", "Data that it sends over PCIe; GPUs before Hopper measure 20 ms."),
    ("pcie_received", "Data that it receives over PCIe; GPUs before Hopper measure 20 ms."),
    ("nvlink_sent", "Data that it sends over all NVLinks."),
    ("nvlink_received", "Data that it receives over all NVLinks."),
)
"""Fields of Activity that are rates, and their meaning."""


def ratio(percent: int | None) -> float | None:
    """Return a percentage as a ratio from 0 to 1."""
    return None if percent is None else percent / 100


def _sampled(name: str, meaning: str, value: Callable[[GpuSample], float | None]) -> Metric:
    """Return a metric with one value for each GPU that answers."""

    def rows(snapshot: Snapshot) -> Rows:
        return {snapshot.names.gpu[gpu.uuid]: value(gpu) for gpu in snapshot.answering}

    return Metric(name, meaning, GPU, rows)


def _sampled_mig(name: str, meaning: str, value: Callable[[DeviceSample], float | None]) -> Metric:
    """Return a metric with one value for each MIG device of a GPU that answers."""

    def rows(snapshot: Snapshot) -> Rows:
        parts = (part for gpu in snapshot.answering for part in gpu.mig)
        return {snapshot.names.mig[part.uuid]: value(part) for part in parts}

    return Metric(name, meaning, MIG, rows)


def _infos(snapshot: Snapshot) -> Rows:
    names, yes_no = snapshot.names, ("false", "true")
    return {
        (
            *names.gpu[key], str(gpu.minor), yes_no[gpu.mig], gpu.compute_capability, gpu.brand,
            yes_no[gpu.excluded],
        ): 1
        for key, gpu in names.known.items()
    }  # fmt: skip


def _up(snapshot: Snapshot) -> Rows:
    if not snapshot.answered:
        return {}
    answering = {each.uuid for each in snapshot.answering}
    return {labels: uuid in answering for uuid, labels in snapshot.names.gpu.items()}


def _watched(snapshot: Snapshot) -> Rows:
    return {
        labels: snapshot.state.unwatched.value.keys().isdisjoint({"", uuid})
        for uuid, labels in snapshot.names.gpu.items()
    }


def _throttled(snapshot: Snapshot) -> Rows:
    bits = {**_REASONS, ~sum(_REASONS): "unknown"}
    return {
        (*snapshot.names.gpu[each.uuid], reason): bool(each.throttle_reasons & bit)
        for each in snapshot.answering
        if each.throttle_reasons is not None
        for bit, reason in bits.items()
    }


def _fabrics(snapshot: Snapshot) -> Rows:
    return {
        (*snapshot.names.gpu[each.uuid], fabric.state, fabric.cluster_uuid,
         "" if fabric.clique is None else str(fabric.clique), fabric.health): 1
        for each in snapshot.answering
        if (fabric := each.fabric) is not None
    }  # fmt: skip


def _by_type(
    name: str, meaning: str, counts: Callable[[GpuSample], tuple[int | None, int | None]]
) -> Metric:
    """Return a metric with the counts of corrected and of uncorrected errors of each GPU."""

    def rows(snapshot: Snapshot) -> Rows:
        return {
            (*snapshot.names.gpu[each.uuid], kind): count
            for each in snapshot.answering
            for kind, count in zip(("corrected", "uncorrected"), counts(each), strict=True)
        }

    return Metric(name, meaning, (*GPU, "type"), rows)


def _repairs(snapshot: Snapshot) -> Rows:
    return {
        (*snapshot.names.gpu[each.uuid], part): pending
        for each in snapshot.answering
        for part, pending in (
            ("channel", each.channel_repair_pending), ("tpc", each.tpc_repair_pending),
        )
    }  # fmt: skip


def _xids(snapshot: Snapshot) -> Rows:
    counted: Counter[Labels] = Counter()
    for number, ((uuid, xid, title), count) in enumerate(snapshot.state.xid_counts.value.items()):
        # Beyond the limit, count the error without its container, to bound the number of series.
        container = _of_title(title if number < MOST else "")
        counted[*snapshot.names.of(uuid)[:2], str(xid), *container] += count
    return counted


def _of_title(title: str) -> Labels:
    """Return the namespace, pod and container of a container's display name."""
    parts = title.split("/")
    return tuple(parts) if len(parts) == len(CONTAINER) else ("", "", title)


def _last_xids(snapshot: Snapshot) -> Rows:
    return {
        (*snapshot.names.of(uuid)[:2], xid): snapshot.at(when)
        for (uuid, xid), when in snapshot.state.counters.last_xids.items()
    }


def _mig_infos(snapshot: Snapshot) -> Rows:
    inventory = snapshot.state.node.value.inventory
    return {
        (*snapshot.names.mig[each.uuid], str(each.gpu_instance), str(each.compute_instance)): 1
        for each in (inventory.mig_devices if inventory is not None else ())
    }


GPUS: Final = Group("GPUs and MIG devices", (
    Metric("nvshim_gpu_info", "A GPU of this node.",
           (*GPU, "minor", "mig_mode", "compute_capability", "brand", "excluded"), _infos),
    Metric("nvshim_gpu_up",
           "Whether the GPU answers; 0 for one that fell off the bus. Absent while NVML is not up.",
           GPU, _up),
    Metric("nvshim_gpu_events_watched", "Whether the agent receives errors of the GPU.", GPU,
           _watched),
    _sampled("nvshim_gpu_memory_total_bytes", "The GPU's memory, including reserved memory.",
             lambda gpu: gpu.memory_total_bytes),
    _sampled("nvshim_gpu_memory_used_bytes", "The GPU's memory in use.",
             lambda gpu: gpu.memory_used_bytes),
    _sampled("nvshim_gpu_memory_reserved_bytes",
             "Memory that the driver reserves; not part of the memory in use.",
             lambda gpu: gpu.memory_reserved_bytes),
    _sampled("nvshim_gpu_utilization_ratio", "Share of the time in which a kernel ran.",
             lambda gpu: ratio(gpu.gpu_percent)),
    _sampled("nvshim_gpu_memory_busy_ratio",
             "Share of the time in which its memory was read or written; not the share in use.",
             lambda gpu: ratio(gpu.memory_percent)),
    _sampled("nvshim_gpu_encoder_utilization_ratio",
             "Share of the time in which the video encoder was busy.",
             lambda gpu: ratio(gpu.encoder_percent)),
    _sampled("nvshim_gpu_decoder_utilization_ratio",
             "Share of the time in which the video decoder was busy.",
             lambda gpu: ratio(gpu.decoder_percent)),
    _sampled("nvshim_gpu_power_watts", "Power that the GPU draws.", lambda gpu: gpu.power_watts),
    _sampled("nvshim_gpu_energy_joules_total", "Energy used since the driver was loaded.",
             lambda gpu: gpu.energy_joules),
    _sampled("nvshim_gpu_temperature_celsius", "Temperature of the GPU.",
             lambda gpu: gpu.temperature_celsius),
    _sampled("nvshim_gpu_memory_temperature_celsius", "Temperature of its memory.",
             lambda gpu: gpu.memory_temperature_celsius),
    _sampled("nvshim_gpu_sm_clock_hertz", "Clock of its multiprocessors.",
             lambda gpu: gpu.sm_clock_hz),
    _sampled("nvshim_gpu_memory_clock_hertz", "Clock of its memory.",
             lambda gpu: gpu.memory_clock_hz),
    Metric("nvshim_gpu_fabric_info",
           "The GPU's place in an NVLink fabric: GPUs of a cluster and clique reach each other's "
           "memory, also those of other nodes. Absent without a fabric.",
           (*GPU, "state", "cluster_uuid", "clique", "health"), _fabrics),
    Metric("nvshim_gpu_clocks_throttled", "Whether its clocks are low for the reason.",
           (*GPU, "reason"), _throttled),
    _by_type("nvshim_gpu_ecc_errors_total",
             "Memory errors since the driver was loaded: type corrected or uncorrected.",
             lambda gpu: (gpu.ecc_corrected, gpu.ecc_uncorrected)),
    _by_type("nvshim_gpu_rows_remapped_total",
             "Rows of memory that were replaced, by the type of their errors.",
             lambda gpu: (gpu.rows_corrected, gpu.rows_uncorrected)),
    _sampled("nvshim_gpu_rows_pending",
             "Whether rows of memory wait for their replacement at the next reset.",
             lambda gpu: gpu.rows_pending),
    _sampled("nvshim_gpu_rows_failed",
             "Whether rows of memory could not be replaced: exchange the GPU.",
             lambda gpu: gpu.rows_failed),
    _by_type("nvshim_gpu_pages_retired_total",
             "Pages of memory that were retired, by the type of their errors; on older GPUs.",
             lambda gpu: (gpu.pages_corrected, gpu.pages_uncorrected)),
    _sampled("nvshim_gpu_pages_pending",
             "Whether pages of memory wait for their retirement at the next reset.",
             lambda gpu: gpu.pages_pending),
    _sampled("nvshim_gpu_pcie_replays_total", "Packets that were sent again over PCIe.",
             lambda gpu: gpu.pcie_replays),
    _sampled("nvshim_gpu_nvlink_sent_bytes_total", "Data that it sent over all NVLinks.",
             lambda gpu: gpu.nvlink_sent_bytes),
    _sampled("nvshim_gpu_nvlink_received_bytes_total", "Data that it received over all NVLinks.",
             lambda gpu: gpu.nvlink_received_bytes),
    _sampled("nvshim_gpu_memory_unrepairable",
             "Whether the GPU has memory that cannot be repaired. Replace the GPU then.",
             lambda gpu: gpu.unrepairable_memory),
    Metric("nvshim_gpu_repair_pending",
           "Whether a part of the GPU (channel: of memory, or tpc) is repaired at the next reset.",
           (*GPU, "part"), _repairs),
    Metric("nvshim_gpu_xid_errors_total",
           "Errors that the driver reported since the agent started, by their number (XID) and the "
           "container that caused them, where it is known.",
           ("gpu", "uuid", "xid", *CONTAINER), _xids),
    Metric("nvshim_nvswitch_errors_total",
           "Errors of NVSwitches that the driver reported since the agent started, by their number "
           "(SXID) and severity: fatal, non-fatal, correctable, or empty if it was not said.",
           ("switch", "pci_bus_id", "sxid", "severity"),
           lambda snapshot: snapshot.state.counters.switch_errors),
    Metric("nvshim_gpu_xid_last_timestamp_seconds", "When the driver last reported the error.",
           ("gpu", "uuid", "xid"), _last_xids),
    Metric("nvshim_mig_info", "A MIG device of this node.",
           (*MIG, "gpu_instance", "compute_instance"), _mig_infos),
    _sampled_mig("nvshim_mig_memory_total_bytes", "The MIG device's memory.",
                 lambda part: part.memory_total_bytes),
    _sampled_mig("nvshim_mig_memory_used_bytes", "The MIG device's memory in use.",
                 lambda part: part.memory_used_bytes),
))  # fmt: skip


def _active(name: str) -> Callable[[GpuSample | DeviceSample], float | None]:
    return lambda sample: getattr(sample.activity, name)


ACTIVITY: Final = Group("Activity since the scrape before (Hopper and newer)", (
    *(_sampled(f"nvshim_gpu_{end}", meaning, _active(name)) for name, end, meaning in _ACTIVITY),
    *(_sampled(f"nvshim_gpu_{name}_bytes_per_second", meaning, _active(name))
      for name, meaning in _TRAFFIC),
    *(_sampled_mig(f"nvshim_mig_{end}", f"{meaning[:-1]}, of the MIG device's GPU instance.",
                   _active(name)) for name, end, meaning in _ACTIVITY),
))  # fmt: skip


# -- health -----------------------------------------------------------------------------------


def _states(snapshot: Snapshot) -> Rows:
    return {
        (*snapshot.names.of(uuid), state.value): each.state is state
        for uuid, each in snapshot.state.health.value.items()
        for state in HealthState
    }


def _judged(name: str, meaning: str, value: Callable[[Condition], float | None]) -> Metric:
    """Return a metric with one value for each device whose health the agent judges."""

    def rows(snapshot: Snapshot) -> Rows:
        conditions = snapshot.state.health.value
        return {snapshot.names.of(uuid): value(each) for uuid, each in conditions.items()}

    return Metric(name, meaning, DEVICE, rows)


def _drained(snapshot: Snapshot) -> Rows:
    """Return the drained devices of the inventory; a GPU without a UUID has its PCI address."""
    drained = snapshot.state.node.value.drained
    return {
        labels: uuid in drained
        for uuid, labels in snapshot.names.device.items()
        if uuid in snapshot.names.known or uuid in snapshot.names.mig
    }


def _holders(snapshot: Snapshot) -> Rows:
    holdings = snapshot.state.ledger.value.holdings
    held = Counter(uuid for each in holdings for uuid in {*each.devices, *each.gpus})
    return {snapshot.names.of(uuid): held[uuid] for uuid in (*snapshot.names.device, *held)}


HEALTH: Final = Group("Health", (
    Metric("nvshim_device_health",
           "Whether a GPU or MIG device is in the state: containers can get healthy and suspect "
           "devices, but no unhealthy and recovering ones.",
           (*DEVICE, "state"), _states),
    _judged("nvshim_device_health_changed_timestamp_seconds",
            "When its state last changed; absent for a device that always was healthy.",
            lambda health: health.since or None),
    _judged("nvshim_device_last_xid",
            "The number of the last error that affected its state; 0 for none.",
            lambda health: health.xid),
    Metric("nvshim_device_out_of_service",
           "Whether a person has taken a GPU or MIG device, or the driver, out of service.",
           DEVICE, _drained),
    Metric("nvshim_device_containers",
           "Containers that hold a GPU or MIG device; for a GPU, also those with a part of it.",
           DEVICE, _holders),
))  # fmt: skip
