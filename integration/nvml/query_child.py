"""The child that asks NVML one question, or sets something: a program of its own, run by path.

    python3 -I -S query_child.py SECONDS LIBRARY MODULES links
    python3 -I -S query_child.py SECONDS LIBRARY MODULES mode NUMBER UUID...
    python3 -I -S query_child.py SECONDS LIBRARY MODULES persistence
    python3 -I -S query_child.py SECONDS LIBRARY MODULES parts

It has the arguments of :mod:`hooks.node.nvml_probe`, for the same reasons: NVML may hang. It prints
one JSON object and ends with 0, or prints ``{"error": "…"}`` and ends with 1.

``links`` prints how GPUs are connected::

    {"gpus": [{"bus_id": "00000000:18:00.0", "links": [["00000000:2A:00.0", 0], …]}, …],
     "between": [[0, 1, 50], …]}

A link is where it leads, and of what kind that is (nvmlIntNvLinkDeviceType_t; null if NVML does
not say). ``between`` has nvmlGpuTopologyLevel_t of two of these GPUs.

``mode`` sets the compute mode of GPUs: 0 for any number of processes, 3 for one. It prints by UUID
why its mode is not set, "" if it is.

``persistence`` prints ``{"modes": [1, …]}``: whether each GPU stays initialised while nobody uses
it, null if it has no such mode.

``parts`` prints what each GPU can be cut into, and is. A profile has nvmlGpuInstanceProfileInfo's
figures and the placements where it may begin; only GPUs that know MIG have any. An instance is its
id, its profile's, and where it is; a device has those of nvmlDeviceAttributes. Only GPUs in MIG
mode have these::

    {"gpus": [{"uuid": "GPU-…", "addressing": 1, "mode": true, "instances": [[7, 19, 0, 1], …],
      "profiles": [{"id": 19, "name": "1g.10gb", "most": 7, "places": [[0, 1], …],
                    "figures": [9984, 16, 1, 1, 0, 1, 0]}, …],
      "devices": [{"uuid": "MIG-…", "instance": 7, "figures": [9984, 16, …]}, …]}, …]}

Figures are MiB of memory, then how many multiprocessors, copy engines, decoders, encoders, JPEG
engines and optical flow engines.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), os.pardir, os.pardir))
_ENABLED = 1
_MOST_LINKS = 18
_DEFAULT_MODE = 0
# NVML's profiles are few, and numbered; a GPU's memory has eight slices.
_MOST_PROFILES = 32
_MOST_PLACES = 32


def main(seconds: str, library: str, modules: str, question: str, *arguments: str) -> None:
    """Asks and answers. Does not return."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    signal.setitimer(signal.ITIMER_REAL, float(seconds))
    # The driver's library may print; the answer alone belongs on stdout.
    answer = os.dup(1)
    os.dup2(2, 1)
    try:
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
        sys.path += [modules, _ROOT]
        from hooks.node.nvml_probe import import_pynvml  # noqa: PLC0415 - found only now

        nvml = import_pynvml()
        nvml.nvmlInit()
        told = _ANSWERS[question](nvml, *arguments)
        text, status = json.dumps(told), 0
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
        text, status = json.dumps({"error": f"{type(error).__name__}: {error}"}), 1
    with open(answer, "wb") as stream:
        stream.write(text.encode())
    # No nvmlShutdown: it can hang as well, and the kernel cleans up after us.
    os._exit(status)


def links(nvml: Any) -> dict[str, Any]:
    """What NVML says of each GPU, and of each two."""
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


def set_mode(nvml: Any, number: str, *uuids: str) -> dict[str, str]:
    """Set the compute mode of GPUs, and say of which that failed."""
    return {uuid: _set_mode(nvml, uuid, int(number)) for uuid in uuids}


def _set_mode(nvml: Any, uuid: str, mode: int) -> str:
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid.encode())
        if nvml.nvmlDeviceGetComputeMode(handle) != mode:
            nvml.nvmlDeviceSetComputeMode(handle, mode)
    except nvml.NVMLError as error:
        if mode == _DEFAULT_MODE and error.value == nvml.NVML_ERROR_NOT_FOUND:
            return ""  # a GPU that is gone has no mode to be set back
        return str(error) or "unknown error"
    return ""


