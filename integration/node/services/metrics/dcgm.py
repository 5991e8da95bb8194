"""dcgm-exporter's series, under its names, in its units and with its labels.

Rules
- dcgm-exporter 4.9 renamed its series, and changed the units of many. ``dcgm`` has the names up to
  4.8; ``dcgm-4.5`` has the same names with the label ``Hostname``, which is ``hostname`` since 4.6;
  ``dcgm-4.9`` has the names since 4.9. If several are chosen, a name that they share is written
  once.
- A GPU with MIG devices has a series for each GPU instance instead of its own. Values that NVML
  knows only for the GPU, such as its temperature and its UUID, are repeated for each.
- The labels ``namespace``, ``pod`` and ``container`` name one container that holds the device, as
  in dcgm-exporter. If there are several, the one with the fewest devices is named, then the last by
  name.
- A value that NVML does not report is absent, never 0. The licence of vGPUs is always absent.
- The format is text 0.0.4, as in dcgm-exporter: OpenMetrics requires that a counter's name ends in
  ``_total``.

Source: dcgm-exporter, etc/default-counters.csv and internal/pkg/rendermetrics; its release notes.
    The names since 4.9 are those of DCGM 4.7's fields, according to its documentation. None of this
    was compared with a running dcgm-exporter.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Final, NamedTuple

from prometheus_client.registry import Collector

from integration.node.options import DCGM, DCGM_4_5, DCGM_4_9
from integration.node.services.metrics.metric import Metric, Rows
from integration.node.services.metrics.snapshot import Attribution, Labels, Snapshot
from integration.node.services.metrics.text import PLAIN, Form
from integration.nvml.values import Activity, DeviceSample, GpuSample
from shim.causes.xids import about

COUNTER: Final = "counter"
_MIB: Final = 1 << 20

# The share of a GPU instance that a compute instance has ("1c." of "1c.3g.20gb").
_COMPUTE_SLICES: Final = re.compile(r"^\d+c\.")


class Entity(NamedTuple):
    """A GPU, or a GPU instance of one in MIG mode."""

    gpu: GpuSample
    memory: GpuSample | DeviceSample  # what has its memory and activity
    xid: int | None  # the GPU's last Xid; 0 for none, None if its Xids are not received
    nvlink: float | None  # bytes per second over the GPU's NVLinks, since the previous scrape
    device: Labels  # the values of _DEVICE
    holder: Labels  # the values of _HOLDER and of the pod's labels
    job: str = ""  # the job of a batch system that has it

    @property
    def activity(self) -> Activity:
        """How busy its parts were since the previous scrape."""
        return self.memory.activity

    @property
    def free_bytes(self) -> int | None:
        """The memory that is free; None if the figures for used and reserved are impossible."""
        total, used = self.memory.memory_total_bytes, self.memory.memory_used_bytes
        if total is None or used is None:
            return None
        free = total - used - (self.memory.memory_reserved_bytes or 0)
        return free if free >= 0 else None


class Series(NamedTuple):
    """A series of dcgm-exporter."""

    old: str  # the name up to 4.8, without PREFIX; "" for none
    new: str  # the name since 4.9; "" for none, or if it is unknown
    unit: str  # the unit up to 4.8, a key of _UNITS
    help: str
    value: Callable[[Entity], float | None]  # in the units of GpuSample
    type: str = "gauge"


# How to convert GpuSample's unit to the one up to 4.8, and to the one since 4.9.
_UNITS: Final[dict[str, tuple[Callable[[float], float], Callable[[float], float]]]] = {
    "": (float, float),
    "C": (float, float),
    "W": (float, float),
    "MHz": (lambda hertz: hertz // 1_000_000, float),
    "mJ": (lambda joules: round(joules * 1000), float),
    "%": (float, lambda percent: percent / 100),
    "MiB": (lambda count: count // _MIB, float),
    "MB/s": (lambda rate: rate / 1024 / 1000, float),  # it counts in thousands of KiB
}

PREFIX: Final = "DCGM_FI_"

_XID: Final = "DEV_XID_ERRORS"

SERIES: Final = (
    Series("DEV_SM_CLOCK", "DEV_SM_CLOCK_HERTZ", "MHz", "Clock of the multiprocessors",
           lambda e: e.gpu.sm_clock_hz),
    Series("DEV_MEM_CLOCK", "DEV_MEMORY_CLOCK_HERTZ", "MHz", "Clock of the memory",
           lambda e: e.gpu.memory_clock_hz),
    Series("DEV_MEMORY_TEMP", "DEV_MEMORY_TEMP_CELSIUS", "C", "Temperature of the memory",
           lambda e: e.gpu.memory_temperature_celsius),
    Series("DEV_GPU_TEMP", "DEV_GPU_TEMP_CELSIUS", "C", "Temperature of the GPU",
           lambda e: e.gpu.temperature_celsius),
    Series("DEV_POWER_USAGE", "DEV_BOARD_POWER_WATTS", "W", "Power that the GPU draws",
           lambda e: e.gpu.power_watts),
    Series("DEV_TOTAL_ENERGY_CONSUMPTION", "DEV_GPU_ENERGY_JOULES_TOTAL", "mJ",
           "Energy since the driver was loaded", lambda e: e.gpu.energy_joules, COUNTER),
    Series("DEV_PCIE_REPLAY_COUNTER", "DEV_PCIE_REPLAY_TOTAL", "",
           "Packets that were sent again over PCIe", lambda e: e.gpu.pcie_replays, COUNTER),
    Series("DEV_GPU_UTIL", "DEV_GPU_UTIL_RATIO", "%", "Time in which a kernel ran",
           lambda e: e.gpu.gpu_percent),
    Series("DEV_MEM_COPY_UTIL", "DEV_MEMORY_UTIL_RATIO", "%",
           "Time in which memory was read or written", lambda e: e.gpu.memory_percent),
    Series("DEV_ENC_UTIL", "DEV_ENC_UTIL_RATIO", "%", "Time in which the encoder was busy",
           lambda e: e.gpu.encoder_percent),
    Series("DEV_DEC_UTIL", "DEV_DEC_UTIL_RATIO", "%", "Time in which the decoder was busy",
           lambda e: e.gpu.decoder_percent),
    Series(_XID, "DEV_XID_ERROR", "", "Number of the last Xid, 0 for none", lambda e: e.xid),
    Series("DEV_FB_FREE", "DEV_FB_FREE_BYTES", "MiB", "Free memory", lambda e: e.free_bytes),
    Series("DEV_FB_USED", "DEV_FB_USED_BYTES", "MiB", "Memory in use",
           lambda e: e.memory.memory_used_bytes),
    Series("DEV_FB_RESERVED", "DEV_FB_RESERVED_BYTES", "MiB", "Memory that the driver reserves",
           lambda e: e.memory.memory_reserved_bytes),
    Series("DEV_FB_TOTAL", "DEV_FB_CAPACITY_BYTES", "MiB", "All memory",
           lambda e: e.memory.memory_total_bytes),
    Series("DEV_NVLINK_BANDWIDTH_TOTAL", "DEV_NVLINK_THROUGHPUT_BYTES_PER_SECOND", "MB/s",
           "Data over all NVLinks, a rate in spite of its type", lambda e: e.nvlink, COUNTER),
    Series("DEV_UNCORRECTABLE_REMAPPED_ROWS", "DEV_ROW_REMAP_UNCORRECTABLE_TOTAL", "",
           "Rows of memory that were replaced because of uncorrectable errors",
           lambda e: e.gpu.rows_uncorrected, COUNTER),
    Series("DEV_CORRECTABLE_REMAPPED_ROWS", "DEV_ROW_REMAP_CORRECTABLE_TOTAL", "",
           "Rows of memory that were replaced because of correctable errors",
           lambda e: e.gpu.rows_corrected, COUNTER),
    Series("DEV_ROW_REMAP_FAILURE", "DEV_ROW_REMAP_FAILED", "",
           "Whether rows of memory could not be replaced", lambda e: e.gpu.rows_failed),
    Series("DEV_ROW_REMAP_PENDING", "", "", "Whether rows of memory wait for their replacement",
           lambda e: e.gpu.rows_pending),
    Series("DEV_ECC_SBE_VOL_TOTAL", "", "", "Corrected memory errors since the driver was loaded",
           lambda e: e.gpu.ecc_corrected, COUNTER),
    Series("DEV_ECC_DBE_VOL_TOTAL", "", "",
           "Uncorrected memory errors since the driver was loaded",
           lambda e: e.gpu.ecc_uncorrected, COUNTER),
    Series("DEV_RETIRED_SBE", "", "", "Pages retired because of corrected errors",
           lambda e: e.gpu.pages_corrected, COUNTER),
    Series("DEV_RETIRED_DBE", "", "", "Pages retired because of uncorrected errors",
           lambda e: e.gpu.pages_uncorrected, COUNTER),
    Series("DEV_RETIRED_PENDING", "", "", "Whether pages wait for their retirement",
           lambda e: e.gpu.pages_pending, COUNTER),
    Series("PROF_GR_ENGINE_ACTIVE", "PROF_GR_ENGINE_UTIL_RATIO", "",
           "Time in which the compute or graphics engine was active",
           lambda e: e.activity.graphics),
    Series("PROF_SM_ACTIVE", "PROF_SM_UTIL_RATIO", "",
           "Time in which a multiprocessor had work, the mean of all", lambda e: e.activity.sm),
    Series("PROF_SM_OCCUPANCY", "PROF_SM_OCCUPANCY_RATIO", "",
           "Warps on the multiprocessors, of the most possible", lambda e: e.activity.sm_occupancy),
    Series("PROF_PIPE_TENSOR_ACTIVE", "PROF_TENSOR_UTIL_RATIO", "",
           "Time in which tensor cores were active", lambda e: e.activity.tensor),
    Series("PROF_DRAM_ACTIVE", "PROF_DRAM_UTIL_RATIO", "",
           "Time in which memory was read or written", lambda e: e.activity.dram),
    Series("PROF_PIPE_FP64_ACTIVE", "PROF_FP64_UTIL_RATIO", "",
           "Time in which units for FP64 were active", lambda e: e.activity.fp64),
    Series("PROF_PIPE_FP32_ACTIVE", "PROF_FP32_UTIL_RATIO", "",
           "Time in which units for FP32 were active", lambda e: e.activity.fp32),
    Series("PROF_PIPE_FP16_ACTIVE", "PROF_FP16_UTIL_RATIO", "",
           "Time in which units for FP16 were active", lambda e: e.activity.fp16),
    Series("PROF_PCIE_TX_BYTES", "PROF_PCIE_TX_BYTES", "", "Bytes per second sent over PCIe",
           lambda e: e.activity.pcie_sent),
    Series("PROF_PCIE_RX_BYTES", "PROF_PCIE_RX_BYTES", "", "Bytes per second received over PCIe",
           lambda e: e.activity.pcie_received),
    Series("PROF_NVLINK_TX_BYTES", "PROF_NVLINK_TX_BYTES", "",
           "Bytes per second sent over NVLinks", lambda e: e.activity.nvlink_sent),
    Series("PROF_NVLINK_RX_BYTES", "PROF_NVLINK_RX_BYTES", "",
           "Bytes per second received over NVLinks", lambda e: e.activity.nvlink_received),
)  # fmt: skip

_DEVICE: Final = ("gpu", "UUID", "pci_bus_id", "device", "modelName", "GPU_I_PROFILE", "GPU_I_ID")
_HOLDER: Final = ("container", "namespace", "pod")
_JOB: Final = "hpc_job"
_ERROR: Final = ("err_code", "err_msg")
_OLD_DRIVER: Final = "DCGM_FI_DRIVER_VERSION"
_NEW_DRIVER: Final = "DCGM_FI_SYSTEM_DRIVER_VERSION"

TAKEN: Final = frozenset(
    {*_DEVICE, *_HOLDER, _JOB, *_ERROR, _OLD_DRIVER, _NEW_DRIVER, "hostname", "Hostname"}
)
"""The labels that a pod's cannot replace."""


