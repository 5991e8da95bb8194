"""Answering what the GPUs are like, in the child.

It says ``{"ready": DRIVER}`` once NVML is up. Then it says one object for each line that it reads,
``{"given_up": {INDEX: WHY, …}, "alone": BOOLEAN, "patience": SECONDS}``, and ends when there are no
more::

    {"driver": …, "gpus": [{"index": …, "uuid": …, …}, …], "notes": [WHAT WENT WRONG, …]}

with all of a GPU by the names and in the units of
:class:`~integration.node.monitor.values.GpuSample`, and null for what it does not say; "missing" of
a GPU has why it does not. Before that it says ``{"beat": 1}`` now and then, as long as one question
after the other is answered: so a driver that is slow is told from one that hangs. The agent checks
the answer and makes a :class:`~integration.node.monitor.values.Sample` of it (:mod:`.samples`).

No GPU takes the others with it. One that does not answer while others do is told as lost after
``patience``, with "hangs" beside it: then this process is of no use any more. Where NVML crashes,
GPUs are asked alone, one after the other, and ``{"asks": INDEX}`` is said before each, so that the
agent knows which it was. What was given up is told as lost for that reason, and not asked.

GPUs are asked at the same time, which NVML allows: a slow driver may take 0.1 s for each of some
hundred questions. NVML takes no notice of a GPU that comes back, so after one was lost it is begun
anew. Whether one is lost is decided by the rules that the engine goes by
(:mod:`hooks.node.nvml_probe`).

In MIG mode NVML tells a GPU's processes with the instance that each is in, if it is asked of the
GPU by somebody who may know them all; otherwise each MIG device is asked for its own.

Source: the NVML API, "Device Queries"; NVIDIA's MIG user guide, "Monitoring MIG Devices".
"""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

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

# GPUs, MIG devices of one and processes of one that are told of, and calls that failed.
_MOST_GPUS = 256
_MOST_DEVICES = 64
_MOST = 4096
_NOTES = 32

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
    asker = Asker(nvml, lambda: say({"beat": 1}))
    say({"ready": asker.driver()})
    lost = False
    for line in sys.stdin:
        if lost:
            nvml.nvmlShutdown()
            nvml.nvmlInit()
        question = json.loads(line)
        given_up = {int(index): why for index, why in question["given_up"].items()}
        if question["alone"]:
            told = asker.each(given_up, lambda index: say({"asks": index}))
        else:
            told = asker.all(given_up, question["patience"])
        say(told)
        lost = any("lost" in gpu and gpu["index"] not in given_up for gpu in told["gpus"])


