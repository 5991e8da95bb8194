"""Answering what the GPUs are like, in the child.

It says ``{"ready": DRIVER}`` once NVML is up. Then it answers each line that it reads, and ends
when there are no more::

    {"gpus": {INDEX: UUID, …}, "given_up": {INDEX: WHY, …}, "alone": BOOLEAN, "patience": SECONDS}

"gpus" are the node's as the inventory has them. The answer is what a
:class:`~integration.nvml.values.Sample` is made of, by the names and in the units that it
has, and "hanging". Before that it says ``{"beat": 1}`` now and then, as long as one question after
the other is answered: so a driver that is slow is told from one that hangs.

No GPU takes the others with it. One that does not answer while others do is told as lost after
``patience``, and is "hanging": then this process is of no use any more. Where NVML crashes, GPUs
are asked alone, one after the other, and ``{"asks": INDEX}`` is said before each, so that the agent
knows which it was. What was given up is told as lost for that reason, and not asked.

GPUs are asked at the same time, which NVML allows: a slow driver may take 0.1 s for each of some
hundred questions. NVML takes no notice of a GPU that comes back, so after one was lost it is begun
anew. Whether one is lost is decided by the rules that the engine goes by
(:mod:`hooks.node.nvml_probe`).

NVML is not believed everything
- A number that cannot be true (more than a hundred percent, more memory used than there is) is
  taken for not said. That it was said is a note of the sample.
- A GPU that the inventory does not have is not believed in; one that it has and NVML does not tell
  of is noted. Without an inventory any GPU is believed in.
- A process counts if it has a number. 0 is what NVML says of those that it may not name (they are
  in another pid namespace); what they use is in the GPU's own numbers only.
- In MIG mode NVML tells a GPU's processes with the instances that each is in, if it is asked of the
  GPU by somebody who may know them all; otherwise each MIG device is asked for its own.
- A process that NVML lists, and gives no utilisation of, has used nothing, if it tells of
  utilisation at all; in MIG mode it does not.

Source: the NVML API, "Device Queries"; nvmlProcessInfo_t, nvmlProcessUtilizationSample_t,
NVML_VALUE_NOT_AVAILABLE; NVIDIA's MIG user guide, "Monitoring MIG Devices".
"""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from api.errors import one_line
from hooks.node.nvml_probe import GpuAsker, GpuLost, text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_NOT_FOUND = 6  # nvmlReturn_t

_CORRECTED, _UNCORRECTED, _VOLATILE = 0, 1, 0
_SM_CLOCK, _MEMORY_CLOCK, _TEMPERATURE = 1, 2, 0
_MIG_ENABLED = 1

# NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, of R550 and newer.
_RECOVERY_ACTION = 230

_MEMORY = ("memory_total_bytes", "memory_used_bytes")

# What is asked of a GPU: the parts of the answer by their names in GpuSample, the question with its
# arguments, and how the parts are read of the answer.
_QUESTIONS: tuple[tuple[tuple[str, ...], tuple[Any, ...], Callable[[Any], Any]], ...] = (
    (("gpu_percent", "memory_percent"), ("nvmlDeviceGetUtilizationRates",),
     lambda rates: (rates.gpu, rates.memory)),
    (("encoder_percent",), ("nvmlDeviceGetEncoderUtilization",), lambda used: used[:1]),
    (("decoder_percent",), ("nvmlDeviceGetDecoderUtilization",), lambda used: used[:1]),
    (("power_watts",), ("nvmlDeviceGetPowerUsage",), lambda milliwatts: (milliwatts / 1000,)),
    (("energy_joules",), ("nvmlDeviceGetTotalEnergyConsumption",),
     lambda millijoules: (millijoules / 1000,)),
    (("temperature_celsius",), ("nvmlDeviceGetTemperature", _TEMPERATURE), lambda value: (value,)),
    (("sm_clock_hz",), ("nvmlDeviceGetClockInfo", _SM_CLOCK), lambda mhz: (mhz * 1_000_000,)),
    (("memory_clock_hz",), ("nvmlDeviceGetClockInfo", _MEMORY_CLOCK),
     lambda mhz: (mhz * 1_000_000,)),
    (("ecc_corrected",), ("nvmlDeviceGetTotalEccErrors", _CORRECTED, _VOLATILE),
     lambda count: (count,)),
    (("ecc_uncorrected",), ("nvmlDeviceGetTotalEccErrors", _UNCORRECTED, _VOLATILE),
     lambda count: (count,)),
    (("rows_pending", "rows_failed"), ("nvmlDeviceGetRemappedRows",), lambda rows: rows[2:4]),
)  # fmt: skip

_MOST_MEMORY = 1 << 45
_HIGHEST_PID = 1 << 22  # the kernel's PID_MAX_LIMIT

