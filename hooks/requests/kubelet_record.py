"""What the kubelet gave a container according to its own records. Pure.

The kubelet stores a device plugin's answer by the pod's UID and the container's name before it asks
an engine for either. Only root reads and writes these files. So they are the only evidence of who
may have a GPU that neither an image nor a pod's author can forge. A UUID proves nothing, because
every container can read it below /proc/driver/nvidia.

=============================================  ==============================================
file below the kubelet's root                  what of it counts
=============================================  ==============================================
``device-plugins/kubelet_internal_checkpoint`` of entries with this pod and container, the
                                               answer of the plugin: variables, mounts,
                                               annotations, CDI names
``dra_manager_state``                          of claims of this pod, the CDI names
=============================================  ==============================================

Rules
- The answer is the grant, not the ids of its entry: plugins that share GPUs (such as HAMi's) may
  answer with another GPU than the kubelet's choice.
- Each part of an answer grants what it would request in a spec (:mod:`hooks.requests.request`). A
  malformed part grants nothing.
- A CDI name of NVIDIA's device plugin (``k8s.device-plugin.nvidia.com/gpu=…``) also grants the
  named device.
- Several entries of one container, for several resources, are united.
- A claim is recorded for a pod, so it grants to each of its containers. Where the engine reports no
  container name (cri-dockerd), each entry of a pod does the same. This can give one container
  another's devices, but both have the same author.
- Only the UID identifies the pod. An earlier pod's entry grants nothing to one of the same name.
- A malformed entry voids its file only if it is this pod's, or may be: if it has the pod's UID
  anywhere. The files have the devices of all pods, also of plugins and drivers of any release.
- Parsing is total: any content results in a record, whose ``found`` says what is wrong.

Source: kubelet pkg/kubelet/cm/devicemanager/checkpoint and pkg/kubelet/cm/dra/state; device plugin
API v1beta1, ContainerAllocateResponse.
"""

from __future__ import annotations

import binascii
import json
from collections.abc import Iterable, Iterator
from typing import Any, Final, TypeVar

from api.errors import NvshimError
from api.values import dataclass, replace
from hooks.config import Config
from hooks.errors import enumerated
from hooks.requests.naming import parse_names, united_channels
from hooks.requests.request import Request, read_request
from hooks.words import AllDevices, DeviceName, NamedDevices, items_of

CHECKPOINT: Final = "device-plugins/kubelet_internal_checkpoint"
CLAIMS: Final = "dra_manager_state"
"""Below the kubelet's root."""

_PLUGIN: Final = "k8s.device-plugin.nvidia.com"  # NVIDIA's, and ours
# How much of an answer a message quotes, since a denial is one line.
_MOST_NAMED, _LONGEST = 4, 200


@dataclass(frozen=True, slots=True)
class RecordFile:
    """The content of a kubelet file."""

    path: str
    content: bytes = b""
    fault: str = ""  # why there is no content, or ""
    is_missing: bool = False  # whether there is no such file


@dataclass(frozen=True, slots=True)
class KubeletRecord:
    """What the kubelet granted to one container."""

    every: bool = False  # whether it granted every GPU and MIG device
    devices: tuple[DeviceName, ...] = ()  # the GPUs and MIG devices, as the plugin named them
    features: frozenset[str] = frozenset()  # words of hooks.words.Feature
    imex_channels: tuple[int, ...] | None = ()  # numbers; None for every channel
    cdi_devices: frozenset[str] = frozenset()  # fully qualified CDI names
    amd_devices: frozenset[str] = frozenset()  # items of AMD_VISIBLE_DEVICES
    intel_devices: frozenset[str] = frozenset()  # items of INTEL_VISIBLE_DEVICES
    # which record was sought and what was found, for display
    found: str = "the kubelet's record was not read"
    doubt: str = ""  # why an existing file does not count; "" if all do

    @property
    def gave_anything(self) -> bool:
        """Whether it granted anything that a container can request."""
        return replace(self, found="", doubt="") != KubeletRecord(found="")

    def has_channels(self, asked: tuple[int, ...] | None) -> bool:
        """Whether it has these IMEX channels; None for every one."""
        if self.imex_channels is None or asked is None:
            return self.imex_channels is None
        return set(asked) <= set(self.imex_channels)


