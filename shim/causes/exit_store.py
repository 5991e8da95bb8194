"""A store of failures of containers with GPUs, which outlives their bundles.

containerd removes a bundle after it has processed the exit, and in a pod at once. So ``nvshim
explain`` and ``nvshim ps`` read ``STATE/ended/NAMESPACE/CONTAINER.json``, which only root can
read::

    {"version": 1, "id": "…", "namespace": "k8s.io", "name": "main",
     "pod": {"namespace": "research", "name": "train-0", "uid": "…"}, "gpus": ["GPU-…"],
     "ended": 1790000000.5, "exit_status": 134, "told_status": 85,
     "cause": "GPU failure: …", "faults": [{…}]}

Rules
- ``faults`` are those of :mod:`shim.causes.record`; ``cause`` describes them in a line.
- ``exit_status`` is the container's own; containerd got ``told_status``.
- If a fault becomes known only after the exit, the node agent adds it (:func:`add_faults`). Until
  then ``faults`` and ``cause`` are empty.
- A tenant whose containers end often must not displace another's records. Each pod namespace keeps
  :data:`MOST_ENDED` records, and so do containers without a pod; a containerd namespace keeps
  :data:`MOST_OF_ALL`. The next record to remove belongs to the pod namespace with the most records,
  and there to the pod with the most. Of that pod, records without faults go first, then the oldest.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from api.values import dataclass
from shim import files
from shim.causes.exit_message import exit_message
from shim.causes.record import Fault, as_rows, faults_of, most_telling
from shim.errors import BundleUnusable

__all__ = [
    "DIRECTORY",
    "MOST_ENDED",
    "MOST_OF_ALL",
    "add_faults",
    "identity_of",
    "list_ended",
    "read_ended",
    "write_ended",
]

MOST_ENDED: Final = 64
"""The most records of a pod namespace."""
MOST_OF_ALL: Final = 256
"""The most records of a containerd namespace."""

VERSION: Final = 1
DIRECTORY: Final = "ended"
_SUFFIX: Final = ".json"
_LARGEST: Final = 32 << 10

_NAMES: Final = ("io.kubernetes.cri.container-name", "nerdctl/name")
_POD: Final = {
    "namespace": "io.kubernetes.cri.sandbox-namespace",
    "name": "io.kubernetes.cri.sandbox-name",
    "uid": "io.kubernetes.cri.sandbox-uid",
}


def identity_of(namespace: str, container_id: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return a container's identity: the first four keys in this module's docstring.

    Args:
        namespace: containerd's namespace.
        spec: its config.json, decoded.
    """
    annotations = spec.get("annotations")
    said = annotations if isinstance(annotations, dict) else {}
    pod = {key: str(said.get(name, "")) for key, name in _POD.items()}
    return {
        "id": container_id,
        "namespace": namespace,
        "name": next((str(said[name]) for name in _NAMES if said.get(name)), ""),
        "pod": pod if pod["name"] else None,
    }


def write_ended(
    state: str, container: Mapping[str, Any], faults: Iterable[Fault], cause: str
) -> None:
    """Record how a container ended.

    Args:
        state: the directory ``state`` of the configuration.
        container: the other keys in this module's docstring.
        faults: the faults that ended it.
        cause: a line that describes these faults.

    Raises:
        InvalidIdentifier: the namespace or the id cannot safely become part of a path.
        BundleUnusable: the record cannot be written.
    """
    path = _path_of(state, container["namespace"], container["id"])
    rows = as_rows(most_telling(faults))
    document = {"version": VERSION, **container, "cause": cause, "faults": rows}
    try:
        for directory in (state, os.path.join(state, DIRECTORY), os.path.dirname(path)):
            os.makedirs(directory, mode=0o700, exist_ok=True)
    except OSError as error:
        raise BundleUnusable(f"to write {path}", found=files.reason(error)) from error
    files.write(path, json.dumps(document).encode() + b"\n")
    _forget_oldest(os.path.dirname(path))


