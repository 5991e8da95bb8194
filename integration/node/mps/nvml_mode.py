"""The child that sets the compute mode of GPUs: run by path and never imported.

    python3 -I -S nvml_mode.py SECONDS LIBRARY MODULES MODE UUID...

As hooks/node/nvml_probe.py, and for the same reasons: NVML may hang. MODE is NVML's number of it: 0
for any number of processes, 3 for one. It prints a JSON object: by UUID, why its mode is not set,
"" if it is; or ``{"error": "…"}``.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from typing import Any

_DEFAULT = 0


def main(seconds: str, library: str, modules: str, mode: str, *uuids: str) -> None:
    """Sets and tells. Does not return."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    signal.setitimer(signal.ITIMER_REAL, float(seconds))
    answer = os.dup(1)
    os.dup2(2, 1)
    try:
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
        sys.path.append(modules)
        import pynvml as nvml  # noqa: PLC0415 - found only now

        nvml.nvmlInit()
        told = {uuid: _set(nvml, uuid, int(mode)) for uuid in uuids}
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
        told = {"error": f"{type(error).__name__}: {error}"}
    with open(answer, "wb") as stream:
        stream.write(json.dumps(told).encode())
    # No nvmlShutdown: it can hang as well, and the kernel cleans up after us.
    os._exit(0)


def _set(nvml: Any, uuid: str, mode: int) -> str:
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid.encode())
        if nvml.nvmlDeviceGetComputeMode(handle) != mode:
            nvml.nvmlDeviceSetComputeMode(handle, mode)
    except nvml.NVMLError as error:
        if mode == _DEFAULT and error.value == nvml.NVML_ERROR_NOT_FOUND:
            return ""  # a GPU that is gone has no mode to be set back
        return str(error) or "unknown error"
    return ""


if __name__ == "__main__":
    main(*sys.argv[1:])
