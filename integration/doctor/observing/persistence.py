"""The child that asks NVML whether GPUs stay initialised: run by path and never imported.

    python3 -I -S persistence.py SECONDS LIBRARY MODULES

As hooks/node/nvml_probe.py, and for the same reasons: NVML may hang. It prints a JSON list with
the persistence mode of each GPU: 0, 1, or null if the GPU has none.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from typing import Any


def main(seconds: str, library: str, modules: str) -> None:
    """Asks and answers. Does not return."""
    signal.setitimer(signal.ITIMER_REAL, float(seconds))
    answer = os.dup(1)
    os.dup2(2, 1)
    ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    sys.path.append(modules)
    import pynvml as nvml  # noqa: PLC0415 - found only now

    nvml.nvmlInit()
    modes = [_mode(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
    with open(answer, "wb") as stream:
        stream.write(json.dumps(modes).encode())
    # No nvmlShutdown: it can hang as well, and the kernel cleans up after us.
    os._exit(0)


def _mode(nvml: Any, index: int) -> int | None:
    try:
        return int(nvml.nvmlDeviceGetPersistenceMode(nvml.nvmlDeviceGetHandleByIndex(index)))
    except nvml.NVMLError:
        return None


if __name__ == "__main__":
    main(*sys.argv[1:])
