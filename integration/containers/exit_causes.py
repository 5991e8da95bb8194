"""Containers that a fault of a GPU has ended, as the shim remembers them.

Most of them are gone: containerd has removed their bundles. Another attempt of the same container
of a pod may run, of which people ask by the same name. See :mod:`shim.causes.exit_store`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from integration.containers.bundles import Container, Pod
from shim import bundle as bundle_files
from shim.causes.exit_store import list_ended


@dataclass(frozen=True, slots=True)
class End:
    """How a container ended."""

    container: Container  # which; it has a bundle only if that is there still
    at: float  # when, in seconds since the epoch
    document: Mapping[str, Any]  # all that is remembered

    @property
    def cause(self) -> str:
        """Why, in a line."""
        return str(self.document["cause"])

    @property
    def told(self) -> str:
        """When, and with which exit code, in words."""
        when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.at))
        status, told = self.document["exit_status"], self.document["told_status"]
        changed = f", told as {told}" if status != told else ""
        return f"{when}, exit code {status}{changed}"

    def to_json(self) -> dict[str, Any]:
        """Plain values; the keys are an interface."""
        keys = ("id", "namespace", "ended", "exit_status", "told_status", "cause", "gpus", "faults")
        return {key: self.document[key] for key in keys}


def find_ends(state: str) -> list[End]:
    """The ends that are remembered, the newest first.

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
    """The newest end of a container, or of an earlier attempt of the same one of its pod."""
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
    """Why those of some containers that do not run have ended, by their bundles."""
    known = list(ends)
    stopped = [each for each in containers if not each.pid]
    return {each.bundle: end.cause for each in stopped if (end := _own_end(each, known))}


def _own_end(container: Container, ends: Iterable[End]) -> End | None:
    if container.pid:
        return None
    for end in ends:
        of = end.container
        if (of.namespace, of.id) == (container.namespace, container.id):
            return end if end.at >= _made(container) else None  # another had its id before
    return None


def _made(container: Container) -> float:
    try:
        return os.stat(os.path.join(container.bundle, bundle_files.INIT_PID)).st_mtime
    except OSError:
        return 0.0


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
    """Of several attempts of a container of a pod the last."""
    seen = set()
    for end in ends:
        key = (end.container.namespace, end.container.title)
        if key not in seen:
            seen.add(key)
            yield end
