"""The child program that queries NVML, and the rules by which a GPU counts as lost.

    python3 -I -S nvml_probe.py SECONDS LIBRARY MODULES

NVML's initialisation can hang for seconds, or for ever if a GPU has fallen off the bus, and its
memory stays in the process. So this process lives for one question only. It prints one JSON object
(described in :mod:`hooks.node.nvml`) and exits with 0, or prints the reason of its failure and
exits with 1. After SECONDS the kernel ends it (SIGALRM), even if its caller is gone.

One bad GPU does not affect the others. A child queries NVML, and reports which GPU it queries. If
it crashes on a GPU, or hangs on it while there is still time for the others, that GPU is lost, and
another child continues without it. If all GPUs fail in this way, the failure is NVML's.

LIBRARY is the driver root's libnvidia-ml, loaded by its path. When pynvml then requests
"libnvidia-ml.so.1", glibc returns the same library, because it has that soname. MODULES is the
directory of pynvml, since an isolated interpreter does not search there.

The agent's child also uses :class:`GpuAsker`, so that a container, the kubelet and the metrics have
the same view of a GPU:

- A GPU is lost if it cannot be opened, if any NVML call returns that it is lost or needs a reset,
  or if all queries fail that only the GPU itself can answer (:data:`_SIGNS`). Names and addresses
  do not count, because the driver remembers them.
- Any other failure costs only one value.
- A feature that a GPU or driver lacks is not a failure; drivers have several codes for it.
- A function that the library lacks is not a failure of the GPU.

This program is run by its path, so it imports none of our modules.

Source: the NVML API, nvmlReturn_t.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
from collections.abc import Callable
from typing import Any

# Numbers of nvmlReturn_t: older releases of pynvml do not have names for all of them.
_FUNCTION_NOT_FOUND = 13
LOST = frozenset({15, 16})  # GPU_IS_LOST, RESET_REQUIRED
_ABSENT = frozenset(
    {
        2,  # INVALID_ARGUMENT
        3,  # NOT_SUPPORTED
        4,  # NO_PERMISSION
        6,  # NOT_FOUND
        _FUNCTION_NOT_FOUND,
        21,  # NO_DATA
        25,  # ARGUMENT_VERSION_MISMATCH
        26,  # DEPRECATED
    }
)

_MOST_NOTES = 16

_PR_SET_PDEATHSIG = 1
_CHUNK = 1 << 16
# The part of the total time that NVML may take for one GPU.
_OF_ONE = 0.4

_TEMPERATURE = 0
_SIGNS: tuple[tuple[Any, ...], ...] = (
    ("nvmlDeviceGetMemoryInfo",),
    ("nvmlDeviceGetTemperature", _TEMPERATURE),
    ("nvmlDeviceGetUtilizationRates",),
    ("nvmlDeviceGetPowerUsage",),
)


class GpuLost(Exception):
    """Why a GPU is lost, in NVML's words."""