# Beyond these a number cannot be true.
_BOUNDS: Mapping[str, tuple[float, float]] = {
    "memory_total_bytes": (1, _MOST_MEMORY),
    "memory_used_bytes": (0, _MOST_MEMORY),
    **dict.fromkeys(("gpu_percent", "memory_percent", "encoder_percent", "decoder_percent"),
                    (0, 100)),
    "power_watts": (0, 20_000),
    "energy_joules": (0, (1 << 62) / 1000),
    "temperature_celsius": (-60, 200),
    "sm_clock_hz": (0, 100_000_000_000),
    "memory_clock_hz": (0, 100_000_000_000),
    "ecc_corrected": (0, 1 << 62),
    "ecc_uncorrected": (0, 1 << 62),
    "rows_pending": (0, 1),
    "rows_failed": (0, 1),
    "recovery_action": (0, 255),
    "throttle_reasons": (0, (1 << 64) - 1),
}  # fmt: skip
_FLAGS = frozenset({"rows_pending", "rows_failed"})

_LISTS = (
    ("compute", "nvmlDeviceGetComputeRunningProcesses"),
    ("compute", "nvmlDeviceGetMPSComputeRunningProcesses"),
    ("graphics", "nvmlDeviceGetGraphicsRunningProcesses"),
)

# GPUs, MIG devices of one and processes of one that are told of, and lines of what went wrong.
_MOST_GPUS = 256
_MOST_DEVICES = 64
_MOST = 4096
_NOTES = 64

_AT_ONCE = 16  # GPUs
_BEAT = 0.2

# A process's use is of this period at most, in microseconds.
_PERIOD = 2_000_000


def answer(nvml: Any, say: Callable[[dict[str, Any]], None]) -> None:
    """Answer until nobody asks any more.

    Raises:
        NVMLError: NVML does not answer at all.
    """
    nvml.nvmlInit()
    say({"ready": text_of(nvml.nvmlSystemGetDriverVersion())})
    asker: Asker | None = None
    for line in sys.stdin:
        if asker is not None and asker.has_lost:
            nvml.nvmlShutdown()
            nvml.nvmlInit()
        question = json.loads(line)
        known, given_up = (
            {int(index): text for index, text in question[name].items()}
            for name in ("gpus", "given_up")
        )
        asker = Asker(nvml, known, given_up)
        if question["alone"]:
            say(asker.each(lambda index: say({"asks": index})))
        else:
            say(asker.all(question["patience"], lambda: say({"beat": 1})))


