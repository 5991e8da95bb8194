"""Sample the GPUs, in the child.

The child prints ``{"ready": DRIVER}`` once NVML is initialised. Then it answers each line that it
reads, and exits after the last one::

    {"gpus": {INDEX: UUID, …}, "given_up": {INDEX: WHY, …}, "alone": BOOLEAN, "patience": SECONDS,
     "profile": BOOLEAN}

"gpus" are the node's GPUs according to the inventory. With "profile" the answer includes their
activity (:mod:`.child_profiling`). The answer has the names and units of a
:class:`~integration.nvml.values.Sample`, and "hanging". While it works, the child prints ``{"beat":
1}`` now and then, as long as NVML answers one call after the other, so that the agent can tell a
slow driver from one that hangs.

One bad GPU does not affect the others. A GPU that does not answer within ``patience``, while others
do, is reported as lost and as "hanging"; after that the child is of no further use. If NVML
crashes, the agent asks the GPUs alone, one after the other. The child prints ``{"asks":
INDEX}`` before each, so that the agent knows which GPU it was. GPUs in "given_up" are reported as
lost for that reason, and are not asked.

The GPUs are asked at the same time, which NVML allows: with a slow driver, each of about a hundred
calls may take 0.1 s. NVML does not notice a GPU that comes back, so while one is lost NVML is
initialised again: before the next question, then in growing pauses of up to :data:`_LONGEST_PAUSE`
seconds, since the activity of the other GPUs is lost each time. :mod:`hooks.node.nvml_probe`
decides whether a GPU is lost, as it does for the inventory.

Not every answer of NVML is believed
- An implausible number (more than a hundred percent, more memory in use than there is) counts as no
  answer, and becomes a note of the sample.
- A GPU that is not in the inventory is left out, with a note. So is a GPU of the inventory that
  NVML does not list. Without an inventory any GPU is accepted.
- A process counts if it has a pid. NVML reports 0 for processes in another pid namespace; what they
  use is only in the GPU's own numbers.
- In MIG mode NVML reports a GPU's processes with their instances if the caller may see them all.
  Otherwise each MIG device is asked for its own.
- A process without utilisation has used nothing, provided that NVML reports utilisation at all; in
  MIG mode it does not.

Source: the NVML API, "Device Queries"; nvmlProcessInfo_t, nvmlProcessUtilizationSample_t,
NVML_VALUE_NOT_AVAILABLE; NVIDIA's MIG user guide, "Monitoring MIG Devices".
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from api.errors import one_line
from hooks.node.nvml_probe import GpuAsker, GpuLost, text_of
from integration.backoff import Backoff
from integration.nvml.child_fabric import fabric_of
from integration.nvml.child_profiling import Profiler

_NOT_FOUND = 6  # nvmlReturn_t

_CORRECTED, _UNCORRECTED, _VOLATILE = 0, 1, 0
_SM_CLOCK, _MEMORY_CLOCK, _TEMPERATURE = 1, 2, 0
_MIG_ENABLED = 1

RECOVERY_ACTION = 230
# NVML's fields (NVML_FI_DEV_…): the field of GpuSample, the number, alone or with its scope, and
# the unit. The recovery action exists since R550; only GPUs before Ampere retire pages.
_ALL_LINKS = 0xFFFFFFFF
_FIELDS: tuple[tuple[str, Any, int], ...] = (
    ("recovery_action", RECOVERY_ACTION, 1),
    ("memory_temperature_celsius", 82, 1),
    ("pcie_replays", 94, 1),
    ("nvlink_sent_bytes", (138, _ALL_LINKS), 1024),
    ("nvlink_received_bytes", (139, _ALL_LINKS), 1024),
    ("pages_corrected", 29, 1),
    ("pages_uncorrected", 30, 1),
    ("pages_pending", 31, 1),
)
_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal")  # of a value, by nvmlValueType_t

_MEMORY = ("memory_total_bytes", "memory_used_bytes", "memory_reserved_bytes")

# NVML's calls: the fields of GpuSample that an answer fills, the call with its arguments, and how
# to read the fields from the answer.
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
    (("rows_corrected", "rows_uncorrected", "rows_pending", "rows_failed"),
     ("nvmlDeviceGetRemappedRows",), lambda rows: rows),
    (("unrepairable_memory",), ("nvmlDeviceGetUnrepairableMemoryFlag_v1",), lambda flag: (flag,)),
    (("channel_repair_pending", "tpc_repair_pending"), ("nvmlDeviceGetRepairStatus",),
     lambda pending: pending),
)  # fmt: skip

_MOST_MEMORY = 1 << 45
_HIGHEST_PID = 1 << 22  # the kernel's PID_MAX_LIMIT

_FLAGS = frozenset({
    "rows_pending", "rows_failed", "pages_pending", "unrepairable_memory", "channel_repair_pending",
    "tpc_repair_pending",
})  # fmt: skip
# A number outside these bounds cannot be true.
_BOUNDS: Mapping[str, tuple[float, float]] = {
    "memory_total_bytes": (1, _MOST_MEMORY),
    "memory_used_bytes": (0, _MOST_MEMORY),
    "memory_reserved_bytes": (0, _MOST_MEMORY),
    **dict.fromkeys(("gpu_percent", "memory_percent", "encoder_percent", "decoder_percent"),
                    (0, 100)),
    "power_watts": (0, 20_000),
    "energy_joules": (0, (1 << 62) / 1000),
    **dict.fromkeys(("temperature_celsius", "memory_temperature_celsius"), (-60, 200)),
    "sm_clock_hz": (0, 100_000_000_000),
    "memory_clock_hz": (0, 100_000_000_000),
    **dict.fromkeys(("ecc_corrected", "ecc_uncorrected", "rows_corrected", "rows_uncorrected",
                     "pages_corrected", "pages_uncorrected", "pcie_replays", "nvlink_sent_bytes",
                     "nvlink_received_bytes"), (0, 1 << 62)),
    **dict.fromkeys(_FLAGS, (0, 1)),
    "recovery_action": (0, 255),
    "throttle_reasons": (0, (1 << 64) - 1),
}  # fmt: skip

_LISTS = (
    ("compute", "nvmlDeviceGetComputeRunningProcesses"),
    ("compute", "nvmlDeviceGetMPSComputeRunningProcesses"),
    ("graphics", "nvmlDeviceGetGraphicsRunningProcesses"),
)

# The most GPUs, MIG devices of a GPU, processes of a GPU, and notes.
_MOST_GPUS = 256
_MOST_DEVICES = 64
_MOST = 4096
_NOTES = 64

_AT_ONCE = 16  # GPUs
_LONGEST_PAUSE = 60.0
_BEAT = 0.2

# The period of a process's utilisation, in microseconds.
_PERIOD = 2_000_000


def run(nvml: Any, say: Callable[[dict[str, Any]], None]) -> None:
    """Answer until stdin is closed.

    Raises:
        NVMLError: NVML does not answer at all.
    """
    say({"ready": text_of(nvml.nvmlSystemGetDriverVersion())})
    asker: Asker | None = None
    profiler = Profiler(nvml)
    backoff, due = Backoff(longest=_LONGEST_PAUSE), 0.0
    for line in sys.stdin:
        if asker is None or not asker.has_lost:
            backoff, due = Backoff(longest=_LONGEST_PAUSE), 0.0
        elif time.monotonic() >= due:
            profiler.close()
            nvml.nvmlShutdown()
            nvml.nvmlInit()
            due = time.monotonic() + backoff.pause()
        question = json.loads(line)
        known, given_up = (
            {int(index): text for index, text in question[name].items()}
            for name in ("gpus", "given_up")
        )
        asker = Asker(nvml, known, given_up, profiler if question["profile"] else None)
        if question["alone"]:
            say(asker.each(lambda index: say({"asks": index})))
        else:
            say(asker.all(question["patience"], lambda: say({"beat": 1})))


class Asker:
    """Asks NVML once.

    Args:
        known: the UUIDs of the node's GPUs by index; empty if they are unknown.
        given_up: why some GPUs are not asked, by index.
        profiler: asks for the activity; None if it is not requested.

    Attributes:
        has_lost: whether a GPU was lost, apart from those in ``given_up``.
    """

    def __init__(
        self,
        nvml: Any,
        known: Mapping[int, str],
        given_up: Mapping[int, str],
        profiler: Profiler | None = None,
    ) -> None:
        self._nvml, self._known, self._given_up = nvml, known, given_up
        self.has_lost = False
        count = min(nvml.nvmlDeviceGetCount(), _MOST_GPUS)
        self._gpus = [
            _Gpu(nvml, index, known.get(index, ""), given_up.get(index, ""), profiler)
            for index in range(count)
        ]

    def all(self, patience: float, beat: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """Ask all GPUs at the same time; return the answer.

        Args:
            patience: the seconds after which GPUs that do not answer are given up, if others do.
            beat: called now and then while NVML answers.
        """
        gpus, failed = self._gpus, list[Exception]()
        workers = _start([gpu for gpu in gpus if not gpu.done], failed)
        answered, since = 0, time.monotonic()
        while busy := [worker for worker in workers if worker.is_alive()]:
            busy[0].join(_BEAT)
            before, answered = answered, sum(gpu.asker.answered for gpu in gpus)
            if answered != before:
                since = time.monotonic()
                beat()
            elif time.monotonic() - since > patience and any(gpu.has_answered for gpu in gpus):
                break
        if failed:
            raise failed[0]
        return self._answer()

    def each(self, asks: Callable[[int], None]) -> dict[str, Any]:
        """Ask the GPUs one after the other; return the answer.

        Args:
            asks: called with the index of each GPU before it is asked.
        """
        for gpu in self._gpus:
            if not gpu.done:
                asks(gpu.index)
                gpu.ask()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        samples: dict[str, dict[str, Any]] = {}
        processes: list[list[Any]] = []
        hanging: dict[int, str] = {}
        notes, own = list[str](), list[str]()
        names = frozenset(self._known.values())
        for gpu in self._gpus:
            if not gpu.done:
                gpu.give_up()
                hanging[gpu.index] = gpu.lost
            self.has_lost |= bool(gpu.lost) and gpu.index not in self._given_up
            if not gpu.uuid or gpu.uuid in samples or (names and gpu.uuid not in names):
                which = gpu.uuid or f"its GPU {gpu.index}"
                why = gpu.lost or "it is not in the node's inventory"
                notes.append(f"NVML lists {which}: {why}")
                continue
            samples[gpu.uuid] = gpu.sample
            processes += gpu.processes
            notes += gpu.doubts
            own += gpu.asker.notes
        missing = sorted(names - samples.keys())
        notes += [f"NVML does not list {uuid}" for uuid in missing]
        return {
            "driver": text_of(self._nvml.nvmlSystemGetDriverVersion()),
            "gpus": [*samples.values()],
            "processes": processes,
            "notes": [*dict.fromkeys(map(one_line, (*notes, *own)))][:_NOTES],
            "uncounted": missing if len(samples) == len(self._gpus) else [],
            "hanging": hanging,
        }


def _start(gpus: list[_Gpu], failed: list[Exception]) -> list[threading.Thread]:
    """Start threads that ask the GPUs.

    Args:
        failed: receives exceptions that are not errors of NVML.
    """
    left = iter(gpus)

    def work() -> None:
        try:
            for gpu in left:
                gpu.ask()
        except Exception as error:  # noqa: BLE001 - the waiting thread raises it
            failed.append(error)

    workers = [threading.Thread(target=work, daemon=True) for _ in range(min(len(gpus), _AT_ONCE))]
    for worker in workers:
        worker.start()
    return workers


class _Gpu:
    """One GPU, and its answers.

    Attributes:
        uuid: the UUID from NVML; until that is known, the inventory's.
        lost: why the GPU does not answer; "" if it does.
        processes: what each process uses of the GPU or its MIG devices, in the order of
            :class:`~integration.nvml.values.ProcessUse`.
        doubts: implausible answers, one line each.
        asker: makes the calls.
        done: whether the GPU has been asked, or need not be asked.
        has_answered: whether the GPU has answered every question.
    """

    def __init__(
        self, nvml: Any, index: int, uuid: str, given_up: str, profiler: Profiler | None
    ) -> None:
        self._nvml, self.index, self._profiler = nvml, index, profiler
        self.uuid, self.lost = uuid, one_line(given_up)
        self._values: dict[str, Any] = {}
        self._missing: dict[str, str] = {}
        self.processes: list[list[Any]] = []
        self.doubts: list[str] = []
        self.asker = GpuAsker(nvml, index)
        self.done = bool(given_up)
        self.has_answered = False

    @property
    def sample(self) -> dict[str, Any]:
        """Its answers, by the names of GpuSample."""
        if self.lost:
            return {"uuid": self.uuid, "lost": self.lost}
        return {"uuid": self.uuid, "missing": self._missing, **self._values}

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
            self.has_answered = True
        self.done = True

    def give_up(self) -> None:
        """Treat a GPU that does not answer as lost."""
        self.lost = "it does not answer, and others do"
        self.processes, self.doubts = [], []

    def _name(self, opened: Mapping[str, Any]) -> None:
        self.uuid = uuid_of(opened.get("uuid") or self.uuid)

    def _ask_all(self, handle: Any) -> None:
        """Ask an open GPU for everything.

        Raises:
            GpuLost: the GPU is lost.
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
        names, numbers, units = zip(*_FIELDS, strict=True)
        fields = ask("nvmlDeviceGetFieldValues", handle, numbers)
        self._put(names, None if fields is None else [*map(value_of, fields, units)])
        self._values["fabric"] = fabric_of(self._nvml, self.asker, handle)
        mode = ask("nvmlDeviceGetMigMode", handle)
        devices = self._mig(handle) if mode is not None and mode[0] == _MIG_ENABLED else []
        self._values["mig"] = [sample for sample, _, _ in devices]
        if self._profiler is not None:
            self._values["activity"] = self._profiler.gpu(self.asker, self.uuid, handle)
            parts: dict[int, list[Any]] = {}
            for sample, _, (instance, _) in devices:
                if instance is not None:
                    known = (sample["uuid"], sample["memory_total_bytes"])
                    parts.setdefault(instance, []).append(known)
            self._profiler.follow(self.uuid, parts)
            for sample, _, (instance, _) in devices:
                if instance is not None:
                    sample["activity"] = self._profiler.instance(
                        self.asker, self.uuid, handle, instance
                    )
        self.processes = self._processes(handle, devices)

    def _put(self, names: tuple[str, ...], values: Any) -> None:
        self._values |= self._checked(names, values)
        if values is None and self.asker.why:
            self._missing.update(dict.fromkeys(names, self.asker.why))

    def _checked(self, names: tuple[str, ...], values: Any) -> dict[str, Any]:
        """Return the values by name; None for one that is missing, or cannot be true."""
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

    def _memory(self, handle: Any) -> list[int | None] | None:
        """Return total, used and reserved bytes.

        The older call includes the driver's reserved bytes in the used ones, and does not report
        them.
        """
        version = getattr(self._nvml, "nvmlMemory_v2", None)
        memory = None
        if version is not None:
            memory = self.asker.ask("nvmlDeviceGetMemoryInfo", handle, version)
        if memory is None:
            memory = self.asker.ask("nvmlDeviceGetMemoryInfo", handle)
        if memory is None:
            return None
        return [memory.total, memory.used, getattr(memory, "reserved", None)]

    def _mig(self, handle: Any) -> list[tuple[dict[str, Any], Any, tuple[Any, Any]]]:
        """Return the sample, the handle and the instances of each MIG device."""
        devices = []
        count = self.asker.ask("nvmlDeviceGetMaxMigDeviceCount", handle) or 0
        for index in range(min(count, _MOST_DEVICES)):
            device = self.asker.ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, index)
            if device is None:  # no device was created at this index
                continue
            uuid = self.asker.ask("nvmlDeviceGetUUID", device)
            if uuid is None:
                continue
            sample = {
                "uuid": uuid_of(text_of(uuid)),
                **self._checked(_MEMORY, self._memory(device)),
            }
            instances = (
                self.asker.ask("nvmlDeviceGetGpuInstanceId", device),
                self.asker.ask("nvmlDeviceGetComputeInstanceId", device),
            )
            devices.append((sample, device, instances))
        return devices

    def _processes(
        self, handle: Any, devices: list[tuple[dict[str, Any], Any, tuple[Any, Any]]]
    ) -> list[list[Any]]:
        of_instances = {pair: sample["uuid"] for sample, _, pair in devices if None not in pair}
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
            if key not in found or found[key][3] is None:  # NVML may list a client of MPS twice
                if memory is not None and memory > _MOST_MEMORY:
                    memory = None
                percents = [None] * 4 if use is None else use.get(pid, [0] * 4)
                found[key] = [*key, memory, *percents]
        return [*found.values()]

    def _list(self, name: str, handle: Any) -> Any:
        """Return a list of processes, by the newest call that the driver has."""
        for version in ("_v3", "_v2"):
            found = self.asker.ask(name + version, handle)
            if found is not None:
                return found
        return None

    def _use(self, handle: Any) -> dict[int, list[int | None]] | None:
        """Return the recent use of each process in percent; None if NVML does not report it."""
        nvml, since = self._nvml, int(time.time() * 1e6) - _PERIOD
        try:
            samples = nvml.nvmlDeviceGetProcessUtilization(handle, since)
        except nvml.NVMLError as error:
            # pynvml raises Success if the driver has no samples at first.
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


def uuid_of(text: str) -> str:
    """Return a UUID in the inventory's case, whatever case NVML writes it in."""
    kind, dash, rest = text.partition("-")
    return one_line(kind + dash + rest.lower())


def value_of(field: Any, unit: int = 1) -> int | None:
    """Return a field's value, times the unit; None if the driver does not have it."""
    if field.nvmlReturn or field.valueType >= len(_MEMBERS):
        return None
    return int(getattr(field.value, _MEMBERS[field.valueType]) * unit)