class _Spelling(NamedTuple):
    """How releases write a series."""

    name: Callable[[Series], str]  # its name in them, without PREFIX; "" for none
    unit: int  # 0 for the unit up to 4.8, 1 for the one since 4.9
    hosts: Labels  # the labels with the node's name
    driver: str  # the label with the driver's version


def collect(
    snapshot: Snapshot,
    names: Collection[str],
    node: str,
    attribution: Attribution = Attribution(),  # noqa: B008 - a constant
) -> list[tuple[Metric, Rows]]:
    """Return the series in the given spellings, each name once.

    Args:
        names: one or several of DCGM, DCGM_4_5 and DCGM_4_9.
        node: the node's name.
        attribution: the labels of pods and jobs.
    """
    spellings = []
    if DCGM_4_9 in names:
        spellings.append(_Spelling(lambda each: each.new, 1, ("hostname",), _NEW_DRIVER))
    hosts = {DCGM: "hostname", DCGM_4_5: "Hostname"}
    if labels := tuple(label for name, label in hosts.items() if name in names):
        spellings.append(_Spelling(lambda each: each.old, 0, labels, _OLD_DRIVER))
    entities = [*_entities(snapshot, attribution)]
    driver = snapshot.state.node.value.driver
    found: dict[str, tuple[Metric, Rows]] = {}
    for spelling in spellings:
        common = (*(node for _ in spelling.hosts), driver)
        for series in SERIES:
            if name := spelling.name(series):
                found[name] = _spelled(series, spelling, entities, common, attribution.labels)
    return [*found.values()]


