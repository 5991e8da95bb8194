"""Samples and events of GPUs, as values."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final, Protocol

from api.values import dataclass, field

COMPUTE: Final = "compute"
GRAPHICS: Final = "graphics"


def now() -> float:
    """Return the time of samples and events: seconds since boot (CLOCK_BOOTTIME)."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def epoch(when: float) -> float:
    """Convert seconds since boot to seconds since the epoch, by the clock as it is now."""
    return time.time() - now() + when


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """A process's use of one GPU or MIG device; None for what NVML does not report."""

    pid: int  # the process, in the node's pid namespace
    device: str  # UUID of the GPU or MIG device
    kind: str  # COMPUTE or GRAPHICS
    memory_bytes: int | None = None  # of device memory
    sm_percent: int | None = None  # time in the last period in which its kernels ran
    memory_percent: int | None = None  # time in which device memory was read or written
    encoder_percent: int | None = None
    decoder_percent: int | None = None


@dataclass(frozen=True, slots=True)
class Activity:
    """How busy the parts of a GPU or GPU instance were since the last sample; None if unknown.

    Ratios are means from 0 to 1. Data that was sent and received is in bytes per second.
    """

    graphics: float | None = None  # time in which the compute or graphics engine was active
    sm: float | None = None  # time in which an SM had a warp, the mean of all SMs
    sm_occupancy: float | None = None  # resident warps, as a share of the maximum
    tensor: float | None = None  # time in which the tensor cores were active
    dram: float | None = None  # time in which device memory was read or written
    fp64: float | None = None
    fp32: float | None = None
    fp16: float | None = None
    pcie_sent: float | None = None
    pcie_received: float | None = None
    nvlink_sent: float | None = None
    nvlink_received: float | None = None


@dataclass(frozen=True, slots=True)
class DeviceSample:
    """A MIG device at one time; None for what NVML does not report."""

    uuid: str  # "MIG-…"
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    memory_reserved_bytes: int | None = None  # by the driver; not part of the used memory
    activity: Activity = Activity()  # that of its GPU instance


@dataclass(frozen=True, slots=True)
class Fabric:
    """A GPU's place in an NVLink fabric."""

    state: str  # how far its registration is: "not-started", "in-progress" or "completed"
    cluster_uuid: str = ""  # "" unless it is registered with a fabric of several machines
    clique: int | None = None  # the part of the cluster that it can reach; None without a cluster
    health: str = ""  # "healthy", "unhealthy" or "limited-capacity"; "" if NVML does not say
    failure: str = ""  # why its registration failed, in NVML's words; "" if it did not

    @property
    def name(self) -> str:
        """Cluster and clique as in the label nvidia.com/gpu.clique; "" without a cluster."""
        return f"{self.cluster_uuid}.{self.clique}" if self.cluster_uuid else ""


