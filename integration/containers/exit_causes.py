"""Find containers that were ended by a GPU fault, from what the shim recorded about them.

containerd has already removed the bundles of most of them, and the pod may have restarted the
container under the same name. See :mod:`shim.causes.exit_store`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from integration.containers.bundles import Container, Pod
from shim.causes.exit_store import list_ended


@dataclass(frozen=True, slots=True)
class End:
    """The end of a container."""

    container: Container  # its bundle is "": it may be removed
    at: float  # seconds since the epoch
    document: Mapping[str, Any]  # all that the shim recorded

    @property
    def cause(self) -> str:
        """The reason in one line."""
        return str(self.document["cause"])

    @property
    def told(self) -> str:
        """The time and the exit code, for display."""
        when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.at))
        status, told = self.document["exit_status"], self.document["told_status"]
        changed = f", told as {told}" if status != told else ""
        return f"{when}, exit code {status}{changed}"

    def to_json(self) -> dict[str, Any]:
        """Return plain values; the keys are an interface."""
        keys = ("id", "namespace", "ended", "exit_status", "told_status", "cause", "gpus", "faults")
        return {key: self.document[key] for key in keys}


def find_ends(state: str) -> list[End]:
    """Return the recorded ends, newest first.

    Args:
        state: the directory ``state`` of the configuration.
    """
    found = [
        End(_container(each), float(each["ended"]), each)
        for each in list_ended(state)
        if each["faults"]
    ]
    return sorted(found, key=lambda end: -end.at)


def end_of(container: Container, ends: Iterable[End]) -> End | None:
    """Return the newest end of a container, or of an earlier attempt of it in its pod."""
    own = _own_end(container, ends)
    if own is not None or container.pod is None:
        return own
    attempt = (container.pod, container.pod.uid, container.name)
    for end in ends:
        pod = end.container.pod
        if pod is not None and (pod, pod.uid, end.container.name) == attempt:
            return end
    return None


def causes_of(containers: Iterable[Container], ends: Iterable[End]) -> dict[str, str]:
    """Return why each of the stopped containers has ended, by bundle."""
    known = list(ends)
    stopped = [each for each in containers if not each.pid]
    return {each.bundle: end.cause for each in stopped if (end := _own_end(each, known))}


def _own_end(container: Container, ends: Iterable[End]) -> End | None:
    if container.pid:
        return None
    for end in ends:
        of = end.container
        if (of.namespace, of.id) == (container.namespace, container.id):
            # An earlier container may have had its id.
            return end if end.at >= (container.created or 0.0) else None
    return None


def _container(document: Mapping[str, Any]) -> Container:
    pod = document["pod"]
    return Container(
        id=document["id"],
        namespace=document["namespace"],
        bundle="",
        pod=Pod(*(str(pod.get(key, "")) for key in ("namespace", "name", "uid"))) if pod else None,
        name=document["name"],
        group="",
        sandbox=False,
        pid=0,
    )


def newest_of_each(ends: Iterable[End]) -> Iterator[End]:
    """Yield only the last of several attempts of a container of a pod."""
    seen = set()
    for end in ends:
        key = (end.container.namespace, end.container.title)
        if key not in seen:
            seen.add(key)
            yield end