def _spelled(
    series: Series,
    spelling: _Spelling,
    entities: Iterable[Entity],
    common: Labels,
    more: Labels,
) -> tuple[Metric, Rows]:
    """Return a series in one spelling.

    Args:
        common: the values of the labels that do not depend on the device.
        more: the names of the pods' labels.
    """
    of_error = _ERROR if series.old == _XID else ()
    labels = (*_DEVICE, *spelling.hosts, spelling.driver, *_HOLDER, *more, _JOB, *of_error)
    rows: dict[Labels, float | None] = {}
    for each in entities:
        value = series.value(each)
        if value is not None:
            error = (str(each.xid), _meaning(each.xid)) if of_error else ()
            key = (*each.device, *common, *each.holder, each.job, *error)
            rows[key] = _UNITS[series.unit][spelling.unit](value)
    unit = f" (in {series.unit})" if series.unit and not spelling.unit else ""
    name = PREFIX + spelling.name(series)
    return Metric(name, f"{series.help}{unit}.", labels, type=series.type), rows


def _meaning(xid: int | None) -> str:
    return about(xid).meaning if xid else "No Error"


def _entities(snapshot: Snapshot, attribution: Attribution) -> Iterator[Entity]:
    """Yield the GPUs of the inventory that answer, and GPU instances in their place, by job."""
    for name, entity in _devices(snapshot, attribution):
        for job in attribution.jobs.get(name) or ("",):
            yield entity._replace(job=job)


