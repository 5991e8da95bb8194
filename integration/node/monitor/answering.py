"""Answering what the GPUs are like, in the child.

It says ``{"ready": DRIVER}`` once NVML is up. Then it says one object for each line that it reads,
and ends when there are no more::

    {"driver": …, "gpus": [{"index": …, "uuid": …, …}, …], "notes": [WHAT WENT WRONG, …]}

with all of a GPU in NVML's own units, and null for what it does not say. The agent checks it and
turns it into a :class:`~integration.node.monitor.values.Sample` (:mod:`.samples`). Whether a GPU is
lost is decided by the rules that the engine goes by (:mod:`hooks.node.nvml_asking`).

In MIG mode NVML tells a GPU's processes with the instance that each is in, if it is asked of the
GPU by somebody who may know them all; otherwise each MIG device is asked for its own.

Source: the NVML API, "Device Queries"; NVIDIA's MIG user guide, "Monitoring MIG Devices".
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from hooks.node.nvml_asking import GpuAsker, GpuLost, text_of

if TYPE_CHECKING:
    from collections.abc import Callable

_NOT_FOUND = 6  # nvmlReturn_t

_CORRECTED, _UNCORRECTED, _VOLATILE = 0, 1, 0
_SM_CLOCK, _MEMORY_CLOCK, _TEMPERATURE = 1, 2, 0
_MIG_ENABLED = 1

# Processes of one GPU that are told of, and calls that failed.
_MOST = 4096
_NOTES = 32

# A process's use is of this period at most, in microseconds.
_PERIOD = 2_000_000


def answer(nvml: Any, say: Callable[[dict[str, Any]], None]) -> None:
    """Answer until nobody asks any more.

    Args:
        nvml: the module pynvml.
        say: takes the answers.

    Raises:
        NVMLError: NVML does not answer at all.
    """
    nvml.nvmlInit()
    asker = Asker(nvml)
    say({"ready": asker.driver()})
    for _ in sys.stdin:
        say(asker.all())


class Asker:
    """Who asks NVML.

    Args:
        nvml: the module pynvml.
    """

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._notes: list[str] = []

    def driver(self) -> str:
        """The version that NVML is of."""
        return text_of(self._nvml.nvmlSystemGetDriverVersion())

    def all(self) -> dict[str, Any]:
        """What is to be said of all GPUs."""
        nvml, self._notes = self._nvml, []
        gpus = []
        for index in range(nvml.nvmlDeviceGetCount()):
            gpu: dict[str, Any] = {"index": index, "uuid": ""}
            self._asker = GpuAsker(nvml, index)
            try:
                handle = self._asker.open(gpu)
                gpu.update(self._gpu(handle))
            except GpuLost as error:
                gpu["lost"] = str(error)
            for line in self._asker.notes:
                self._note(line)
            gpus.append(gpu)
        return {"driver": self.driver(), "gpus": gpus, "notes": self._notes}

    def _gpu(self, handle: Any) -> dict[str, Any]:
        """All of one GPU.

        Raises:
            GpuLost: it is lost.
        """
        ask = self._asker.ask
        rates = ask("nvmlDeviceGetUtilizationRates", handle)
        encoder = ask("nvmlDeviceGetEncoderUtilization", handle)
        decoder = ask("nvmlDeviceGetDecoderUtilization", handle)
        throttle = ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        if throttle is None:
            throttle = ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
        mode = ask("nvmlDeviceGetMigMode", handle)
        devices = self._mig(handle) if mode is not None and mode[0] == _MIG_ENABLED else []
        return {
            "memory": self._memory(handle),
            "utilisation": None if rates is None else [rates.gpu, rates.memory],
            "encoder": None if encoder is None else encoder[0],
            "decoder": None if decoder is None else decoder[0],
            "power": ask("nvmlDeviceGetPowerUsage", handle),
            "energy": ask("nvmlDeviceGetTotalEnergyConsumption", handle),
            "temperature": ask("nvmlDeviceGetTemperature", handle, _TEMPERATURE),
            "sm_clock": ask("nvmlDeviceGetClockInfo", handle, _SM_CLOCK),
            "memory_clock": ask("nvmlDeviceGetClockInfo", handle, _MEMORY_CLOCK),
            "ecc_corrected": ask("nvmlDeviceGetTotalEccErrors", handle, _CORRECTED, _VOLATILE),
            "ecc_uncorrected": ask("nvmlDeviceGetTotalEccErrors", handle, _UNCORRECTED, _VOLATILE),
            "rows": ask("nvmlDeviceGetRemappedRows", handle),
            "throttle": throttle,
            "mig": [device for _, device in devices],
            "processes": self._processes(handle, [each for each, _ in devices]),
            "use": self._use(handle),
        }

    def _memory(self, handle: Any) -> list[int] | None:
        """All of it, and what is in use; the newer question leaves out what the driver keeps."""
        version = getattr(self._nvml, "nvmlMemory_v2", None)
        memory = None
        if version is not None:
            memory = self._asker.ask("nvmlDeviceGetMemoryInfo", handle, version)
        if memory is None:
            memory = self._asker.ask("nvmlDeviceGetMemoryInfo", handle)
        return None if memory is None else [memory.total, memory.used]

    def _mig(self, handle: Any) -> list[tuple[Any, dict[str, Any]]]:
        devices = []
        for index in range(self._asker.ask("nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
            device = self._asker.ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, index)
            if device is None:  # a place for a device that was not made
                continue
            uuid = self._asker.ask("nvmlDeviceGetUUID", device)
            if uuid is None:
                continue
            told = {
                "uuid": text_of(uuid),
                "gi": self._asker.ask("nvmlDeviceGetGpuInstanceId", device),
                "ci": self._asker.ask("nvmlDeviceGetComputeInstanceId", device),
                "memory": self._memory(device),
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
            self._note(f"{len(found)} processes of one GPU")
        return found[:_MOST]

    def _list(self, name: str, handle: Any) -> Any:
        """A list of processes, by the newest question that the driver understands."""
        for version in ("_v3", "_v2"):
            found = self._asker.ask(name + version, handle)
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
        newest: dict[int, Any] = {}
        for sample in samples[:_MOST]:
            if sample.pid not in newest or sample.timeStamp > newest[sample.pid].timeStamp:
                newest[sample.pid] = sample
        return [
            [each.pid, each.smUtil, each.memUtil, each.encUtil, each.decUtil]
            for each in newest.values()
        ]

    def _note(self, line: str) -> None:
        if len(self._notes) < _NOTES and line not in self._notes:
            self._notes.append(line)
