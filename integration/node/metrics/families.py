"""All that Prometheus is told of, as a table: names, kinds, labels, and what they mean.

Rules
- Names and units are by Prometheus' conventions: base units (bytes, seconds, joules, hertz; ratios
  from 0 to 1), ``_total`` for what only grows, ``_info`` for facts whose value is 1.
- A series has few labels, and the same ones everywhere, so that any two families can be joined:
  ``gpu`` and ``uuid`` are always those of the GPU, ``mig`` and ``mig_uuid`` those of a MIG device
  on it (absent for the GPU itself). What is only good to know is in the ``_info`` families.
- A container is known by ``namespace``, ``pod`` and ``container``, as everywhere in Kubernetes, and
  not by its id: a pod that is restarted all day long must not make a new series each time. One
  without a pod has a ``container`` only: its name, or else its id.
- What is not known is absent, and not 0. What is gone is absent with the next scrape.
- A value that was told once stays what it is: names are not changed, only added.

Source: Prometheus' "Metric and label naming" and "Writing exporters"; OpenMetrics 1.0.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

__all__ = ["FAMILIES", "GROUPS", "Family", "Group", "Kind"]


class Kind(StrEnum):
    """What kind of values a family has."""

    GAUGE = "gauge"
    COUNTER = "counter"
    INFO = "info"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Family:
    """Metrics of one name.

    Attributes:
        name: as it is queried; of a histogram without its endings.
        kind: what kind of values it has.
        help: one line.
        labels: their names, in order.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()

    @property
    def samples(self) -> tuple[str, ...]:
        """The names that its series have."""
        if self.kind is Kind.HISTOGRAM:
            return tuple(f"{self.name}_{ending}" for ending in ("bucket", "sum", "count"))
        return (self.name,)


class Group(NamedTuple):
    """Families that belong together.

    Attributes:
        title: what they are of.
        families: in the order in which they are told.
    """

    title: str
    families: tuple[Family, ...]


_GPU: Final = ("gpu", "uuid", "pci_bus_id", "model")
_MIG: Final = ("gpu", "uuid", "mig", "mig_uuid", "profile")
_DEVICE: Final = ("gpu", "uuid", "mig", "mig_uuid")
_CONTAINER: Final = ("namespace", "pod", "container")
_USE: Final = (*_CONTAINER, *_DEVICE)

# -- the agent --------------------------------------------------------------------------------

BUILD = Family("nvshim_build_info", Kind.INFO, "The agent.", ("version", "python"))
DRIVER = Family(
    "nvshim_driver_info", Kind.INFO, "The driver of this node; absent if there is none.",
    ("version", "cuda_version"),
)  # fmt: skip
NVML_UP = Family(
    "nvshim_nvml_up", Kind.GAUGE,
    "Whether NVML answered for this scrape; if not, all that only it knows is absent.",
)  # fmt: skip
NVML_TIME = Family(
    "nvshim_nvml_sample_timestamp_seconds", Kind.GAUGE, "When NVML's values of this scrape are of.",
)  # fmt: skip
NVML_WAIT = Family(
    "nvshim_nvml_sample_duration_seconds", Kind.GAUGE, "How long this scrape waited for NVML.",
)  # fmt: skip
NVML_DOUBTS = Family(
    "nvshim_nvml_disbelieved", Kind.GAUGE, "How much NVML said that cannot be, and was left out.",
)  # fmt: skip
LOOKS = Family(
    "nvshim_looks_total", Kind.COUNTER,
    "Looks at the node; one that found something wrong has the result failed.", ("result",),
)  # fmt: skip
LOOKING = Family("nvshim_look_duration_seconds", Kind.HISTOGRAM, "How long looks at the node took.")
LAST_LOOK = Family(
    "nvshim_last_good_look_timestamp_seconds", Kind.GAUGE,
    "When the last look was that found nothing wrong; absent if there was none.",
)  # fmt: skip
NODE_FAULTS = Family(
    "nvshim_node_faults", Kind.GAUGE, "How much the last look found wrong; the log says what.",
)  # fmt: skip
PART_UP = Family(
    "nvshim_part_up", Kind.GAUGE, "Whether a part of the agent does what it should.", ("part",)
)
PART_RESTARTS = Family(
    "nvshim_part_restarts_total", Kind.COUNTER, "How often a part was begun again.", ("part",)
)
CPU = Family("process_cpu_seconds_total", Kind.COUNTER, "Processor time of the agent.")
CHILDREN_CPU = Family(
    "nvshim_children_cpu_seconds_total", Kind.COUNTER,
    "Processor time of programs that the agent has run and that have ended.",
)  # fmt: skip
RESIDENT = Family("process_resident_memory_bytes", Kind.GAUGE, "Memory of the agent.")
VIRTUAL = Family("process_virtual_memory_bytes", Kind.GAUGE, "Address space of the agent.")
STARTED = Family("process_start_time_seconds", Kind.GAUGE, "When the agent began.")
OPEN_FDS = Family("process_open_fds", Kind.GAUGE, "Open descriptors of the agent.")
MAX_FDS = Family("process_max_fds", Kind.GAUGE, "How many it may have.")