def record_of(
    checkpoint: RecordFile, claims: RecordFile | None, pod: str, container: str, config: Config
) -> KubeletRecord:
    """Return what the kubelet granted to one container according to its files.

    Args:
        checkpoint: the device manager's file.
        claims: the DRA manager's file; None if the kubelet has none.
        pod: the pod's UID.
        container: the container's name in the pod; "" for any container of the pod.
        config: defines the syntax of requests, and so of answers.
    """
    whose = f"container {container} of pod {pod}" if container else f"pod {pod}"
    record, found, doubts = KubeletRecord(), [], []
    for file, read in ((checkpoint, _by_plugins), (claims, _by_claims)):
        if file is None:
            continue
        told, given = file.fault, []
        if told and not file.is_missing:
            doubts.append(f"{file.path}: {told}")
        elif not told:
            try:
                given = list(read(file.content, pod, container, config))
                told = _told(given)
            except (ValueError, RecursionError) as error:
                told, given = f"not as a kubelet writes it ({error})", []
                doubts.append(f"{file.path}: {told}")
        for request in given:
            record = _united(record, request)
        found.append(f"{file.path}: {told}")
    return replace(record, found=f"of {whose}, by {'; '.join(found)}", doubt="; ".join(doubts))


def _told(given: Iterable[Request]) -> str:
    """Return what the kubelet granted, as the answers put it."""
    words = [request.source or ", ".join(request.cdi_devices) for request in given]
    short = (word if len(word) <= _LONGEST else f"{word[:_LONGEST]}…" for word in words)
    named = enumerated(dict.fromkeys(filter(None, short)), most=_MOST_NAMED)
    return named or ("an answer that names no device" if words else "nothing")


# -- the files -----------------------------------------------------------------------------------


def _by_plugins(content: bytes, pod: str, container: str, config: Config) -> Iterator[Request]:
    """Yield what the device plugins' answers in the checkpoint would request."""
    # The file lists all devices of the node, and most pods have none.
    if pod.encode() not in content:
        return
    data = _part(json.loads(content), "Data", dict)
    for entry in _entries(data, "PodDeviceEntries", "PodUID", str, pod):
        if entry["PodUID"] == pod and container in {"", _part(entry, "ContainerName", str)}:
            yield from _requests(binascii.a2b_base64(_part(entry, "AllocResp", str)), config)


def _by_claims(content: bytes, pod: str, _: str, config: Config) -> Iterator[Request]:
    """Yield what the CDI names of a pod's claims would request, by the DRA manager's state."""
    if pod.encode() not in content:
        return
    data = json.loads(_part(json.loads(content), "Data", str))
    for claim in _entries(data, "ClaimInfoStateList", "PodUIDs", dict, pod):
        if pod not in claim["PodUIDs"]:
            continue
        drivers = _part(claim, "DriverState", dict)
        for driver in drivers:
            for device in _objects(_part(drivers, driver, dict), "Devices"):
                names = _part(device, "CDIDeviceIDs", list)
                if not all(isinstance(name, str) for name in names):
                    raise ValueError("CDIDeviceIDs has other things than strings")
                yield from _of_names(names, config)


def _requests(answer: bytes, config: Config) -> Iterator[Request]:
    """Yield what each part of a plugin's answer would request."""
    tables: dict[int, dict[str, str]] = {_VARIABLES: {}, _ANNOTATIONS: {}}
    mounts, names = [], []
    for number, value in _fields(answer):
        if number in tables:
            key, text = _texts(value)
            tables[number][key] = text
        elif number == _MOUNTS:
            destination, source = _texts(value)
            mounts.append({"destination": destination, "source": source})
        elif number == _CDI_NAMES:
            names.append(_texts(value)[0])
    process = {"env": [f"{name}={value}" for name, value in tables[_VARIABLES].items()]}
    parts: tuple[dict[str, Any], ...] = (
        {}, {"mounts": mounts}, {"annotations": tables[_ANNOTATIONS]},
    )  # fmt: skip
    for part in parts:
        try:
            yield read_request({"process": process, **part}, config)
        except NvshimError:
            pass  # for example NVIDIA_VISIBLE_DEVICES with only a path of mounts
    yield from _of_names(names, config)


