"""A GPU's place in an NVLink fabric, for the children that ask NVML.

Rules
- The newest structure that both the library and pynvml know is used. The third one has a summary of
  the health; the first one, of drivers before 550, has no health.
- nvml.h declares the state as one byte, pynvml as four. A library need not write the other three,
  so only the lowest byte counts.
- A GPU whose registration has not succeeded has no cluster and no clique, whatever the other fields
  say. An id of zeros means that there is no cluster: the fabric of a single machine has no name.

Source: the NVML API, "Fabric definitions", nvmlGpuFabricInfo_v3_t.
"""

from __future__ import annotations

import ctypes
from typing import Any

from api.errors import one_line
from hooks.node.nvml_probe import GpuAsker

_STRUCTURES = (
    ("c_nvmlGpuFabricInfo_v3_t", "nvmlDeviceGetGpuFabricInfoV"),
    ("c_nvmlGpuFabricInfo_v2_t", "nvmlDeviceGetGpuFabricInfoV"),
    ("c_nvmlGpuFabricInfo_t", "nvmlDeviceGetGpuFabricInfo"),
)
_STATES = {1: "not-started", 2: "in-progress", 3: "completed"}
_COMPLETED = 3
_HEALTH = {1: "healthy", 2: "unhealthy", 3: "limited-capacity"}


def fabric_of(nvml: Any, asker: GpuAsker, handle: Any) -> dict[str, Any] | None:
    """Return the fields of :class:`~integration.nvml.values.Fabric`; None without a fabric.

    Raises:
        GpuLost: the GPU is lost.
    """
    for structure, call in _STRUCTURES:
        kind = getattr(nvml, structure, None)
        if kind is None:
            continue
        info = kind()
        if asker.ask(call, handle, ctypes.byref(info)) is not None:
            return _fields(nvml, info)
    return None


def _fields(nvml: Any, info: Any) -> dict[str, Any] | None:
    state = info.state & 0xFF
    if state not in _STATES:
        return None
    health = _HEALTH.get(getattr(info, "healthSummary", 0), "")
    fields = {"state": _STATES[state], "health": health}
    if state == _COMPLETED and info.status:
        fields["failure"] = one_line(str(nvml.NVMLError(info.status)))
    elif state == _COMPLETED and any(info.clusterUuid):
        digits = bytes(info.clusterUuid).hex()
        parts = (digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])
        fields |= {"cluster_uuid": "-".join(parts), "clique": info.cliqueId}
    return fields