# -- GPUs -------------------------------------------------------------------------------------

GPU_INFO = Family(
    "nvshim_gpu_info", Kind.INFO, "A GPU of this node.",
    (*_GPU, "minor", "mig_mode", "compute_capability", "brand", "excluded"),
)  # fmt: skip
GPU_UP = Family(
    "nvshim_gpu_up", Kind.GAUGE,
    "Whether the GPU answers; 0 for one that fell off the bus. Absent while NVML is not up.", _GPU,
)  # fmt: skip
GPU_WATCHED = Family(
    "nvshim_gpu_events_watched", Kind.GAUGE, "Whether errors of the GPU would be heard of.", _GPU
)
GPU_MEMORY_TOTAL = Family(
    "nvshim_gpu_memory_total_bytes", Kind.GAUGE, "The GPU's memory, what is reserved included.",
    _GPU,
)  # fmt: skip
GPU_MEMORY_USED = Family(
    "nvshim_gpu_memory_used_bytes", Kind.GAUGE, "How much of it is in use.", _GPU
)
GPU_BUSY = Family(
    "nvshim_gpu_utilization_ratio", Kind.GAUGE, "Of the time, how long a kernel ran.", _GPU
)
GPU_MEMORY_BUSY = Family(
    "nvshim_gpu_memory_busy_ratio", Kind.GAUGE,
    "Of the time, how long its memory was read or written; not how much of it is used.", _GPU,
)  # fmt: skip
GPU_ENCODER = Family(
    "nvshim_gpu_encoder_utilization_ratio", Kind.GAUGE,
    "Of the time, how long the video encoder was busy.", _GPU,
)  # fmt: skip
GPU_DECODER = Family(
    "nvshim_gpu_decoder_utilization_ratio", Kind.GAUGE,
    "Of the time, how long the video decoder was busy.", _GPU,
)  # fmt: skip
GPU_POWER = Family("nvshim_gpu_power_watts", Kind.GAUGE, "What the GPU draws.", _GPU)
GPU_ENERGY = Family(
    "nvshim_gpu_energy_joules_total", Kind.COUNTER,
    "What it has drawn since the driver was loaded.", _GPU,
)  # fmt: skip
GPU_TEMPERATURE = Family(
    "nvshim_gpu_temperature_celsius", Kind.GAUGE, "Temperature of the GPU.", _GPU
)
GPU_SM_CLOCK = Family(
    "nvshim_gpu_sm_clock_hertz", Kind.GAUGE, "Clock of its multiprocessors.", _GPU
)
GPU_MEMORY_CLOCK = Family("nvshim_gpu_memory_clock_hertz", Kind.GAUGE, "Clock of its memory.", _GPU)
GPU_THROTTLED = Family(
    "nvshim_gpu_clocks_throttled", Kind.GAUGE,
    "Whether its clocks are low for that reason.", (*_GPU, "reason"),
)  # fmt: skip
GPU_ECC = Family(
    "nvshim_gpu_ecc_errors_total", Kind.COUNTER,
    "Memory errors since the driver was loaded: type corrected or uncorrected.", (*_GPU, "type"),
)  # fmt: skip
GPU_ROWS_PENDING = Family(
    "nvshim_gpu_rows_pending", Kind.GAUGE,
    "Whether rows of memory wait to be replaced at the next reset.", _GPU,
)  # fmt: skip
GPU_ROWS_FAILED = Family(
    "nvshim_gpu_rows_failed", Kind.GAUGE,
    "Whether rows of memory could not be replaced: the GPU is to be exchanged.", _GPU,
)  # fmt: skip
GPU_XIDS = Family(
    "nvshim_gpu_xid_errors_total", Kind.COUNTER,
    "Errors that the driver reported since the agent began, by their number (XID) and the "
    "container that caused them, where that is known.",
    ("gpu", "uuid", "xid", *_CONTAINER),
)  # fmt: skip
GPU_LAST_XID = Family(
    "nvshim_gpu_xid_last_timestamp_seconds", Kind.GAUGE, "When the driver last reported that one.",
    ("gpu", "uuid", "xid"),
)  # fmt: skip
MIG_INFO = Family(
    "nvshim_mig_info", Kind.INFO, "A MIG device of this node.",
    (*_MIG, "gpu_instance", "compute_instance"),
)  # fmt: skip
MIG_MEMORY_TOTAL = Family(
    "nvshim_mig_memory_total_bytes", Kind.GAUGE, "The MIG device's memory.", _MIG
)
MIG_MEMORY_USED = Family(
    "nvshim_mig_memory_used_bytes", Kind.GAUGE, "How much of it is in use.", _MIG
)

