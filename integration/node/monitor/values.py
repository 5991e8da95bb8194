"""What is seen of GPUs at work, as values."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

COMPUTE: Final = "compute"
GRAPHICS: Final = "graphics"


def now() -> float:
    """The time by which samples and events are dated: seconds since boot (CLOCK_BOOTTIME)."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """What one process uses of one GPU or MIG device.

    Attributes:
        pid: the process, in the node's pid namespace.
        device: UUID of the GPU or MIG device.
        kind: :data:`COMPUTE` or :data:`GRAPHICS`.
        memory_bytes: of the device's memory; None if NVML does not say.
        sm_percent: of the time in the last period that its kernels ran; None if not said.
        memory_percent: of the time that device memory was read or written; None if not said.
        encoder_percent: of the encoder's time; None if not said.
        decoder_percent: of the decoder's time; None if not said.
    """

    pid: int
    device: str
    kind: str
    memory_bytes: int | None = None
    sm_percent: int | None = None
    memory_percent: int | None = None
    encoder_percent: int | None = None
    decoder_percent: int | None = None


@dataclass(frozen=True, slots=True)
class DeviceSample:
    """What a MIG device is like at one moment.

    Attributes:
        uuid: "MIG-…".
        memory_total_bytes: None if not said.
        memory_used_bytes: None if not said.
    """

    uuid: str
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class GpuSample:
    """What a GPU is like at one moment; None for what NVML does not say.

    Attributes:
        uuid: "GPU-…".
        memory_total_bytes: of all its memory.
        memory_used_bytes: of it, in use.
        gpu_percent: of the time that a kernel ran.
        memory_percent: of the time that memory was read or written.
        encoder_percent: of the encoder's time.
        decoder_percent: of the decoder's time.
        power_watts: what it draws.
        energy_joules: what it has drawn since the driver was loaded.
        temperature_celsius: of the GPU.
        sm_clock_hz: of its multiprocessors.
        memory_clock_hz: of its memory.
        ecc_corrected: errors corrected since the driver was loaded.
        ecc_uncorrected: errors that could not be.
        rows_pending: whether rows of memory wait to be remapped at the next reset.
        rows_failed: whether rows could not be remapped.
        throttle_reasons: NVML's bits of why its clocks are low.
        mig: its MIG devices.
        recovery_action: what has to be done to recover it (nvmlDeviceGpuRecoveryAction_t); 0 for
            nothing.
        lost: why it does not answer; "" if it does.
        missing: why NVML does not say something, by the name that the attribute has here.
    """

    uuid: str
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    gpu_percent: int | None = None
    memory_percent: int | None = None
    encoder_percent: int | None = None
    decoder_percent: int | None = None
    power_watts: float | None = None
    energy_joules: float | None = None
    temperature_celsius: int | None = None
    sm_clock_hz: int | None = None
    memory_clock_hz: int | None = None
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    rows_pending: bool | None = None
    rows_failed: bool | None = None
    throttle_reasons: int | None = None
    mig: tuple[DeviceSample, ...] = ()
    recovery_action: int | None = None
    lost: str = ""
    missing: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sample:
    """What NVML said at one moment.

    Attributes:
        when: seconds since boot (CLOCK_BOOTTIME).
        driver: the version that NVML is of; "" if it did not say.
        gpus: of each GPU that it counts and can name.
        processes: what each process uses of each GPU or MIG device.
        failure: why there is nothing else in it: NVML failed, crashed or did not answer in time;
            "" if it answered.
        notes: what it said and was not believed, a line each.
        uncounted: UUIDs of the node's GPUs that it does not count; empty if it tells of others that
            are none of the node's, since those may be they.
    """

    when: float
    driver: str = ""
    gpus: tuple[GpuSample, ...] = ()
    processes: tuple[ProcessUse, ...] = ()
    failure: str = ""
    notes: tuple[str, ...] = ()
    uncounted: tuple[str, ...] = ()


class Sampler(Protocol):
    """Who asks NVML for samples: the agent's is ``board.sampler``."""

    async def sample(self, *, max_age: float) -> Sample:
        """What the GPUs are like now.

        All who ask at the same time share one answer. It comes for as long as NVML answers one
        question after the other in time; when it does not, it is one with a ``failure``, and so for
        a while is whatever is asked next.

        Args:
            max_age: seconds that an answer may be old that somebody else was given.
        """


@dataclass(frozen=True, slots=True)
class GpuEvent:
    """Something that happened to a GPU.

    Attributes:
        when: seconds since boot (CLOCK_BOOTTIME).
        kind: "xid" or "ecc-double".
        gpu: UUID of the GPU; "" where it is not known.
        bus_id: its PCI address, as far as it was told; "" if not.
        xid: the number; 0 for none.
        gpu_instance: of MIG; None if it was not told.
        compute_instance: likewise.
        pid: the process that the kernel's log names, in the node's pid namespace; 0 for none.
        process: its name there.
        source: "nvml" or "kernel".
        text: what was told besides, one line; it is printable.
        times: how many of the same this stands for; more than one in a storm of them.
        cgroups: what /proc/PID/cgroup had when the log was read; "" if the process had ended.
    """

    when: float
    kind: str
    gpu: str
    bus_id: str = ""
    xid: int = 0
    gpu_instance: int | None = None
    compute_instance: int | None = None
    pid: int = 0
    process: str = ""
    source: str = "nvml"
    text: str = ""
    times: int = 1
    cgroups: str = ""
