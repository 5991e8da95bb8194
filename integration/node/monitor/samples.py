"""The meaning of what the child says of GPUs, checked before it is believed.

Rules
- A number that cannot be true (more than a hundred percent, more memory used than there is) is
  taken for not said. That it was said is a note of the sample.
- A GPU that the inventory does not have is not believed in; one that it has and NVML does not tell
  of is noted. Without an inventory any GPU is believed in.
- A process counts if it has a number. 0 is what NVML says of those that it may not name (they are
  in another pid namespace); what they use is in the GPU's own numbers only.
- In MIG mode a process is one of the MIG device whose two instances NVML says it is in.
- A process that NVML lists, and gives no utilisation of, has used nothing, if it tells of
  utilisation at all; in MIG mode it does not.

Source: the NVML API; nvmlProcessInfo_t, nvmlProcessUtilizationSample_t, NVML_VALUE_NOT_AVAILABLE.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from integration.node.monitor import words
from integration.node.monitor.values import (
    COMPUTE,
    GRAPHICS,
    DeviceSample,
    GpuSample,
    ProcessUse,
    Sample,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["sample_of"]

_MEMORY: Final = 1 << 45
_COUNT: Final = 1 << 62
_PID: Final = 1 << 22  # the kernel's PID_MAX_LIMIT
_INSTANCE: Final = 1 << 8

_GPUS: Final = 256
_DEVICES: Final = 64
_PROCESSES: Final = 4096
_FIELDS: Final = 5  # of a process, and of what it uses
_NOTES: Final = 64

_BOUNDS: Final[Mapping[str, tuple[float, float]]] = {
    "memory_total_bytes": (1, _MEMORY),
    "memory_used_bytes": (0, _MEMORY),
    "gpu_percent": (0, 100),
    "memory_percent": (0, 100),
    "encoder_percent": (0, 100),
    "decoder_percent": (0, 100),
    "power_watts": (0, 20_000),
    "energy_joules": (0, _COUNT / 1000),
    "temperature_celsius": (-60, 200),
    "sm_clock_hz": (0, 100_000_000_000),
    "memory_clock_hz": (0, 100_000_000_000),
    "ecc_corrected": (0, _COUNT),
    "ecc_uncorrected": (0, _COUNT),
    "rows_pending": (0, 1),
    "rows_failed": (0, 1),
    "recovery_action": (0, 255),
    "throttle_reasons": (0, (1 << 64) - 1),
}
"""What of a GPU NVML may say, by the names of its sample: beyond these a number cannot be true."""

_FRACTIONS: Final = frozenset({"power_watts", "energy_joules"})
_OF_MEMORY: Final = ("memory_total_bytes", "memory_used_bytes")
_FLAGS: Final = ("rows_pending", "rows_failed")


def sample_of(line: bytes, when: float, known: Mapping[str, int]) -> Sample:
    """The sample that a line is.

    Args:
        when: it was heard, in seconds since boot.
        known: the indices of the node's GPUs by their UUIDs; empty if that is not known.

    Returns:
        It. One that cannot be understood, or says that NVML failed, has a ``failure``.
    """
    said = words.parse(line)
    if "error" in said:
        return Sample(when, failure=words.text(said["error"]) or "NVML failed")
    if not isinstance(said.get("gpus"), list):
        return Sample(when, failure="an answer that makes no sense")
    reader = _Reader(known)
    entries = words.entries(said["gpus"], _GPUS)
    gpus = tuple(gpu for each in entries if (gpu := reader.gpu(each)) is not None)
    missing = sorted(known.keys() - {gpu.uuid for gpu in gpus})
    for uuid in missing:
        reader.note(f"NVML does not tell of {uuid}")
    for line_ in words.entries(said.get("notes"), _NOTES):
        reader.note(words.text(line_))
    return Sample(
        when,
        driver=words.text(said.get("driver")),
        gpus=gpus,
        processes=tuple(reader.processes.values()),
        notes=tuple(reader.notes),
        uncounted=tuple(missing) if len(gpus) == len(entries) else (),
    )


class _Reader:
    """What was read of one answer so far."""

    def __init__(self, known: Mapping[str, int]) -> None:
        self._known = known
        self._by_index = {index: uuid for uuid, index in known.items()}
        self._told: set[str] = set()
        self.processes: dict[tuple[int, str, str], ProcessUse] = {}
        self.notes: dict[str, None] = {}

    def note(self, line: str) -> None:
        if line and len(self.notes) < _NOTES:
            self.notes[line] = None

    def gpu(self, said: Any) -> GpuSample | None:
        """One GPU; None if it is none of ours."""
        if not isinstance(said, dict):
            self.note("a GPU that makes no sense")
            return None
        uuid, lost = words.uuid(said.get("uuid"), "GPU"), words.text(said.get("lost"))
        if not uuid:  # its number is all that it still tells, and is the inventory's too
            uuid = self._by_index.get(words.number(said.get("index"), _GPUS), "")
        if not uuid or uuid in self._told or (self._known and uuid not in self._known):
            which = uuid or f"its GPU {said.get('index')!r:.20}"
            self.note(f"NVML tells of {which}: " + (lost or "it is none of this node's"))
            return None
        self._told.add(uuid)
        if lost:
            return GpuSample(uuid, lost=lost)
        values = self._memory(said, uuid)
        others = [name for name in _BOUNDS if name not in values]
        values |= {name: self._checked(said, uuid, name) for name in others}
        values |= {name: None if (n := values[name]) is None else bool(n) for name in _FLAGS}
        devices, instances = self._mig(said.get("mig"))
        self._processes(said, uuid, instances)
        whys = said["missing"] if isinstance(said.get("missing"), dict) else {}
        missing = {name: why for name in _BOUNDS if (why := words.text(whys.get(name)))}
        return GpuSample(uuid, **values, mig=devices, missing=missing)

    def _checked(self, said: dict[str, Any], uuid: str, name: str) -> Any:
        """A number; None for one that was not said, or cannot be true, which is noted."""
        value, (least, most) = said.get(name), _BOUNDS[name]
        if value is None:
            return None
        checked = words.number(value, most, least, fraction=name in _FRACTIONS)
        if checked is None:
            self.note(f"{uuid}: {name} {value!r:.40}")
        return checked

    def _memory(self, said: dict[str, Any], uuid: str) -> dict[str, Any]:
        """How much memory a device has, and how much of that is used."""
        total, used = (self._checked(said, uuid, name) for name in _OF_MEMORY)
        if used is not None and total is not None and used > total:
            self.note(f"{uuid}: memory_used_bytes {used}")
            used = None
        return dict(zip(_OF_MEMORY, (total, used), strict=True))

    def _mig(self, said: Any) -> tuple[tuple[DeviceSample, ...], dict[tuple[int, int], str]]:
        """The MIG devices, and which of them has which instances."""
        devices, instances = [], {}
        for each in words.entries(said, _DEVICES):
            uuid = words.uuid(each.get("uuid"), "MIG") if isinstance(each, dict) else ""
            if not uuid or uuid in self._told:
                self.note("a MIG device that makes no sense")
                continue
            self._told.add(uuid)
            devices.append(DeviceSample(uuid, **self._memory(each, uuid)))
            pair = (
                words.number(each.get("gi"), _INSTANCE),
                words.number(each.get("ci"), _INSTANCE),
            )
            if None not in pair:
                instances[pair] = uuid
        return tuple(devices), instances

    def _processes(self, said: Any, gpu: str, instances: dict[tuple[int, int], str]) -> None:
        use: dict[Any, list[Any]] | None = None
        if isinstance(said.get("use"), list):
            told = [words.entries(each, _FIELDS) for each in words.entries(said["use"], _PROCESSES)]
            use = {each[0]: each[1:] for each in told if len(each) == _FIELDS and _is_pid(each[0])}
        for each in words.entries(said.get("processes"), _PROCESSES):
            kind, pid, memory, *pair = [*words.entries(each, _FIELDS), *[None] * _FIELDS][:_FIELDS]
            if kind not in (COMPUTE, GRAPHICS) or not _is_pid(pid):
                self.note(f"{gpu}: a process {pid!r:.20}, which cannot be named")
                continue
            device = instances.get(_pair(*pair), gpu)
            percents = [None] * 4
            if use is not None:
                percents = [words.number(part, 100) for part in use.get(pid, [0] * 4)]
            # A client of MPS may be told of twice.
            key = (pid, device, kind)
            before = self.processes.get(key)
            if before is not None and before.memory_bytes is not None:
                continue
            self.processes[key] = ProcessUse(
                pid, device, kind, words.number(memory, _MEMORY), *percents
            )


def _pair(gpu_instance: Any, compute_instance: Any) -> tuple[Any, Any]:
    """The instances that a device is, or a process is in; None for what is not said."""
    return words.number(gpu_instance, _INSTANCE), words.number(compute_instance, _INSTANCE)


def _is_pid(value: Any) -> bool:
    return words.number(value, _PID, 1) is not None