# -- health -----------------------------------------------------------------------------------

HEALTH = Family(
    "nvshim_device_health", Kind.GAUGE,
    "Whether a GPU or MIG device is in that state: healthy and suspect ones are given to "
    "containers, unhealthy and recovering ones are not.",
    (*_DEVICE, "state"),
)  # fmt: skip
HEALTH_SINCE = Family(
    "nvshim_device_health_changed_timestamp_seconds", Kind.GAUGE,
    "When it came to be in its state; absent for one that always was healthy.", _DEVICE,
)  # fmt: skip
HEALTH_XID = Family(
    "nvshim_device_last_xid", Kind.GAUGE,
    "The number of the last error that its state is founded on; 0 for none.", _DEVICE,
)  # fmt: skip
HOLDERS = Family(
    "nvshim_device_containers", Kind.GAUGE,
    "How many containers hold a GPU or MIG device; for a GPU, those with a part of it too.",
    _DEVICE,
)  # fmt: skip

# -- containers -------------------------------------------------------------------------------

CONTAINER_INFO = Family(
    "nvshim_container_info", Kind.INFO, "A container that holds a device.",
    (*_CONTAINER, "container_id", "runtime_namespace"),
)  # fmt: skip
CONTAINER_STALE = Family(
    "nvshim_container_stale", Kind.GAUGE,
    "Whether it was made with a driver or devices that are no more: drain its pod.", _CONTAINER,
)  # fmt: skip
CONTAINER_ORPHAN = Family(
    "nvshim_container_orphan", Kind.GAUGE,
    "Whether it holds a device and nobody seems to know of it any more.", _CONTAINER,
)  # fmt: skip
CONTAINER_MISSING = Family(
    "nvshim_container_devices_missing", Kind.GAUGE,
    "How many devices the kubelet has given it that it runs without.", _CONTAINER,
)  # fmt: skip
CONTAINER_DEVICE = Family(
    "nvshim_container_device_info", Kind.INFO, "A device that a container holds.", _USE
)
USE_MEMORY = Family(
    "nvshim_container_gpu_memory_used_bytes", Kind.GAUGE,
    "How much of the device's memory the container uses.", _USE,
)  # fmt: skip
USE_SM = Family(
    "nvshim_container_gpu_sm_utilization_ratio", Kind.GAUGE,
    "Of the time, how long kernels of the container ran.", _USE,
)  # fmt: skip
USE_MEMORY_BUSY = Family(
    "nvshim_container_gpu_memory_busy_ratio", Kind.GAUGE,
    "Of the time, how long the container read or wrote the device's memory.", _USE,
)  # fmt: skip
USE_ENCODER = Family(
    "nvshim_container_gpu_encoder_utilization_ratio", Kind.GAUGE,
    "Of the time, how long the encoder worked for the container.", _USE,
)  # fmt: skip
USE_DECODER = Family(
    "nvshim_container_gpu_decoder_utilization_ratio", Kind.GAUGE,
    "Of the time, how long the decoder worked for the container.", _USE,
)  # fmt: skip
USE_ENERGY = Family(
    "nvshim_container_gpu_energy_joules_total", Kind.COUNTER,
    "The container's share of what the device has drawn since it is watched.", _USE,
)  # fmt: skip
USE_PROCESSES = Family(
    "nvshim_container_gpu_processes", Kind.GAUGE,
    "How many processes of the container use the device.", _USE,
)  # fmt: skip
OUTSIDE_MEMORY = Family(
    "nvshim_outside_gpu_memory_used_bytes", Kind.GAUGE,
    "Memory of the device that processes of no known container use.", _DEVICE,
)  # fmt: skip
OUTSIDE_PROCESSES = Family(
    "nvshim_outside_gpu_processes", Kind.GAUGE,
    "How many processes of no known container use the device.", _DEVICE,
)  # fmt: skip
UNREADABLE = Family(
    "nvshim_containers_unreadable", Kind.GAUGE,
    "How many containers there are of which it is not known what they hold.",
)  # fmt: skip