def persistence(nvml: Any) -> dict[str, list[int | None]]:
    """The persistence mode of each GPU."""
    return {"modes": [_persistence(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]}


def _persistence(nvml: Any, index: int) -> int | None:
    try:
        return int(nvml.nvmlDeviceGetPersistenceMode(nvml.nvmlDeviceGetHandleByIndex(index)))
    except nvml.NVMLError:
        return None


def parts(nvml: Any) -> dict[str, Any]:
    """What each GPU can be cut into, and is."""
    found = []
    for index in range(nvml.nvmlDeviceGetCount()):
        gpu: dict[str, Any] = {"addressing": None, "mode": False}
        gpu |= {"profiles": [], "instances": [], "devices": []}
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            gpu["uuid"] = _text(nvml.nvmlDeviceGetUUID(handle))
            gpu["addressing"] = _addressing(nvml, handle)
            mode = _mig_mode(nvml, handle)
            gpu["mode"] = mode == _ENABLED
            if mode is not None:
                _add_parts(nvml, handle, gpu)
        except nvml.NVMLError:
            if "uuid" not in gpu:  # it is lost
                continue
        found.append(gpu)
    return {"gpus": found}


def _addressing(nvml: Any, handle: Any) -> int | None:
    try:
        return int(nvml.nvmlDeviceGetAddressingMode(handle))
    except (nvml.NVMLError, AttributeError):  # an older driver, or an older pynvml
        return None


def _mig_mode(nvml: Any, handle: Any) -> int | None:
    try:
        return int(nvml.nvmlDeviceGetMigMode(handle)[0])
    except nvml.NVMLError:  # it has none
        return None


def _add_parts(nvml: Any, handle: Any, gpu: dict[str, Any]) -> None:
    for index in range(_MOST_PROFILES):
        try:
            profile = nvml.nvmlDeviceGetGpuInstanceProfileInfo(handle, index)
        except nvml.NVMLError:
            continue  # this model does not have it
        told = {
            "id": profile.id,
            "name": _text(profile.name).removeprefix("MIG "),
            "most": profile.instanceCount,
            "places": _places(nvml, handle, profile.id),
            "figures": [
                profile.memorySizeMB, profile.multiprocessorCount, profile.copyEngineCount,
                profile.decoderCount, profile.encoderCount, profile.jpegCount, profile.ofaCount,
            ],
        }  # fmt: skip
        gpu["profiles"].append(told)
        if gpu["mode"]:
            gpu["instances"] += _instances(nvml, handle, profile)
    if not gpu["mode"]:
        return
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            device = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
            has = nvml.nvmlDeviceGetAttributes(device)
        except nvml.NVMLError:
            continue  # a place for a device that was not made
        told = {
            "uuid": _text(nvml.nvmlDeviceGetUUID(device)),
            "instance": nvml.nvmlDeviceGetGpuInstanceId(device),
            "figures": [
                has.memorySizeMB, has.multiprocessorCount, has.sharedCopyEngineCount,
                has.sharedDecoderCount, has.sharedEncoderCount, has.sharedJpegCount,
                has.sharedOfaCount,
            ],
        }  # fmt: skip
        gpu["devices"].append(told)


def _places(nvml: Any, handle: Any, profile: int) -> list[tuple[int, int]]:
    count = ctypes.c_uint(_MOST_PLACES)
    places = (nvml.c_nvmlGpuInstancePlacement_t * _MOST_PLACES)()
    nvml.nvmlDeviceGetGpuInstancePossiblePlacements(handle, profile, places, ctypes.byref(count))
    return [(each.start, each.size) for each in places[: count.value]]


def _instances(nvml: Any, handle: Any, profile: Any) -> list[tuple[int, int, int, int]]:
    count = ctypes.c_uint(profile.instanceCount)
    found = (nvml.c_nvmlGpuInstance_t * _MOST_PLACES)()
    nvml.nvmlDeviceGetGpuInstances(handle, profile.id, found, ctypes.byref(count))
    told = []
    for instance in found[: count.value]:
        info = nvml.nvmlGpuInstanceGetInfo(instance)
        told.append((info.id, info.profileId, info.placement.start, info.placement.size))
    return told


_ANSWERS: dict[str, Callable[..., dict[str, Any]]] = {
    "links": links,
    "mode": set_mode,
    "persistence": persistence,
    "parts": parts,
}

if __name__ == "__main__":
    main(*sys.argv[1:])
