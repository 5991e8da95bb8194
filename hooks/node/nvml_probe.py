"""The child that asks NVML: a program of its own, run by path and never imported.

    python3 -I -S nvml_probe.py SECONDS LIBRARY MODULES

NVML's initialisation can hang for seconds, or for ever if the GPU has fallen off the bus, and
its memory stays in the process; so this process lives for one question. It prints one JSON
object (:mod:`hooks.node.nvml` says which) and ends with 0, or prints why it could not and ends with
1. After SECONDS the kernel ends it (SIGALRM), whoever has stopped waiting.

LIBRARY is the driver root's libnvidia-ml, and is loaded by its path. glibc then answers
pynvml's request for "libnvidia-ml.so.1" with it, for it has that soname. MODULES is the
directory where pynvml is: an isolated interpreter does not look there itself.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from typing import Any

_MIG_ENABLED = 1
# nvmlReturn_t; older releases of pynvml have no names for them.
_ARGUMENT_VERSION_MISMATCH, _DEPRECATED = 25, 26


def main(seconds: str, library: str, modules: str) -> None:
    """Asks and answers. Does not return."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    # Python blocks nothing, but whoever started us may have.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    signal.setitimer(signal.ITIMER_REAL, float(seconds))
    # The driver's library may print; the answer alone belongs on stdout.
    answer = os.dup(1)
    os.dup2(2, 1)
    try:
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
        sys.path.append(modules)
        text, status = json.dumps(ask()), 0
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
        text, status = json.dumps({"error": f"{type(error).__name__}: {error}"}), 1
    with open(answer, "wb") as stream:
        stream.write(text.encode())
    # No nvmlShutdown: it can hang as well, and the kernel cleans up after us.
    os._exit(status)


def ask() -> dict[str, Any]:
    """What NVML says of each GPU."""
    import pynvml as nvml  # noqa: PLC0415 - found only after main() has said where

    nvml.nvmlInit()
    gpus, lost = [], []
    for index in range(nvml.nvmlDeviceGetCount()):
        # One that fell off the bus says so here or in any later call; the others still work.
        try:
            gpus.append(_gpu(nvml, nvml.nvmlDeviceGetHandleByIndex(index), index))
        except nvml.NVMLError as error:
            lost.append({"index": index, "why": f"GPU {index} of NVML: {error}"})
            last = error
    if lost and not gpus:
        raise last
    return {
        "driver": _text(nvml.nvmlSystemGetDriverVersion()),
        "cuda": _or_none(nvml, nvml.nvmlSystemGetCudaDriverVersion),
        "gpus": gpus,
        "lost": lost,
    }


def _gpu(nvml: Any, handle: Any, index: int) -> dict[str, Any]:
    mig = _or_none(nvml, nvml.nvmlDeviceGetMigMode, handle)
    enabled = mig is not None and mig[0] == _MIG_ENABLED
    memory = _or_none(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    capability = _or_none(nvml, nvml.nvmlDeviceGetCudaComputeCapability, handle)
    return {
        "index": index,
        "uuid": _text(nvml.nvmlDeviceGetUUID(handle)),
        "minor": nvml.nvmlDeviceGetMinorNumber(handle),
        "bus_id": _text(nvml.nvmlDeviceGetPciInfo(handle).busId),
        "name": _text(nvml.nvmlDeviceGetName(handle)),
        "memory": None if memory is None else memory.total,
        "compute_capability": None if capability is None else "{}.{}".format(*capability),
        "brand": _or_none(nvml, nvml.nvmlDeviceGetBrand, handle),
        "mig": enabled,
        "mig_devices": _mig_devices(nvml, handle) if enabled else [],
    }


def _mig_devices(nvml: Any, handle: Any) -> list[dict[str, Any]]:
    devices = []
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        device = _or_none(nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, index)
        if device is None:  # a place for a device that was not made
            continue
        # "NVIDIA H100 80GB HBM3 MIG 1g.10gb": the profile has no call of its own
        name = _text(nvml.nvmlDeviceGetName(device))
        devices.append(
            {
                "index": index,
                "uuid": _text(nvml.nvmlDeviceGetUUID(device)),
                "gpu_instance": nvml.nvmlDeviceGetGpuInstanceId(device),
                "compute_instance": nvml.nvmlDeviceGetComputeInstanceId(device),
                "profile": name.rpartition(" MIG ")[2] if " MIG " in name else "",
            }
        )
    return devices


def _or_none(nvml: Any, call: Any, *arguments: Any) -> Any:
    """The call's answer; None if this GPU or driver has no such thing.

    A GPU that could do without the answer is not lost for the lack of it. Drivers have more than
    one word for that: the last two are those of an interface that has changed.
    """
    try:
        return call(*arguments)
    except nvml.NVMLError as error:
        absent = (
            nvml.NVML_ERROR_NOT_SUPPORTED,
            nvml.NVML_ERROR_NOT_FOUND,
            nvml.NVML_ERROR_FUNCTION_NOT_FOUND,
            nvml.NVML_ERROR_NO_PERMISSION,
            nvml.NVML_ERROR_NO_DATA,
            nvml.NVML_ERROR_INVALID_ARGUMENT,
            _ARGUMENT_VERSION_MISMATCH,
            _DEPRECATED,
        )
        if error.value in absent:
            return None
        raise


def _text(value: Any) -> str:
    """A string of NVML: pynvml gives bytes or str, depending on its release."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


if __name__ == "__main__":
    main(*sys.argv[1:])