class Asker:
    """Who asks NVML once.

    Args:
        known: the UUIDs of the node's GPUs by their indices; empty if that is not known.
        given_up: why some are not asked, by their indices.

    Attributes:
        has_lost: whether a GPU was found lost that was not given up.
    """

    def __init__(self, nvml: Any, known: Mapping[int, str], given_up: Mapping[int, str]) -> None:
        self._nvml, self._known, self._given_up = nvml, known, given_up
        self.has_lost = False
        count = min(nvml.nvmlDeviceGetCount(), _MOST_GPUS)
        self._gpus = [
            _Gpu(nvml, index, known.get(index, ""), given_up.get(index, ""))
            for index in range(count)
        ]

    def all(self, patience: float, beat: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """What is to be said of all GPUs, which are asked at the same time.

        Args:
            patience: seconds after which those that do not answer are given up, if others do.
            beat: called now and then while questions are answered.
        """
        gpus, failed = self._gpus, list[Exception]()
        workers = _begin([gpu for gpu in gpus if not gpu.done], failed)
        answered, since = 0, time.monotonic()
        while busy := [worker for worker in workers if worker.is_alive()]:
            busy[0].join(_BEAT)
            before, answered = answered, sum(gpu.asker.answered for gpu in gpus)
            if answered != before:
                since = time.monotonic()
                beat()
            elif time.monotonic() - since > patience and any(gpu.told_of_itself for gpu in gpus):
                break
        if failed:
            raise failed[0]
        return self._said()

    def each(self, asks: Callable[[int], None]) -> dict[str, Any]:
        """What is to be said of all GPUs, which are asked one after the other.

        Args:
            asks: called with the index of each that is, before.
        """
        for gpu in self._gpus:
            if not gpu.done:
                asks(gpu.index)
                gpu.ask()
        return self._said()

    def _said(self) -> dict[str, Any]:
        told: dict[str, dict[str, Any]] = {}
        processes: list[list[Any]] = []
        hanging: dict[int, str] = {}
        notes, own = list[str](), list[str]()
        names = frozenset(self._known.values())
        for gpu in self._gpus:
            if not gpu.done:
                gpu.give_up()
                hanging[gpu.index] = gpu.lost
            self.has_lost |= bool(gpu.lost) and gpu.index not in self._given_up
            if not gpu.uuid or gpu.uuid in told or (names and gpu.uuid not in names):
                which = gpu.uuid or f"its GPU {gpu.index}"
                why = gpu.lost or "it is none of this node's"
                notes.append(f"NVML tells of {which}: {why}")
                continue
            told[gpu.uuid] = gpu.sample
            processes += gpu.processes
            notes += gpu.doubts
            own += gpu.asker.notes
        missing = sorted(names - told.keys())
        notes += [f"NVML does not tell of {uuid}" for uuid in missing]
        return {
            "driver": text_of(self._nvml.nvmlSystemGetDriverVersion()),
            "gpus": [*told.values()],
            "processes": processes,
            "notes": [*dict.fromkeys(map(one_line, (*notes, *own)))][:_NOTES],
            "uncounted": missing if len(told) == len(self._gpus) else [],
            "hanging": hanging,
        }


def _begin(gpus: list[_Gpu], failed: list[Exception]) -> list[threading.Thread]:
    """Ask several GPUs at the same time.

    Args:
        failed: takes what went wrong otherwise than NVML has a word for.
    """
    left = iter(gpus)

    def work() -> None:
        try:
            for gpu in left:
                gpu.ask()
        except Exception as error:  # noqa: BLE001 - it is raised where all are waited for
            failed.append(error)

    workers = [threading.Thread(target=work, daemon=True) for _ in range(min(len(gpus), _AT_ONCE))]
    for worker in workers:
        worker.start()
    return workers


class _Gpu:
    """One GPU, and what it says.

    Attributes:
        uuid: its own word; while it has none, the inventory's.
        lost: why it does not answer; "" if it does.
        processes: what each process uses of it or its MIG devices, as
            :class:`~integration.nvml.values.ProcessUse` has it.
        doubts: what it says and cannot be, a line each.
        asker: who asks it.
        done: whether it is not to be asked any more.
        told_of_itself: whether it has answered everything.
    """

    def __init__(self, nvml: Any, index: int, uuid: str, given_up: str) -> None:
        self._nvml, self.index = nvml, index
        self.uuid, self.lost = uuid, one_line(given_up)
        self._told: dict[str, Any] = {}
        self._missing: dict[str, str] = {}
        self.processes: list[list[Any]] = []
        self.doubts: list[str] = []
        self.asker = GpuAsker(nvml, index)
        self.done = bool(given_up)
        self.told_of_itself = False

    @property
    def sample(self) -> dict[str, Any]:
        """What is said of it, by the names of GpuSample."""
        if self.lost:
            return {"uuid": self.uuid, "lost": self.lost}
        return {"uuid": self.uuid, "missing": self._missing, **self._told}

    def ask(self) -> None:
        """Ask it everything."""
        opened: dict[str, Any] = {}
        try:
            handle = self.asker.open(opened)
            self._name(opened)
            self._ask_all(handle)
        except GpuLost as error:
            self._name(opened)
            self.lost = one_line(str(error))
        else:
            self.told_of_itself = True
        self.done = True

    def give_up(self) -> None:
        """Take it for lost while it does not answer."""
        self.lost = "it does not answer, and others do"
        self.processes, self.doubts = [], []

    def _name(self, opened: Mapping[str, Any]) -> None:
        self.uuid = _uuid(opened.get("uuid") or self.uuid)

    def _ask_all(self, handle: Any) -> None:
        """Ask everything of a GPU that is there.

        Raises:
            GpuLost: it is lost.
        """
        ask = self.asker.ask
        self._put(_MEMORY, self._memory(handle))
        for names, (question, *more), read in _QUESTIONS:
            answer = ask(question, handle, *more)
            self._put(names, None if answer is None else read(answer))
        throttle = ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        if throttle is None:
            throttle = ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
        self._put(("throttle_reasons",), None if throttle is None else [throttle])
        fields = ask("nvmlDeviceGetFieldValues", handle, [_RECOVERY_ACTION])
        self._put(("recovery_action",), None if fields is None else [_value_of(fields[0])])
        mode = ask("nvmlDeviceGetMigMode", handle)
        devices = self._mig(handle) if mode is not None and mode[0] == _MIG_ENABLED else []
        self._told["mig"] = [told for told, _, _ in devices]
        self.processes = self._processes(handle, devices)

    def _put(self, names: tuple[str, ...], values: Any) -> None:
        self._told |= self._checked(names, values)
        if values is None and self.asker.why:
            self._missing.update(dict.fromkeys(names, self.asker.why))

    def _checked(self, names: tuple[str, ...], values: Any) -> dict[str, Any]:
        """Numbers by their names; None for one that was not said, or cannot be true."""
        found = dict(zip(names, values or [None] * len(names), strict=True))
        for name, value in found.items():
            least, most = _BOUNDS[name]
            if name == "memory_used_bytes":
                most = found["memory_total_bytes"] or most
            if value is not None and not least <= value <= most:
                self._doubt(f"{name} {value!r:.40}")
                found[name] = None
            elif value is not None and name in _FLAGS:
                found[name] = bool(value)
        return found

    def _doubt(self, line: str) -> None:
        self.doubts.append(f"{self.uuid}: {line}")

    def _memory(self, handle: Any) -> list[int] | None:
        """All of it, and what is in use; the newer question leaves out what the driver keeps."""
        version = getattr(self._nvml, "nvmlMemory_v2", None)
        memory = None
        if version is not None:
            memory = self.asker.ask("nvmlDeviceGetMemoryInfo", handle, version)
        if memory is None:
            memory = self.asker.ask("nvmlDeviceGetMemoryInfo", handle)
        return None if memory is None else [memory.total, memory.used]

    def _mig(self, handle: Any) -> list[tuple[dict[str, Any], Any, tuple[Any, Any]]]:
        """What is said of each MIG device, its handle, and its instances."""
        devices = []
        count = self.asker.ask("nvmlDeviceGetMaxMigDeviceCount", handle) or 0
        for index in range(min(count, _MOST_DEVICES)):
            device = self.asker.ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, index)
            if device is None:  # a place for a device that was not made
                continue
            uuid = self.asker.ask("nvmlDeviceGetUUID", device)
            if uuid is None:
                continue
            told = {
                "uuid": _uuid(text_of(uuid)),
                **self._checked(_MEMORY, self._memory(device)),
            }
            instances = (
                self.asker.ask("nvmlDeviceGetGpuInstanceId", device),
                self.asker.ask("nvmlDeviceGetComputeInstanceId", device),
            )
            devices.append((told, device, instances))
        return devices

    def _processes(
        self, handle: Any, devices: list[tuple[dict[str, Any], Any, tuple[Any, Any]]]
    ) -> list[list[Any]]:
        of_instances = {pair: told["uuid"] for told, _, pair in devices if None not in pair}
        found: dict[tuple[Any, ...], list[Any]] = {}
        listed = []
        for kind, name in _LISTS:
            processes = self._list(name, handle)
            if processes is None:
                processes = [p for _, device, _ in devices for p in self._list(name, device) or ()]
            listed += [(kind, process) for process in processes]
        if len(listed) > _MOST:
            self._doubt(f"{len(listed)} processes")
        use = self._use(handle)
        for kind, process in listed[:_MOST]:
            pid, memory = process.pid, process.usedGpuMemory
            if not 0 < pid <= _HIGHEST_PID:
                self._doubt(f"a process {pid!r:.20}, which cannot be named")
                continue
            pair = (
                getattr(process, "gpuInstanceId", None),
                getattr(process, "computeInstanceId", None),
            )
            key = (pid, of_instances.get(pair, self.uuid), kind)
            if key not in found or found[key][3] is None:  # a client of MPS may be told of twice
                if memory is not None and memory > _MOST_MEMORY:
                    memory = None
                percents = [None] * 4 if use is None else use.get(pid, [0] * 4)
                found[key] = [*key, memory, *percents]
        return [*found.values()]

    def _list(self, name: str, handle: Any) -> Any:
        """A list of processes, by the newest question that the driver understands."""
        for version in ("_v3", "_v2"):
            found = self.asker.ask(name + version, handle)
            if found is not None:
                return found
        return None

    def _use(self, handle: Any) -> dict[int, list[int | None]] | None:
        """What each process has used of late, in percent; None if that is not said."""
        nvml, since = self._nvml, int(time.time() * 1e6) - _PERIOD
        try:
            samples = nvml.nvmlDeviceGetProcessUtilization(handle, since)
        except nvml.NVMLError as error:
            # Success, if pynvml has found none to begin with.
            return {} if error.value in {0, _NOT_FOUND} else None
        finally:
            self.asker.answered += 1
        newest: dict[int, Any] = {}
        for sample in samples[:_MOST]:
            if sample.pid not in newest or sample.timeStamp > newest[sample.pid].timeStamp:
                newest[sample.pid] = sample
        return {
            pid: [
                percent if percent <= 100 else None  # noqa: PLR2004 - a percentage
                for percent in (each.smUtil, each.memUtil, each.encUtil, each.decUtil)
            ]
            for pid, each in newest.items()
        }


def _uuid(text: str) -> str:
    """A UUID as the inventory has it, whatever case NVML writes it in."""
    kind, dash, rest = text.partition("-")
    return one_line(kind + dash + rest.lower())


def _value_of(field: Any) -> int | None:
    """The value of a field, an unsigned number; None if the driver does not have it."""
    return int(field.value.uiVal) if field.nvmlReturn == 0 else None