def _of_names(names: Iterable[str], config: Config) -> Iterator[Request]:
    """Return what CDI names would request; those of NVIDIA's plugin also under short names."""
    for name in names:
        vendor, _, rest = name.partition("/")
        short = [f"nvidia.com/{rest}"] if vendor == _PLUGIN else []
        for item in (name, *short):
            try:
                found = parse_names([item], asked=item, default_kind=config.default_kind)
            except NvshimError:
                continue
            yield Request(
                found.devices,
                features=found.features,
                imex_channels=found.imex_channels,
                cdi_devices=found.cdi_devices,
            )


def _united(record: KubeletRecord, request: Request) -> KubeletRecord:
    """Return the record, extended by what a request names."""
    devices = request.devices.devices if isinstance(request.devices, NamedDevices) else ()
    return replace(
        record,
        every=record.every or isinstance(request.devices, AllDevices),
        devices=tuple(dict.fromkeys((*record.devices, *devices))),
        features=record.features | request.features,
        imex_channels=united_channels(record.imex_channels, request.imex_channels),
        cdi_devices=record.cdi_devices | {*request.cdi_devices},
        amd_devices=record.amd_devices | {*items_of(request.amd_devices)},
        intel_devices=record.intel_devices | {*items_of(request.intel_devices)},
    )


# -- the necessary parts of JSON and protobuf ----------------------------------------------------

# Fields of ContainerAllocateResponse. A map's entries, and Mount, need their fields 1 and 2.
_VARIABLES, _MOUNTS, _ANNOTATIONS, _CDI_NAMES = 1, 2, 4, 5
# Types of fields, with the length of fixed ones; and "another byte follows".
_NUMBER, _BYTES, _FIXED = 0, 2, {1: 8, 5: 4}
_MORE: Final = 0x80
_T = TypeVar("_T", dict[str, Any], list[Any], str)


def _part(table: object, name: str, kind: type[_T]) -> _T:
    """Return a part of a JSON object; empty for null, which Go writes for an empty slice or map.

    Raises:
        ValueError: the part is missing or has another type.
    """
    value = table.get(name) if isinstance(table, dict) else None
    if value is None and isinstance(table, dict) and name in table:
        return kind()
    if not isinstance(value, kind):
        raise ValueError(f"{name} is missing or of another kind")  # noqa: TRY004 - of a file
    return value


def _entries(
    table: object, name: str, key: str, kind: type[object], pod: str
) -> Iterator[dict[str, Any]]:
    """Yield the entries of a list that say which pods they are of.

    Args:
        key: what says so, in each entry.
        kind: the type of its value.
        pod: a malformed entry may be of this pod if it has its UID anywhere.

    Raises:
        ValueError: there is no such list, or an entry that may be of the pod is malformed.
    """
    for entry in _part(table, name, list):
        if isinstance(entry, dict) and isinstance(entry.get(key), kind):
            yield entry
        elif pod in json.dumps(entry):
            raise ValueError(f"an entry of {name} with this pod's UID is malformed")


def _objects(table: object, name: str) -> list[dict[str, Any]]:
    entries = _part(table, name, list)
    if not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(f"{name} has other things than objects")
    return entries


def _texts(message: bytes) -> tuple[str, str]:
    """Return fields 1 and 2 of a message, which are strings; "" for a missing one."""
    found = {number: value.decode() for number, value in _fields(message) if number in {1, 2}}
    return found.get(1, ""), found.get(2, "")


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the numbers and values of a protobuf message's length-delimited fields.

    Raises:
        ValueError: it is not a valid message.

    Source: protobuf.dev/programming-guides/encoding.
    """
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        kind = tag & 7
        if kind == _NUMBER:
            _, at = _varint(message, at)
        elif kind == _BYTES:
            size, start = _varint(message, at)
            at = start + size
            yield tag >> 3, message[start:at]
        elif kind in _FIXED:
            at += _FIXED[kind]
        else:
            raise ValueError(f"a field of type {kind}")
    if at > len(message):
        raise ValueError("a message that is cut off")


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """Decode a number; return it and the offset after it."""
    value = 0
    for place in range(10):
        if at >= len(message):
            raise ValueError("a message that is cut off")
        byte = message[at]
        value |= (byte & 0x7F) << (7 * place)
        at += 1
        if byte < _MORE:
            return value, at
    raise ValueError("a number of more than ten bytes")