def _devices(snapshot: Snapshot, attribution: Attribution) -> Iterator[tuple[str, Entity]]:
    """Yield each of them once, with its key in ``attribution.jobs``."""
    inventory = snapshot.state.node.value.inventory
    devices = {each.uuid: each for each in inventory.mig_devices} if inventory is not None else {}
    holders = _holders(snapshot, attribution)
    nobody = ("",) * (len(_HOLDER) + len(attribution.labels))
    for sample in snapshot.answering:
        gpu = snapshot.names.known.get(sample.uuid)
        if gpu is None:
            continue
        common = _last_xid(snapshot, gpu.uuid), _nvlink(snapshot, sample)
        bus_id = f"0000{gpu.bus_id.upper()}"  # its domain has eight digits there
        labels = (str(gpu.index), gpu.uuid, bus_id, f"nvidia{gpu.index}", gpu.model)
        instances: dict[int, Entity] = {}
        for part in sample.mig:
            device = devices.get(part.uuid)
            if device is not None:
                # Several compute instances have one memory and may have a container each.
                before = instances.get(device.gpu_instance)
                holder = holders.get(part.uuid, before.holder if before else nobody)
                profile = _COMPUTE_SLICES.sub("", device.profile)
                of_instance = (*labels, profile, str(device.gpu_instance))
                instances[device.gpu_instance] = Entity(sample, part, *common, of_instance, holder)
        if sample.mig:
            yield from ((f"{gpu.index}.{number}", each) for number, each in instances.items())
        else:
            holder = holders.get(gpu.uuid, nobody)
            yield str(gpu.index), Entity(sample, sample, *common, (*labels, "", ""), holder)


def _holders(snapshot: Snapshot, attribution: Attribution) -> dict[str, Labels]:
    """Return the container, namespace, pod and its labels that are named for each device."""
    unknown = ("",) * len(attribution.labels)
    found = [
        (
            -len(each.devices),
            (
                each.container.name, pod.namespace, pod.name,
                *attribution.values.get(pod.uid, unknown),
            ),
            each.devices,
        )
        for each in snapshot.state.ledger.value.holdings
        if (pod := each.container.pod) is not None
    ]  # fmt: skip
    return {uuid: labels for _, labels, devices in sorted(found) for uuid in devices}


def _last_xid(snapshot: Snapshot, uuid: str) -> int | None:
    """Return a GPU's last Xid; 0 if there was none, None if its Xids are not received."""
    times = snapshot.state.counters.last_xids
    found = [(when, int(xid)) for (gpu, xid), when in times.items() if gpu == uuid]
    if not found and not snapshot.state.unwatched.value.keys().isdisjoint({"", uuid}):
        return None
    return max(found, default=(0.0, 0))[1]


def _nvlink(snapshot: Snapshot, gpu: GpuSample) -> float | None:
    """Return the bytes per second that a GPU sent and received since the previous scrape."""
    latest, earlier = snapshot.sample, snapshot.earlier
    if latest is None or earlier is None or latest.when <= earlier.when:
        return None
    count = _traffic(gpu)
    [before] = [_traffic(each) for each in earlier.gpus if each.uuid == gpu.uuid] or [None]
    if count is None or before is None or count < before:  # the driver was reloaded
        return None
    return (count - before) / (latest.when - earlier.when)


def _traffic(gpu: GpuSample) -> int | None:
    sent, received = gpu.nvlink_sent_bytes, gpu.nvlink_received_bytes
    return None if sent is None or received is None else sent + received


# -- text ---------------------------------------------------------------------------------------

# prometheus-client adds this to the names of counters, but not to those of their samples.
_ADDED: Final = re.compile(rb"^(# (?:HELP|TYPE) DCGM_\w+)_total ", re.MULTILINE)


def _encode(collector: Collector) -> bytes:
    return _ADDED.sub(rb"\1 ", PLAIN.encode(collector))


FORM: Final = Form(_encode, PLAIN.type)
"""The format of answers with these series."""