class GpuAsker:
    """Queries one GPU.

    Args:
        nvml: the module pynvml, initialised.
        index: NVML's index of the GPU.

    Attributes:
        why: why the last query has no answer; "" if it has one.
        notes: the failed queries, one line each.
        answered: the number of queries from which NVML has returned.
    """

    def __init__(self, nvml: Any, index: int) -> None:
        self._nvml, self._index = nvml, index
        self._name = f"GPU {index}"
        self.why = ""
        self.notes: list[str] = []
        self.answered = 0

    def open(self, gpu: dict[str, Any]) -> Any:
        """Return the GPU's handle.

        Args:
            gpu: receives its ``uuid``, even for a lost GPU that still reports it.

        Raises:
            GpuLost: the GPU is lost.
            NVMLError: the library cannot open GPUs at all.
        """
        nvml = self._nvml
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(self._index)
        except nvml.NVMLError as error:
            if error.value == _FUNCTION_NOT_FOUND:
                raise
            raise GpuLost(str(error)) from error
        gpu["uuid"] = self.text("nvmlDeviceGetUUID", handle)
        self._name = gpu["uuid"] or self._name
        self._look_for_life(handle)
        return handle

    def _look_for_life(self, handle: Any) -> None:
        first = ""
        for name, *arguments in _SIGNS:
            answer, failure = self._call(name, handle, *arguments)
            if answer is not None:
                return
            first = first or failure
        if first:
            raise GpuLost(f"it answers no question ({first})")

    def ask(self, name: str, *arguments: Any) -> Any:
        """Return the result of one NVML call; None if there is none.

        Raises:
            GpuLost: the GPU is lost.
        """
        answer, failure = self._call(name, *arguments)
        line = f"{self._name}: {failure}"
        if failure and line not in self.notes and len(self.notes) < _MOST_NOTES:
            self.notes.append(line)
        return answer

    def text(self, name: str, *arguments: Any) -> str | None:
        """Like :meth:`ask`, for a string."""
        answer = self.ask(name, *arguments)
        return None if answer is None else text_of(answer)

    def _call(self, name: str, *arguments: Any) -> tuple[Any, str]:
        """Return the answer, and why the query failed; "" if the GPU just lacks the feature."""
        call = getattr(self._nvml, name, None)
        if call is None:
            self.why = "pynvml does not know it"
            return None, ""
        self.why = ""
        try:
            answer = call(*arguments)
        except self._nvml.NVMLError as error:
            if error.value in LOST:
                raise GpuLost(str(error)) from error
            self.why = str(error)
            return None, "" if error.value in _ABSENT else f"{name}: {self.why}"
        except MemoryError:  # from a wrong count
            self.why = "more than there is memory for"
            return None, f"{name}: {self.why}"
        finally:
            self.answered += 1
        return answer, ""


def text_of(value: Any) -> str:
    """Return a string from NVML; pynvml returns bytes or str, depending on its release."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


_MIG_ENABLED = 1


def main(seconds: str, library: str, modules: str) -> None:
    """Query NVML and print the answer; do not return."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    # Python blocks no signal, but our parent may have.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    signal.setitimer(signal.ITIMER_REAL, float(seconds))
    told = _asked(library, modules, float(seconds) * _OF_ONE)
    with open(1, "wb", closefd=False) as stream:
        stream.write(json.dumps(told).encode())
    os._exit(int("error" in told))


def _asked(library: str, modules: str, patience: float) -> dict[str, Any]:
    """Query NVML about all GPUs, except those on which it hangs or crashes.

    Args:
        patience: the time limit in seconds for one of them.
    """
    given_up: dict[int, str] = {}
    while True:
        reading, writing = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(reading)
            _be_child(writing, library, modules, given_up)
        os.close(writing)
        asks, told = _heard(reading, patience)
        os.close(reading)
        os.kill(pid, signal.SIGKILL)  # do not wait for it: the driver may hold it
        if isinstance(told, dict):
            gpus: list[dict[str, Any]] = told.get("gpus", [])
            everyone = bool(gpus) and all(gpu["index"] in given_up for gpu in gpus)
            return {"error": next(iter(given_up.values()))} if everyone else told
        if asks is None or asks in given_up:
            return {"error": told}
        given_up[asks] = told


def _heard(reading: int, patience: float) -> tuple[int | None, dict[str, Any] | str]:
    """Return the last GPU that a child queried and its answer, or why there is none."""
    asks, received = None, b""
    poll = select.poll()
    poll.register(reading, select.POLLIN)
    while True:
        # Until it queries a GPU, only the alarm counts.
        if not poll.poll(None if asks is None else patience * 1000):
            return asks, "it does not answer"
        chunk = os.read(reading, _CHUNK)
        if not chunk:
            return asks, "NVML crashes when it is asked"
        received += chunk
        *lines, received = received.split(b"\n")
        for line in lines:
            word = json.loads(line)
            if "asks" not in word:
                return asks, word
            asks = word["asks"]


def _be_child(writing: int, library: str, modules: str, given_up: dict[int, str]) -> None:
    """Query NVML; report each query in advance, and each answer. Does not return."""
    # End with the parent, however that ends.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The driver's library may print, but stdout is only for the answer.
    os.dup2(2, 1)

    def say(word: dict[str, Any]) -> None:
        text = json.dumps(word).encode() + b"\n"
        while text:
            text = text[os.write(writing, text) :]

    try:
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
        sys.path.append(modules)
        told = ask(given_up, lambda index: say({"asks": index}))
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
        told = {"error": f"{type(error).__name__}: {error}"}
    say(told)
    # No nvmlShutdown: it can hang too, and the kernel cleans up.
    os._exit(0)


