"""One question to NVML, or one setting, in the child.

The arguments are a question and its own arguments; :func:`run` prints one line.

``fabric``: ``{"gpus": {UUID: {…}, …}}``, the fields of :class:`~integration.nvml.values.Fabric` of
each GPU that answers, null if it has none.

``links``: how GPUs are connected::

    {"gpus": [{"bus_id": "00000000:18:00.0", "links": [["00000000:2A:00.0", 0, 3], …]}, …],
     "between": [[0, 1, 50], …]}

A link is its remote end, the type of that end (nvmlIntNvLinkDeviceType_t), and its number there;
null for what NVML does not know. ``between`` has nvmlGpuTopologyLevel_t of two of these GPUs.

``mode NUMBER UUID…``: set the compute mode of GPUs, 0 for any number of processes, 3 for one. The
answer has by UUID why the mode was not set, "" if it was.

``persistence``: ``{"modes": [1, …]}``, whether each GPU stays initialised while it is idle, null if
it has no such mode.

``parts``: for each GPU that answers all of this, the MIG mode now and after its next reset, and its
MIG profiles, instances and devices. A profile has the figures of nvmlGpuInstanceProfileInfo and its
possible placements; only GPUs that support MIG have profiles. An instance is its id, its profile's
id, and its placement; a device has the figures of nvmlDeviceAttributes, and its compute slices.
Only GPUs in MIG mode have these::

    {"gpus": [{"uuid": "GPU-…", "addressing": 1, "mode": true, "pending": true,
      "instances": [[7, 19, 0, 1], …],
      "profiles": [{"id": 19, "name": "1g.10gb", "most": 7, "places": [[0, 1], …],
                    "figures": [9984, 16, 1, 1, 0, 1, 0]}, …],
      "devices": [{"uuid": "MIG-…", "instance": 7, "slices": 1, "figures": [9984, 16, …]}, …]},
      …]}

Figures are MiB of memory, then the numbers of multiprocessors, copy engines, decoders, encoders,
JPEG engines and optical flow engines.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from hooks.node.nvml_probe import GpuAsker, GpuLost, text_of
from integration.nvml.child_fabric import fabric_of
from integration.nvml.child_samples import uuid_of, value_of

_ENABLED = 1
_MOST_LINKS = 36
_REMOTE_LINK = 146  # NVML_FI_DEV_NVLINK_REMOTE_NVLINK_ID; its scope is the link
_DEFAULT_MODE = 0
# NVML's profiles are few, and numbered; a GPU's memory has eight slices.
_MOST_PROFILES = 32
_MOST_PLACES = 32
# nvmlReturn_t: INVALID_ARGUMENT, NOT_SUPPORTED, NOT_FOUND, FUNCTION_NOT_FOUND, and
# ARGUMENT_VERSION_MISMATCH.
_ABSENT = frozenset({2, 3, 6, 13, 25})


def run(nvml: Any, say: Callable[[dict[str, Any]], None], question: str, *arguments: str) -> None:
    """Answer the question."""
    say(_ANSWERS[question](nvml, *arguments))


def fabric(nvml: Any) -> dict[str, Any]:
    """Return the place of each GPU in an NVLink fabric."""
    gpus = {}
    for index in range(nvml.nvmlDeviceGetCount()):
        asker, opened = GpuAsker(nvml, index), dict[str, Any]()
        try:
            handle = asker.open(opened)
            gpus[uuid_of(opened["uuid"] or "")] = fabric_of(nvml, asker, handle)
        except GpuLost:
            continue
    return {"gpus": gpus}


def links(nvml: Any) -> dict[str, Any]:
    """Return the NVLinks of each GPU, and the topology level of each two."""
    handles, gpus = [], []
    for index in range(nvml.nvmlDeviceGetCount()):
        # A GPU that fell off the bus fails here or in any later call; the others still work.
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            bus_id = text_of(nvml.nvmlDeviceGetPciInfo(handle).busId)
        except nvml.NVMLError:
            continue
        handles.append(handle)
        gpus.append({"bus_id": bus_id, "links": _links(nvml, handle)})
    between = []
    for first, one in enumerate(handles):
        for second in range(first + 1, len(handles)):
            other = handles[second]
            level = _optional(nvml, "nvmlDeviceGetTopologyCommonAncestor", one, other)
            if level is not None:
                between.append([first, second, level])
    return {"gpus": gpus, "between": between}


def _links(nvml: Any, handle: Any) -> list[tuple[str, int | None, int | None]]:
    found: list[tuple[str, int | None, int | None]] = []
    for link in range(_MOST_LINKS):
        try:
            if nvml.nvmlDeviceGetNvLinkState(handle, link) != _ENABLED:
                continue
            remote = text_of(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId)
        except nvml.NVMLError as error:
            if error.value in {nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_INVALID_ARGUMENT}:
                continue  # there is no such link, or no NVLink at all
            break
        kind = _optional(nvml, "nvmlDeviceGetNvLinkRemoteDeviceType", handle, link)
        fields = _optional(nvml, "nvmlDeviceGetFieldValues", handle, [(_REMOTE_LINK, link)])
        found.append((remote, kind, None if fields is None else value_of(fields[0])))
    return found


def _optional(nvml: Any, name: str, *arguments: Any) -> Any:
    """Return the answer to a call; None if the GPU, the driver or pynvml does not have it."""
    try:
        return getattr(nvml, name)(*arguments)
    except (nvml.NVMLError, AttributeError):
        return None


def set_mode(nvml: Any, number: str, *uuids: str) -> dict[str, str]:
    """Set the compute mode of GPUs; return by UUID why that failed, "" if it did not."""
    return {uuid: _set_mode(nvml, uuid, int(number)) for uuid in uuids}


def _set_mode(nvml: Any, uuid: str, mode: int) -> str:
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid.encode())
        if nvml.nvmlDeviceGetComputeMode(handle) != mode:
            nvml.nvmlDeviceSetComputeMode(handle, mode)
    except nvml.NVMLError as error:
        if mode == _DEFAULT_MODE and error.value == nvml.NVML_ERROR_NOT_FOUND:
            return ""  # a GPU that is gone has no mode to restore
        return str(error) or "unknown error"
    return ""


def persistence(nvml: Any) -> dict[str, list[int | None]]:
    """Return the persistence mode of each GPU."""
    handles = [
        _optional(nvml, "nvmlDeviceGetHandleByIndex", index)
        for index in range(nvml.nvmlDeviceGetCount())
    ]
    name = "nvmlDeviceGetPersistenceMode"
    return {"modes": [None if each is None else _optional(nvml, name, each) for each in handles]}


def parts(nvml: Any) -> dict[str, Any]:
    """Return the MIG profiles, instances and devices of each GPU."""
    found = []
    for index in range(nvml.nvmlDeviceGetCount()):
        gpu: dict[str, Any] = {"addressing": None}
        gpu |= {"mode": False, "pending": False}
        gpu |= {"profiles": [], "instances": [], "devices": []}
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            gpu["uuid"] = text_of(nvml.nvmlDeviceGetUUID(handle))
            gpu["addressing"] = _optional(nvml, "nvmlDeviceGetAddressingMode", handle)
            mode = _optional(nvml, "nvmlDeviceGetMigMode", handle)
            gpu["mode"], gpu["pending"] = (each == _ENABLED for each in mode or (0, 0))
            if mode is not None:
                _add_parts(nvml, handle, gpu)
        except nvml.NVMLError:
            continue  # the GPU is lost, or says so little that an instance may be missing
        found.append(gpu)
    return {"gpus": found}


def _add_parts(nvml: Any, handle: Any, gpu: dict[str, Any]) -> None:
    for index in range(_MOST_PROFILES):
        try:
            profile = nvml.nvmlDeviceGetGpuInstanceProfileInfo(handle, index)
            places = _places(nvml, handle, profile.id)
        except nvml.NVMLError as error:
            if error.value not in _ABSENT:
                raise
            continue  # this model does not have the profile, or not while its MIG mode is off
        row = {
            "id": profile.id,
            "name": text_of(profile.name).removeprefix("MIG "),
            "most": profile.instanceCount,
            "places": places,
            "figures": [
                profile.memorySizeMB, profile.multiprocessorCount, profile.copyEngineCount,
                profile.decoderCount, profile.encoderCount, profile.jpegCount, profile.ofaCount,
            ],
        }  # fmt: skip
        gpu["profiles"].append(row)
        if gpu["mode"]:
            gpu["instances"] += _instances(nvml, handle, profile)
    if not gpu["mode"]:
        return
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            device = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
            has = nvml.nvmlDeviceGetAttributes(device)
        except nvml.NVMLError as error:
            if error.value not in _ABSENT:
                raise
            continue  # no device was created at this index
        row = {
            "uuid": text_of(nvml.nvmlDeviceGetUUID(device)),
            "instance": nvml.nvmlDeviceGetGpuInstanceId(device),
            "slices": has.computeInstanceSliceCount,
            "figures": [
                has.memorySizeMB, has.multiprocessorCount, has.sharedCopyEngineCount,
                has.sharedDecoderCount, has.sharedEncoderCount, has.sharedJpegCount,
                has.sharedOfaCount,
            ],
        }  # fmt: skip
        gpu["devices"].append(row)


def _places(nvml: Any, handle: Any, profile: int) -> list[tuple[int, int]]:
    count = ctypes.c_uint(_MOST_PLACES)
    places = (nvml.c_nvmlGpuInstancePlacement_t * _MOST_PLACES)()
    nvml.nvmlDeviceGetGpuInstancePossiblePlacements(handle, profile, places, ctypes.byref(count))
    return [(each.start, each.size) for each in places[: count.value]]


def _instances(nvml: Any, handle: Any, profile: Any) -> list[tuple[int, int, int, int]]:
    count = ctypes.c_uint(profile.instanceCount)
    found = (nvml.c_nvmlGpuInstance_t * _MOST_PLACES)()
    nvml.nvmlDeviceGetGpuInstances(handle, profile.id, found, ctypes.byref(count))
    instances = []
    for instance in found[: count.value]:
        info = nvml.nvmlGpuInstanceGetInfo(instance)
        instances.append((info.id, info.profileId, info.placement.start, info.placement.size))
    return instances


_ANSWERS: dict[str, Callable[..., dict[str, Any]]] = {
    "fabric": fabric,
    "links": links,
    "mode": set_mode,
    "persistence": persistence,
    "parts": parts,
}
