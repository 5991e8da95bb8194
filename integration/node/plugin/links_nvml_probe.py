"""The child that asks NVML how GPUs are connected: a program of its own, run by path.

    python3 -I -S links_nvml_probe.py SECONDS LIBRARY MODULES

As :mod:`hooks.node.nvml_probe`, of which it has the arguments and the reasons. It prints one JSON
object and ends with 0, or prints why it could not and ends with 1::

    {"gpus": [{"bus_id": "00000000:18:00.0", "links": [["00000000:2A:00.0", 0], …]}, …],
     "between": [[0, 1, 50], …]}

A link is where it leads, and of what kind that is (nvmlIntNvLinkDeviceType_t; null if NVML does
not say). ``between`` has nvmlGpuTopologyLevel_t of two of these GPUs.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from typing import Any

_ENABLED = 1
_MOST_LINKS = 18


def main(seconds: str, library: str, modules: str) -> None:
    """Asks and answers. Does not return."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
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
    """What NVML says of each GPU, and of each two."""
    import pynvml as nvml  # noqa: PLC0415 - found only after main() has said where

    nvml.nvmlInit()
    handles, gpus = [], []
    for index in range(nvml.nvmlDeviceGetCount()):
        # One that fell off the bus says so here or in any later call; the others still work.
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            bus_id = _text(nvml.nvmlDeviceGetPciInfo(handle).busId)
        except nvml.NVMLError:
            continue
        handles.append(handle)
        gpus.append({"bus_id": bus_id, "links": _links(nvml, handle)})
    between = []
    for first, one in enumerate(handles):
        for second in range(first + 1, len(handles)):
            try:
                level = nvml.nvmlDeviceGetTopologyCommonAncestor(one, handles[second])
            except nvml.NVMLError:
                continue
            between.append([first, second, int(level)])
    return {"gpus": gpus, "between": between}


def _links(nvml: Any, handle: Any) -> list[tuple[str, int | None]]:
    found: list[tuple[str, int | None]] = []
    for link in range(_MOST_LINKS):
        try:
            if nvml.nvmlDeviceGetNvLinkState(handle, link) != _ENABLED:
                continue
            remote = _text(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId)
        except nvml.NVMLError as error:
            if error.value in {nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_INVALID_ARGUMENT}:
                continue  # there is no such link, or no NVLink at all
            break
        found.append((remote, _kind(nvml, handle, link)))
    return found


def _kind(nvml: Any, handle: Any, link: int) -> int | None:
    try:
        return int(nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link))
    except (nvml.NVMLError, AttributeError):  # an older driver, or an older pynvml
        return None


def _text(value: Any) -> str:
    """A string of NVML: pynvml gives bytes or str, depending on its release."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


if __name__ == "__main__":
    main(*sys.argv[1:])