def read_ended(state: str, namespace: str, container_id: str) -> dict[str, Any] | None:
    """Read the record of a container; None if there is none, or if it is malformed.

    Raises:
        InvalidIdentifier: the namespace or the id cannot safely become part of a path.
    """
    return _read(_path_of(state, namespace, container_id))


def list_ended(state: str) -> Iterator[dict[str, Any]]:
    """Yield the records of all containers, by namespace and id.

    Args:
        state: the directory ``state`` of the configuration; it need not exist.
    """
    top = os.path.join(state, DIRECTORY)
    for namespace in _listed(top):
        for name in _listed(os.path.join(top, namespace)):
            document = _read(os.path.join(top, namespace, name)) if _is_record(name) else None
            if document is not None:
                yield document


def add_faults(
    state: str, namespace: str, container_id: str, faults: Iterable[Fault], node: str = ""
) -> bool:
    """Add faults that became known after a container's end, and update its cause.

    Args:
        state: the directory ``state`` of the configuration.
        namespace: containerd's namespace.
        faults: the faults to add; a fault that is already known is replaced.
        node: the node's name.

    Returns:
        Whether the store has a record of the container.

    Raises:
        InvalidIdentifier: the namespace or the id cannot safely become part of a path.
        BundleUnusable: the record cannot be written.
    """
    document = read_ended(state, namespace, container_id)
    if document is None:
        return False
    known = [*{(f.at, f.kind, f.code, f.pid): f for f in (*faults_of(document), *faults)}.values()]
    status, told = document["exit_status"], document["told_status"]
    cause = exit_message(known, document["ended"], node, None if status == told else status)
    write_ended(state, document, known, cause)
    return True


def _path_of(state: str, namespace: str, container_id: str) -> str:
    files.check_id(namespace, "namespace")
    files.check_id(container_id)
    return os.path.join(state, DIRECTORY, namespace, f"{container_id}{_SUFFIX}")


def _is_record(name: str) -> bool:
    return name.endswith(_SUFFIX) and not name.startswith(".")


_KEYS: Final = {
    "id": str, "namespace": str, "name": str, "gpus": list, "exit_status": int,
    "told_status": int, "cause": str, "faults": list,
}  # fmt: skip


def _read(path: str) -> dict[str, Any] | None:
    try:
        document = files.parse_object(files.read(path, _LARGEST), path)
    except BundleUnusable:
        return None  # missing, or being removed
    ended = document.get("ended")
    if document.get("version") != VERSION or not isinstance(ended, int | float):
        return None
    is_whole = all(isinstance(document.get(key), kind) for key, kind in _KEYS.items())
    return document if is_whole and isinstance(document.get("pod"), dict | None) else None


def _listed(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []


def _forget_oldest(directory: str) -> None:
    paths = [os.path.join(directory, name) for name in _listed(directory) if _is_record(name)]
    if len(paths) <= MOST_ENDED:
        return
    kept: dict[str, list[_Kept]] = {}  # by the pod's namespace
    for path in paths:
        document = _read(path)
        if document is None:
            files.remove(path)
            continue
        pod = document["pod"] or {}
        one = _Kept(path, str(pod), bool(document["faults"]), document["ended"])
        kept.setdefault(str(pod.get("namespace", "")), []).append(one)
    for theirs in kept.values():
        while len(theirs) > MOST_ENDED:
            _forget_one(theirs)
    while sum(map(len, kept.values())) > MOST_OF_ALL:
        _forget_one(max(kept.values(), key=len))


@dataclass(frozen=True, slots=True)
class _Kept:
    """The parts of a record that decide when it is removed."""

    path: str
    pod: str
    has_faults: bool
    ended: float


def _forget_one(kept: list[_Kept]) -> None:
    """Remove one record of a pod namespace, from the pod with the most."""
    count = Counter(each.pod for each in kept)
    least = min(kept, key=lambda each: (-count[each.pod], each.has_faults, each.ended))
    kept.remove(least)
    files.remove(least.path)
