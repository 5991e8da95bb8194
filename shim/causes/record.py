"""The faults of a container's GPUs, in a file that the node agent writes and the shim reads.

The file is ``STATE/causes/NAMESPACE/CONTAINER.json``, readable only by root::

    {"version": 1,
     "pod": {"namespace": "research", "name": "train-0"},
     "faults": [{"at": 1790000000.25, "kind": "xid", "code": 79, ...}]}

Rules
- ``pod`` may be missing. Unknown keys are ignored, because either side may be newer.
- The file has at most :data:`MOST` faults, oldest first. It keeps the most relevant ones
  (:func:`by_weight`), so that a storm of an application's faults does not hide those of the device.
- The file is written under another name and renamed. The reader never waits, and follows no link.
- A text is one line without control characters, and of limited length.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from typing import Any, Final

from api.errors import one_line
from api.values import dataclass
from shim import files
from shim.errors import BundleUnusable

__all__ = [
    "KERNEL_LOG",
    "MOST",
    "Fault",
    "Whose",
    "as_rows",
    "by_weight",
    "faults_of",
    "forget_causes",
    "most_telling",
    "path_of",
    "read_causes",
    "read_pod",
    "write_causes",
]

VERSION: Final = 1
MOST: Final = 16
"""The most faults in a file."""
KERNEL_LOG: Final = "kernel log"
"""The source of a fault that the shim itself has found."""

_DIRECTORY: Final = "causes"
_LARGEST: Final = 16 << 10
# The most characters of a text. Sixteen faults with five texts each, of four bytes per character,
# would be too long: the writer then tries again with fewer.
_LONGEST_TEXTS: Final = (120, 30)
_MOST_NUMBER: Final = 1 << 31


class Whose(StrEnum):
    """Whose fault it is, the most informative first."""

    DEVICE = "device"
    HOST = "host"  # the host's memory, or its missing driver
    NEIGHBOUR = "neighbour"  # another process on the same GPU
    APPLICATION = "application"
    UNCLEAR = "unclear"


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault that concerns a container."""

    at: float  # when it happened, in seconds since the epoch
    # "xid", "sxid", "gpu-lost", "gpu-memory", "mps", "driver-lost", "host-memory", "memory-limit"
    kind: str
    code: int = 0  # the number of the Xid; 0 for other kinds
    name: str = ""  # a description
    gpu: str = ""  # UUID or PCI address of the GPU; "" if it concerns none
    mig: str = ""  # UUID of the MIG device; "" if it concerns none
    pid: int = 0  # the process, in the host's pid namespace; 0 if unknown
    whose: Whose = Whose.UNCLEAR  # whose fault it is
    sure: bool = False  # whether that is certain, not just likely
    action: str = ""  # what the node or its owner must do, a short phrase; "" for nothing
    source: str = "agent"  # the reporter: "agent" or KERNEL_LOG


def by_weight(faults: Iterable[Fault], end: float = math.inf) -> list[Fault]:
    """Return faults, most relevant first.

    Args:
        faults: in any order.
        end: the container's end, in seconds since the epoch. Faults before it come before later
            ones, certain before uncertain ones, then those nearer to the end. A neighbour's crash
            comes after the container's own faults, unless it certainly reached this container.
    """
    order = [*Whose]

    def rank(fault: Fault) -> int:
        is_doubtful = fault.whose == Whose.NEIGHBOUR and not fault.sure
        return order.index(Whose.UNCLEAR if is_doubtful else fault.whose)

    return sorted(faults, key=lambda f: (rank(f), f.at > end, not f.sure, -f.at))


def most_telling(faults: Iterable[Fault]) -> list[Fault]:
    """Return the :data:`MOST` most relevant faults, oldest first."""
    return sorted(by_weight(faults)[:MOST], key=lambda fault: fault.at)


def as_rows(faults: Iterable[Fault], longest: int = _LONGEST_TEXTS[0]) -> list[dict[str, Any]]:
    """Return faults as JSON values.

    Args:
        faults: the faults, in their order.
        longest: the maximum number of characters of a text.
    """
    rows = [{name: getattr(fault, name) for name in Fault.__match_args__} for fault in faults]
    return [
        {k: one_line(v)[:longest] if isinstance(v, str) else v for k, v in row.items()}
        for row in rows
    ]


def faults_of(document: Mapping[str, Any]) -> tuple[Fault, ...]:
    """Return the valid faults in a document's ``faults``."""
    rows = document.get("faults")
    faults = [_fault(row) for row in rows[:MOST]] if isinstance(rows, list) else []
    return tuple(fault for fault in faults if fault is not None)