class Asker:
    """Who asks NVML.

    Args:
        beat: called now and then while questions are answered.
    """

    def __init__(self, nvml: Any, beat: Callable[[], None] = lambda: None) -> None:
        self._nvml, self._beat = nvml, beat

    def driver(self) -> str:
        """The version that NVML is of."""
        return text_of(self._nvml.nvmlSystemGetDriverVersion())

    def all(self, given_up: Mapping[int, str], patience: float) -> dict[str, Any]:
        """What is to be said of all GPUs, which are asked at the same time.

        Args:
            given_up: why some are not asked, by their indices.
            patience: seconds after which those that do not answer are given up, if others do.
        """
        gpus = self._gpus(given_up)
        failed: list[Exception] = []
        workers = _begin([gpu for gpu in gpus if not gpu.done], failed)
        answered, since = 0, time.monotonic()
        while busy := [worker for worker in workers if worker.is_alive()]:
            busy[0].join(_BEAT)
            before, answered = answered, sum(gpu.asker.answered for gpu in gpus)
            if answered != before:
                since = time.monotonic()
                self._beat()
            elif time.monotonic() - since > patience and any(gpu.told_of_itself for gpu in gpus):
                break
        if failed:
            raise failed[0]
        return self._said(gpus)

    def each(self, given_up: Mapping[int, str], asks: Callable[[int], None]) -> dict[str, Any]:
        """What is to be said of all GPUs, which are asked one after the other.

        Args:
            given_up: why some are not asked, by their indices.
            asks: called with the index of each that is, before.
        """
        gpus = self._gpus(given_up)
        for index, gpu in enumerate(gpus):
            if not gpu.done:
                asks(index)
                gpu.ask()
        return self._said(gpus)

    def _gpus(self, given_up: Mapping[int, str]) -> list[_Gpu]:
        count = min(self._nvml.nvmlDeviceGetCount(), _MOST_GPUS)
        return [_Gpu(self._nvml, index, given_up.get(index, "")) for index in range(count)]

    def _said(self, gpus: list[_Gpu]) -> dict[str, Any]:
        notes = dict.fromkeys(note for gpu in gpus for note in gpu.asker.notes)
        told = [gpu.told if gpu.done else gpu.hanging() for gpu in gpus]
        return {"driver": self.driver(), "gpus": told, "notes": [*notes][:_NOTES]}


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
        told: what it has said.
        asker: who asks it.
        done: whether it is not to be asked any more.
        told_of_itself: whether it has answered everything.
    """

    def __init__(self, nvml: Any, index: int, given_up: str) -> None:
        self._nvml = nvml
        self.told: dict[str, Any] = {"index": index, "uuid": ""}
        if given_up:
            self.told["lost"] = given_up
        self.asker = GpuAsker(nvml, index)
        self.done = bool(given_up)
        self.told_of_itself = False

    def ask(self) -> None:
        """Ask it everything."""
        try:
            self._ask_all(self.asker.open(self.told))
        except GpuLost as error:
            self.told["lost"] = str(error)
        else:
            self.told_of_itself = True
        self.done = True

    def hanging(self) -> dict[str, Any]:
        """What is said of it while it does not answer."""
        return {
            "index": self.told["index"],
            "uuid": self.told["uuid"] or "",
            "lost": "it does not answer, and others do",
            "hangs": True,
        }

    def _ask_all(self, handle: Any) -> None:
        """Ask everything of a GPU that is there.

        Raises:
            GpuLost: it is lost.
        """
        ask, told = self.asker.ask, self.told
        missing: dict[str, str] = {}

        def put(names: tuple[str, ...], values: Any) -> None:
            told.update(zip(names, values or [None] * len(names), strict=True))
            if values is None and self.asker.why:
                missing.update(dict.fromkeys(names, self.asker.why))

        put(_MEMORY, self._memory(handle))
        for names, (question, *more), read in _QUESTIONS:
            answer = ask(question, handle, *more)
            put(names, None if answer is None else read(answer))
        throttle = ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        if throttle is None:
            throttle = ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
        put(("throttle_reasons",), None if throttle is None else [throttle])
        fields = ask("nvmlDeviceGetFieldValues", handle, [_RECOVERY_ACTION])
        put(("recovery_action",), None if fields is None else [_value_of(fields[0])])
        mode = ask("nvmlDeviceGetMigMode", handle)
        devices = self._mig(handle) if mode is not None and mode[0] == _MIG_ENABLED else []
        told["mig"] = [device for _, device in devices]
        told["processes"] = self._processes(handle, [each for each, _ in devices])
        told["use"] = self._use(handle)
        told["missing"] = missing

    def _memory(self, handle: Any) -> list[int] | None:
        """All of it, and what is in use; the newer question leaves out what the driver keeps."""
        version = getattr(self._nvml, "nvmlMemory_v2", None)
        memory = None
        if version is not None:
            memory = self.asker.ask("nvmlDeviceGetMemoryInfo", handle, version)
        if memory is None:
            memory = self.asker.ask("nvmlDeviceGetMemoryInfo", handle)
        return None if memory is None else [memory.total, memory.used]

    def _mig(self, handle: Any) -> list[tuple[Any, dict[str, Any]]]:
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
                "uuid": text_of(uuid),
                "gi": self.asker.ask("nvmlDeviceGetGpuInstanceId", device),
                "ci": self.asker.ask("nvmlDeviceGetComputeInstanceId", device),
                **dict(zip(_MEMORY, self._memory(device) or (None, None), strict=True)),
            }
            devices.append((device, told))
        return devices

    def _processes(self, handle: Any, devices: list[Any]) -> list[list[Any]]:
        """Kind, process, memory and instances of each."""
        found = []
        for kind, name in (
            ("compute", "nvmlDeviceGetComputeRunningProcesses"),
            ("compute", "nvmlDeviceGetMPSComputeRunningProcesses"),
            ("graphics", "nvmlDeviceGetGraphicsRunningProcesses"),
        ):
            processes = self._list(name, handle)
            if processes is None and devices:
                processes = [each for device in devices for each in self._list(name, device) or ()]
            for process in processes or ():
                instances = (
                    getattr(process, "gpuInstanceId", None),
                    getattr(process, "computeInstanceId", None),
                )
                found.append([kind, process.pid, process.usedGpuMemory, *instances])
        if len(found) > _MOST:
            self.asker.notes.append(f"{self.told['uuid']}: {len(found)} processes")
        return found[:_MOST]

    def _list(self, name: str, handle: Any) -> Any:
        """A list of processes, by the newest question that the driver understands."""
        for version in ("_v3", "_v2"):
            found = self.asker.ask(name + version, handle)
            if found is not None:
                return found
        return None

    def _use(self, handle: Any) -> list[list[int]] | None:
        """What each process has used of late, if it used anything; None if that is not said."""
        nvml, since = self._nvml, int(time.time() * 1e6) - _PERIOD
        try:
            samples = nvml.nvmlDeviceGetProcessUtilization(handle, since)
        except nvml.NVMLError as error:
            # Success, if pynvml has found none to begin with.
            return [] if error.value in {0, _NOT_FOUND} else None
        finally:
            self.asker.answered += 1
        newest: dict[int, Any] = {}
        for sample in samples[:_MOST]:
            if sample.pid not in newest or sample.timeStamp > newest[sample.pid].timeStamp:
                newest[sample.pid] = sample
        return [
            [each.pid, each.smUtil, each.memUtil, each.encUtil, each.decUtil]
            for each in newest.values()
        ]


def _value_of(field: Any) -> int | None:
    """The value of a field, an unsigned number; None if the driver does not have it."""
    return int(field.value.uiVal) if field.nvmlReturn == 0 else None