# -- the device plugin ------------------------------------------------------------------------

RESOURCE = Family(
    "nvshim_resource_info", Kind.INFO, "A resource that the kubelet is told of.",
    ("resource", "original", "sharing"),
)  # fmt: skip
RESOURCE_REPLICAS = Family(
    "nvshim_resource_replicas", Kind.GAUGE, "How many share one device of it.", ("resource",)
)
RESOURCE_DEVICES = Family(
    "nvshim_resource_devices", Kind.GAUGE,
    "How many devices, or shares of devices, of a resource are in that state.",
    ("resource", "state"),
)  # fmt: skip
UNHELD = Family(
    "nvshim_resource_devices_unheld", Kind.GAUGE,
    "How many devices of a resource the kubelet has given to containers that do not have them yet.",
    ("resource",),
)  # fmt: skip
MPS_UP = Family(
    "nvshim_mps_daemon_up", Kind.GAUGE,
    "Whether containers can use the MPS control daemon of a resource.", ("resource",),
)  # fmt: skip
MPS_RESTARTS = Family(
    "nvshim_mps_daemon_restarts_total", Kind.COUNTER,
    "How often it was started again because it had ended by itself.", ("resource",),
)  # fmt: skip
REGISTRATIONS = Family(
    "nvshim_kubelet_registrations_total", Kind.COUNTER,
    "Registrations with a kubelet, by result.", ("resource", "result"),
)  # fmt: skip
UPDATES = Family(
    "nvshim_kubelet_device_lists_total", Kind.COUNTER,
    "Lists of devices that a kubelet was sent.", ("resource",),
)  # fmt: skip
ALLOCATIONS = Family(
    "nvshim_allocations_total", Kind.COUNTER,
    "Answers to the kubelet's Allocate, by result.", ("resource", "result"),
)  # fmt: skip
ALLOCATING = Family(
    "nvshim_allocation_duration_seconds", Kind.HISTOGRAM, "How long answers to Allocate took.",
    ("resource",),
)  # fmt: skip

GROUPS: Final = (
    Group("The agent", (
        BUILD, DRIVER, NVML_UP, NVML_TIME, NVML_WAIT, NVML_DOUBTS, LOOKS, LOOKING, LAST_LOOK,
        NODE_FAULTS, PART_UP, PART_RESTARTS, CPU, CHILDREN_CPU, RESIDENT, VIRTUAL, STARTED,
        OPEN_FDS, MAX_FDS,
    )),
    Group("GPUs and MIG devices", (
        GPU_INFO, GPU_UP, GPU_WATCHED, GPU_MEMORY_TOTAL, GPU_MEMORY_USED, GPU_BUSY, GPU_MEMORY_BUSY,
        GPU_ENCODER, GPU_DECODER, GPU_POWER, GPU_ENERGY, GPU_TEMPERATURE, GPU_SM_CLOCK,
        GPU_MEMORY_CLOCK, GPU_THROTTLED, GPU_ECC, GPU_ROWS_PENDING, GPU_ROWS_FAILED, GPU_XIDS,
        GPU_LAST_XID, MIG_INFO, MIG_MEMORY_TOTAL, MIG_MEMORY_USED,
    )),
    Group("Health", (HEALTH, HEALTH_SINCE, HEALTH_XID, HOLDERS)),
    Group("Containers", (
        CONTAINER_INFO, CONTAINER_STALE, CONTAINER_ORPHAN, CONTAINER_MISSING, CONTAINER_DEVICE,
        USE_MEMORY, USE_SM, USE_MEMORY_BUSY, USE_ENCODER, USE_DECODER, USE_ENERGY, USE_PROCESSES,
        OUTSIDE_MEMORY, OUTSIDE_PROCESSES, UNREADABLE,
    )),
    Group("The device plugin", (
        RESOURCE, RESOURCE_REPLICAS, RESOURCE_DEVICES, UNHELD, MPS_UP, MPS_RESTARTS, REGISTRATIONS,
        UPDATES, ALLOCATIONS, ALLOCATING,
    )),
)  # fmt: skip
"""All families, by what they are of."""

FAMILIES: Final = tuple(family for group in GROUPS for family in group.families)
"""All families, in the order in which they are told."""
