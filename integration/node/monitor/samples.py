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

# Beyond these a number is not one: bytes, watts, joules, degrees, MHz, errors, process ids (the
# kernel's PID_MAX_LIMIT), instances of MIG.
_MEMORY: Final = 1 << 45
_MILLIWATTS: Final = 20_000_000
_MILLIJOULES: Final = 1 << 62
_HOTTEST, _COLDEST = 200, -60
_MHZ: Final = 100_000
_COUNT: Final = 1 << 62
_PID: Final = 1 << 22
_INSTANCE: Final = 1 << 8

_GPUS: Final = 256
_DEVICES: Final = 64
_PROCESSES: Final = 4096
_FIELDS: Final = 5  # of a process, and of what it uses
_NOTES: Final = 64

# What of a GPU an answer of NVML tells.
_ATTRIBUTES: Final[Mapping[str, tuple[str, ...]]] = {
    "memory": ("memory_total_bytes", "memory_used_bytes"),
    "utilisation": ("gpu_percent", "memory_percent"),
    "encoder": ("encoder_percent",),
    "decoder": ("decoder_percent",),
    "power": ("power_watts",),
    "energy": ("energy_joules",),
    "temperature": ("temperature_celsius",),
    "sm_clock": ("sm_clock_hz",),
    "memory_clock": ("memory_clock_hz",),
    "ecc_corrected": ("ecc_corrected",),
    "ecc_uncorrected": ("ecc_uncorrected",),
    "rows": ("rows_pending", "rows_failed"),
    "throttle": ("throttle_reasons",),
}


def sample_of(line: bytes, when: float, known: Mapping[str, int]) -> Sample:
    """The sample that a line is.

    Args:
        line: what the child said.
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
        fields = _Fields(said, uuid, self)
        total, used = fields.memory()
        rates = fields.list("utilisation", 2)
        rows = fields.list("rows", 4)
        devices, instances = self._mig(said.get("mig"))
        self._processes(said, uuid, instances)
        watts, joules = fields.number("power", _MILLIWATTS), fields.number("energy", _MILLIJOULES)
        sm, memory = fields.number("sm_clock", _MHZ), fields.number("memory_clock", _MHZ)
        return GpuSample(
            uuid,
            memory_total_bytes=total,
            memory_used_bytes=used,
            gpu_percent=fields.percent("utilisation", rates[0]),
            memory_percent=fields.percent("utilisation", rates[1]),
            encoder_percent=fields.percent("encoder", said.get("encoder")),
            decoder_percent=fields.percent("decoder", said.get("decoder")),
            power_watts=None if watts is None else watts / 1000,
            energy_joules=None if joules is None else joules / 1000,
            temperature_celsius=fields.number("temperature", _HOTTEST, _COLDEST),
            sm_clock_hz=None if sm is None else sm * 1_000_000,
            memory_clock_hz=None if memory is None else memory * 1_000_000,
            ecc_corrected=fields.number("ecc_corrected", _COUNT),
            ecc_uncorrected=fields.number("ecc_uncorrected", _COUNT),
            rows_pending=fields.flag("rows pending", rows[2]),
            rows_failed=fields.flag("rows failed", rows[3]),
            throttle_reasons=fields.number("throttle", (1 << 64) - 1),
            mig=devices,
            missing=_missing(said.get("missing")),
        )

    def _mig(self, said: Any) -> tuple[tuple[DeviceSample, ...], dict[tuple[int, int], str]]:
        """The MIG devices, and which of them has which instances."""
        devices, instances = [], {}
        for each in words.entries(said, _DEVICES):
            uuid = words.uuid(each.get("uuid"), "MIG") if isinstance(each, dict) else ""
            if not uuid or uuid in self._told:
                self.note("a MIG device that makes no sense")
                continue
            self._told.add(uuid)
            total, used = _Fields(each, uuid, self).memory()
            devices.append(DeviceSample(uuid, total, used))
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


def _missing(said: Any) -> dict[str, str]:
    """Why something is not said, by the names of our attributes."""
    whys = said if isinstance(said, dict) else {}
    return {
        attribute: why
        for name, attributes in _ATTRIBUTES.items()
        if (why := words.text(whys.get(name)))
        for attribute in attributes
    }


def _pair(gpu_instance: Any, compute_instance: Any) -> tuple[Any, Any]:
    """The instances that a device is, or a process is in; None for what is not said."""
    return words.number(gpu_instance, _INSTANCE), words.number(compute_instance, _INSTANCE)


def _is_pid(value: Any) -> bool:
    return words.number(value, _PID, 1) is not None


class _Fields:
    """The numbers of one device."""

    def __init__(self, said: dict[str, Any], uuid: str, reader: _Reader) -> None:
        self._said, self._uuid, self._reader = said, uuid, reader

    def number(self, name: str, most: int, least: int = 0) -> Any:
        return self._checked(name, self._said.get(name), most, least)

    def percent(self, name: str, value: Any) -> Any:
        return self._checked(name, value, 100, 0)

    def flag(self, name: str, value: Any) -> bool | None:
        checked = self._checked(name, value, 1, 0)
        return None if checked is None else bool(checked)

    def list(self, name: str, length: int) -> list[Any]:
        return [*words.entries(self._said.get(name), length), *[None] * length][:length]

    def memory(self) -> tuple[Any, Any]:
        total, used = self.list("memory", 2)
        total = self._checked("memory", total, _MEMORY, 1)
        return total, self._checked("memory used", used, _MEMORY if total is None else total, 0)

    def _checked(self, name: str, value: Any, most: int, least: int) -> Any:
        if value is None:
            return None
        checked = words.number(value, most, least)
        if checked is None:
            self._reader.note(f"{self._uuid}: {name} {value!r:.40}")
        return checked