@dataclass(frozen=True, slots=True)
class GpuSample:
    """A GPU at one time; None for what NVML does not report."""

    uuid: str  # "GPU-…"
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    gpu_percent: int | None = None  # time in which a kernel ran
    memory_percent: int | None = None  # time in which memory was read or written
    encoder_percent: int | None = None
    decoder_percent: int | None = None
    power_watts: float | None = None
    energy_joules: float | None = None  # since the driver was loaded
    temperature_celsius: int | None = None
    sm_clock_hz: int | None = None
    memory_clock_hz: int | None = None
    ecc_corrected: int | None = None  # errors since the driver was loaded
    ecc_uncorrected: int | None = None
    rows_pending: bool | None = None  # rows of memory will be remapped at the next reset
    rows_failed: bool | None = None  # rows could not be remapped
    throttle_reasons: int | None = None  # NVML's bits that explain low clocks
    mig: tuple[DeviceSample, ...] = ()
    recovery_action: int | None = None  # nvmlDeviceGpuRecoveryAction_t; 0 for none
    unrepairable_memory: bool | None = None  # it has memory that cannot be repaired
    channel_repair_pending: bool | None = None  # a memory channel is repaired at the next reset
    tpc_repair_pending: bool | None = None  # a processing cluster is repaired at the next reset
    fabric: Fabric | None = None  # None without an NVLink fabric, or before Hopper
    lost: str = ""  # why it does not answer; "" if it does
    # why a value is None, by the attribute's name
    missing: Mapping[str, str] = field(default_factory=dict)
    memory_reserved_bytes: int | None = None  # by the driver; not part of the used memory
    memory_temperature_celsius: int | None = None
    pcie_replays: int | None = None
    nvlink_sent_bytes: int | None = None  # over all links, without the protocol's overhead
    nvlink_received_bytes: int | None = None
    rows_corrected: int | None = None  # rows remapped because of correctable errors
    rows_uncorrected: int | None = None  # because of uncorrectable errors
    pages_corrected: int | None = None  # pages retired because of correctable errors
    pages_uncorrected: int | None = None  # because of uncorrectable errors
    pages_pending: bool | None = None  # pages will be retired at the next reset
    activity: Activity = Activity()


@dataclass(frozen=True, slots=True)
class Sample:
    """NVML's answers at one time."""

    when: float  # seconds since boot (CLOCK_BOOTTIME)
    driver: str = ""  # its version; "" if NVML did not report it
    gpus: tuple[GpuSample, ...] = ()  # each GPU that NVML lists with a UUID
    processes: tuple[ProcessUse, ...] = ()
    # why the rest is empty: NVML failed, crashed or did not answer in time; "" if it answered
    failure: str = ""
    notes: tuple[str, ...] = ()  # answers that were not believed, a line each
    # UUIDs of the node's GPUs that NVML does not list; empty if NVML lists GPUs that are not in the
    # inventory, since they may be the same
    uncounted: tuple[str, ...] = ()


class Sampler(Protocol):
    """Takes samples; the agent's is ``state.sampler``."""

    async def sample(self, *, max_age: float, profile: bool = False) -> Sample:
        """Return a sample.

        Callers that ask at the same time share it. It may take long, provided that NVML answers
        each call in time. If NVML does not, the sample has a ``failure``, and so have all samples
        for a while.

        Args:
            max_age: how old the sample may be, in seconds.
            profile: whether to include the activity of GPUs and MIG devices.
        """


@dataclass(frozen=True, slots=True)
class SwitchError:
    """An error of an NVSwitch."""

    switch: str  # the driver's name of it ("nvidia-nvswitch0")
    number: int  # the SXid
    severity: str  # "fatal", "non-fatal" or "correctable"; "" if the driver does not say
    link: int | None = None  # the switch's port; None if it does not concern a single port


@dataclass(frozen=True, slots=True)
class GpuEvent:
    """An error of a GPU, or of an NVSwitch."""

    when: float  # seconds since boot (CLOCK_BOOTTIME)
    kind: str  # "xid", "ecc-double", "recovery-action" or "sxid"
    gpu: str  # its UUID, or that of the GPU at the switch's port; "" if unknown
    bus_id: str = ""  # its PCI address, perhaps without the function; "" if unknown
    xid: int = 0  # the number; 0 for none
    # of a "recovery-action": nvmlDeviceGpuRecoveryAction_t; None if NVML does not say
    action: int | None = None
    switch: SwitchError | None = None  # of an "sxid"
    gpu_instance: int | None = None  # of MIG; None if unknown
    compute_instance: int | None = None  # the same
    pid: int = 0  # the process in the kernel's log, in the node's pid namespace; 0 for none
    process: str = ""  # its name there
    source: str = "nvml"  # "nvml" or "kernel"
    text: str = ""  # the rest of the message: one printable line
    times: int = 1  # how many equal events this stands for; more than one in a storm
    # /proc/PID/cgroup when the log was read; "" if the process had ended
    cgroups: str = ""