def import_pynvml() -> Any:
    """Import pynvml for half of the usual cost.

    pynvml uses ``ctypes.util`` only on Windows, but that module imports ``subprocess``,
    ``tempfile``, ``shutil`` and more. So it is hidden during the import.
    """
    name = "ctypes.util"
    before = sys.modules.get(name)
    stand_in: Any = type(sys)(name)
    stand_in.find_library = None
    sys.modules[name] = before or stand_in
    try:
        import pynvml  # noqa: PLC0415 - found only after main() has said where
    finally:
        if before is None:
            del sys.modules[name]
    return pynvml


def ask(given_up: dict[int, str], asks: Callable[[int], None]) -> dict[str, Any]:
    """Return NVML's report of each GPU.

    Args:
        given_up: why some are lost, by index; these are not queried.
        asks: called with the index of each other GPU before its query.
    """
    nvml = import_pynvml()
    nvml.nvmlInit()
    gpus: list[dict[str, Any]] = []
    notes: list[str] = []
    for index in range(nvml.nvmlDeviceGetCount()):
        gpu: dict[str, Any] = {"index": index}
        gpus.append(gpu)
        if index in given_up:
            gpu["lost"] = given_up[index]
            continue
        asks(index)
        asker = GpuAsker(nvml, index)
        try:
            _fill(gpu, asker)
        except GpuLost as error:
            gpu["lost"] = str(error)
        notes += asker.notes
    return {
        "driver": text_of(nvml.nvmlSystemGetDriverVersion()),
        "cuda": _cuda(nvml),
        "gpus": gpus,
        "notes": notes,
    }


def _fill(gpu: dict[str, Any], asker: GpuAsker) -> None:
    """Collect NVML's values of one GPU, identity first.

    Raises:
        GpuLost: the GPU is lost.
    """
    handle = asker.open(gpu)
    pci = asker.ask("nvmlDeviceGetPciInfo", handle)
    gpu["bus_id"] = None if pci is None else text_of(pci.busId)
    gpu["minor"] = asker.ask("nvmlDeviceGetMinorNumber", handle)
    gpu["name"] = asker.text("nvmlDeviceGetName", handle)
    memory = asker.ask("nvmlDeviceGetMemoryInfo", handle)
    gpu["memory"] = None if memory is None else memory.total
    capability = asker.ask("nvmlDeviceGetCudaComputeCapability", handle)
    gpu["compute_capability"] = None if capability is None else "{}.{}".format(*capability)
    gpu["brand"] = asker.ask("nvmlDeviceGetBrand", handle)
    gpu["architecture"] = asker.ask("nvmlDeviceGetArchitecture", handle)
    mig = asker.ask("nvmlDeviceGetMigMode", handle)
    gpu["mig"] = mig is not None and mig[0] == _MIG_ENABLED
    gpu["mig_devices"] = []
    if not gpu["mig"]:
        return
    for index in range(asker.ask("nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
        device = asker.ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, index)
        if device is None:  # a slot without a device
            continue
        # "NVIDIA H100 80GB HBM3 MIG 1g.10gb": no other call returns the profile
        name = asker.text("nvmlDeviceGetName", device) or ""
        told = {
            "index": index,
            "uuid": asker.text("nvmlDeviceGetUUID", device),
            "gpu_instance": asker.ask("nvmlDeviceGetGpuInstanceId", device),
            "compute_instance": asker.ask("nvmlDeviceGetComputeInstanceId", device),
            "profile": name.rpartition(" MIG ")[2] if " MIG " in name else "",
        }
        if None not in told.values():  # it cannot be granted without them
            gpu["mig_devices"].append(told)


def _cuda(nvml: Any) -> int | None:
    try:
        version: int = nvml.nvmlSystemGetCudaDriverVersion()
    except nvml.NVMLError:
        return None
    return version


if __name__ == "__main__":
    main(*sys.argv[1:])