def path_of(state: str, namespace: str, container_id: str) -> str:
    """Return the path of a container's file.

    Args:
        state: the directory ``state`` of the configuration.
        namespace: containerd's namespace.

    Raises:
        InvalidIdentifier: the namespace or the id cannot safely become part of a path.
    """
    files.check_id(namespace, "namespace")
    files.check_id(container_id)
    return os.path.join(state, _DIRECTORY, namespace, f"{container_id}.json")


def write_causes(
    state: str,
    namespace: str,
    container_id: str,
    faults: Iterable[Fault],
    *,
    pod: Mapping[str, str] | None = None,
) -> None:
    """Write the faults of a container, replacing those in its file.

    Args:
        state: the directory ``state`` of the configuration; it need not exist.
        namespace: containerd's namespace.
        faults: all known faults; if there are more than :data:`MOST`, the most relevant are kept.
        pod: the container's pod, for reports after the container's removal.

    Raises:
        InvalidIdentifier: the namespace or the id cannot safely become part of a path.
        BundleUnusable: the file cannot be written.
    """
    path = path_of(state, namespace, container_id)
    kept = most_telling(faults)
    content = b""
    for longest in _LONGEST_TEXTS:
        content = _encoded(kept, pod or {}, longest)
        if len(content) <= _LARGEST:
            break
    try:
        for directory in (state, os.path.join(state, _DIRECTORY), os.path.dirname(path)):
            os.makedirs(directory, mode=0o700, exist_ok=True)
    except OSError as error:
        raise BundleUnusable(f"to write {path}", found=files.reason(error)) from error
    files.write(path, content)


def read_causes(
    state: str, namespace: str, container_id: str, *, warn: Callable[[str], None] | None = None
) -> tuple[Fault, ...]:
    """Return the faults of a container, oldest first; empty if there is no file.

    Args:
        state: the directory ``state`` of the configuration.
        namespace: containerd's namespace.
        warn: called with the reason if an existing file is unusable, and so counts as empty.

    Raises:
        InvalidIdentifier: the namespace or the id cannot safely become part of a path.
    """
    return faults_of(_content(path_of(state, namespace, container_id), warn))


def read_pod(state: str, namespace: str, container_id: str) -> dict[str, str]:
    """Return the container's pod from its file; empty if it has none.

    Raises:
        InvalidIdentifier: the namespace or the id cannot safely become part of a path.
    """
    pod = _content(path_of(state, namespace, container_id), None).get("pod")
    return {k: v for k, v in pod.items() if isinstance(v, str)} if isinstance(pod, dict) else {}


def forget_causes(state: str, namespace: str, container_id: str) -> None:
    """Remove the file of a container, if there is one.

    Raises:
        InvalidIdentifier: the namespace or the id cannot safely become part of a path.
        OSError: it cannot be removed.
    """
    files.remove(path_of(state, namespace, container_id))


def _encoded(faults: Iterable[Fault], pod: Mapping[str, str], longest: int) -> bytes:
    document = {
        "version": VERSION,
        "pod": {one_line(str(k))[:longest]: one_line(str(v))[:253] for k, v in pod.items()},
        "faults": as_rows(faults, longest),
    }
    return json.dumps(document, ensure_ascii=False).encode(errors="replace") + b"\n"


def _content(path: str, warn: Callable[[str], None] | None) -> dict[str, Any]:
    if not os.path.lexists(path):
        return {}
    content, wrong = {}, ""
    try:
        content = files.parse_object(files.read(path, _LARGEST), path)
    except BundleUnusable as error:
        wrong = str(error)
    if content and content.get("version") != VERSION:
        content, wrong = {}, f"{path} is not of version {VERSION}"
    if wrong and warn is not None:
        warn(wrong)
    return content


def _fault(row: object) -> Fault | None:
    """Parse a fault from a file; None if it lacks its time or its kind."""
    if not isinstance(row, dict):
        return None
    values = {
        name: row[name]
        for name, kind in Fault.__annotations__.items()
        if name in row and _fits(row[name], kind)
    }
    values = {k: one_line(v) if isinstance(v, str) else v for k, v in values.items()}
    values["whose"] = Whose(row["whose"]) if row.get("whose") in list(Whose) else Whose.UNCLEAR
    return Fault(**values) if values.get("kind") and "at" in values else None


def _fits(value: object, kind: Any) -> bool:
    """Whether a JSON value fits an attribute, by the name of its type."""
    match kind:
        case "float":
            number = isinstance(value, int | float) and not isinstance(value, bool)
            return number and math.isfinite(value) and abs(value) < 1 << 62  # type: ignore[arg-type]
        case "int":
            return type(value) is int and 0 <= value < _MOST_NUMBER
        case "bool":
            return isinstance(value, bool)
        case _:
            return isinstance(value, str)
