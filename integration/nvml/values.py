"""What is seen of GPUs at work, as values."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

COMPUTE: Final = "compute"
GRAPHICS: Final = "graphics"


def now() -> float:
    """The time by which samples and events are dated: seconds since boot (CLOCK_BOOTTIME)."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def epoch(when: float) -> float:
    """A time in seconds since boot, in seconds since the epoch, by the clock as it is now."""
    return time.time() - now() + when


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """What one process uses of one GPU or MIG device."""

    pid: int  # the process, in the node's pid namespace
    device: str  # UUID of the GPU or MIG device
    kind: str  # COMPUTE or GRAPHICS
    memory_bytes: int | None = None  # of the device's memory; None if NVML does not say
    # of the time in the last period that its kernels ran; None if not said
    sm_percent: int | None = None
    # of the time that device memory was read or written; None if not said
    memory_percent: int | None = None
    encoder_percent: int | None = None  # of the encoder's time; None if not said
    decoder_percent: int | None = None  # of the decoder's time; None if not said


@dataclass(frozen=True, slots=True)
class DeviceSample:
    """What a MIG device is like at one moment."""

    uuid: str  # "MIG-…"
    memory_total_bytes: int | None = None  # None if not said
    memory_used_bytes: int | None = None  # None if not said


@dataclass(frozen=True, slots=True)
class GpuSample:
    """What a GPU is like at one moment; None for what NVML does not say."""

    uuid: str  # "GPU-…"
    memory_total_bytes: int | None = None  # of all its memory
    memory_used_bytes: int | None = None  # of it, in use
    gpu_percent: int | None = None  # of the time that a kernel ran
    memory_percent: int | None = None  # of the time that memory was read or written
    encoder_percent: int | None = None  # of the encoder's time
    decoder_percent: int | None = None  # of the decoder's time
    power_watts: float | None = None  # what it draws
    energy_joules: float | None = None  # what it has drawn since the driver was loaded
    temperature_celsius: int | None = None  # of the GPU
    sm_clock_hz: int | None = None  # of its multiprocessors
    memory_clock_hz: int | None = None  # of its memory
    ecc_corrected: int | None = None  # errors corrected since the driver was loaded
    ecc_uncorrected: int | None = None  # errors that could not be
    rows_pending: bool | None = None  # whether rows of memory wait to be remapped at the next reset
    rows_failed: bool | None = None  # whether rows could not be remapped
    throttle_reasons: int | None = None  # NVML's bits of why its clocks are low
    mig: tuple[DeviceSample, ...] = ()  # its MIG devices
    # what has to be done to recover it (nvmlDeviceGpuRecoveryAction_t); 0 for nothing
    recovery_action: int | None = None
    lost: str = ""  # why it does not answer; "" if it does
    # why NVML does not say something, by the name that the attribute has here
    missing: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sample:
    """What NVML said at one moment."""

    when: float  # seconds since boot (CLOCK_BOOTTIME)
    driver: str = ""  # the version that NVML is of; "" if it did not say
    gpus: tuple[GpuSample, ...] = ()  # of each GPU that it counts and can name
    processes: tuple[ProcessUse, ...] = ()  # what each process uses of each GPU or MIG device
    # why there is nothing else in it: NVML failed, crashed or did not answer in time; "" if it
    # answered
    failure: str = ""
    notes: tuple[str, ...] = ()  # what it said and was not believed, a line each
    # UUIDs of the node's GPUs that it does not count; empty if it tells of others that are none of
    # the node's, since those may be they
    uncounted: tuple[str, ...] = ()


class Sampler(Protocol):
    """Who asks NVML for samples: the agent's is ``state.sampler``."""

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
    """Something that happened to a GPU."""

    when: float  # seconds since boot (CLOCK_BOOTTIME)
    kind: str  # "xid" or "ecc-double"
    gpu: str  # UUID of the GPU; "" where it is not known
    bus_id: str = ""  # its PCI address, as far as it was told; "" if not
    xid: int = 0  # the number; 0 for none
    gpu_instance: int | None = None  # of MIG; None if it was not told
    compute_instance: int | None = None  # likewise
    pid: int = 0  # the process that the kernel's log names, in the node's pid namespace; 0 for none
    process: str = ""  # its name there
    source: str = "nvml"  # "nvml" or "kernel"
    text: str = ""  # what was told besides, one line; it is printable
    times: int = 1  # how many of the same this stands for; more than one in a storm of them
    # what /proc/PID/cgroup had when the log was read; "" if the process had ended
    cgroups: str = ""
