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
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hooks.node.nvml_asking import GpuAsker

_MIG_ENABLED = 1
_ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), os.pardir, os.pardir))


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
        sys.path += [modules, _ROOT]
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

    from hooks.node.nvml_asking import GpuAsker, GpuLost, text_of  # noqa: PLC0415 - likewise

    nvml.nvmlInit()
    gpus: list[dict[str, Any]] = []
    notes: list[str] = []
    for index in range(nvml.nvmlDeviceGetCount()):
        gpu: dict[str, Any] = {"index": index}
        asker = GpuAsker(nvml, index)
        try:
            _fill(gpu, asker)
        except GpuLost as error:
            gpu["lost"] = str(error)
        gpus.append(gpu)
        notes += asker.notes
    return {
        "driver": text_of(nvml.nvmlSystemGetDriverVersion()),
        "cuda": _cuda(nvml),
        "gpus": gpus,
        "notes": notes,
    }


def _fill(gpu: dict[str, Any], asker: GpuAsker) -> None:
    """Gathers what NVML says of one GPU, what identifies it first.

    Raises:
        GpuLost: it is lost.
    """
    from hooks.node.nvml_asking import text_of  # noqa: PLC0415 - see ask()

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
    mig = asker.ask("nvmlDeviceGetMigMode", handle)
    gpu["mig"] = mig is not None and mig[0] == _MIG_ENABLED
    gpu["mig_devices"] = []
    if not gpu["mig"]:
        return
    for index in range(asker.ask("nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
        device = asker.ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, index)
        if device is None:  # a place for a device that was not made
            continue
        # "NVIDIA H100 80GB HBM3 MIG 1g.10gb": the profile does not have a call of its own
        name = asker.text("nvmlDeviceGetName", device) or ""
        told = {
            "index": index,
            "uuid": asker.text("nvmlDeviceGetUUID", device),
            "gpu_instance": asker.ask("nvmlDeviceGetGpuInstanceId", device),
            "compute_instance": asker.ask("nvmlDeviceGetComputeInstanceId", device),
            "profile": name.rpartition(" MIG ")[2] if " MIG " in name else "",
        }
        if None not in told.values():  # without them it cannot be granted
            gpu["mig_devices"].append(told)


def _cuda(nvml: Any) -> int | None:
    try:
        version: int = nvml.nvmlSystemGetCudaDriverVersion()
    except nvml.NVMLError:
        return None
    return version


if __name__ == "__main__":
    main(*sys.argv[1:])
