"""The faults that hit each container: a small log that keeps the most useful entries.

Rules
- Of faults that differ only in time, the first and the latest are kept. Full GPU memory is a state:
  only its latest report is kept.
- A container keeps at most :data:`~shim.causes.record.MOST` faults: the very first, and those with
  the highest weight (:func:`~shim.causes.record.by_weight`). So a storm of faults hides neither its
  start nor a failure of the device.
- "The GPU does not answer" is dropped when an Xid explains it.
- When the driver names a recovery action later, recent faults of that GPU are updated.
- The faults of a removed container are kept for :data:`KEPT` seconds, because faults arrive late,
  and people ask even later. A new container of the same name starts with an empty log.

The log does no I/O; callers pass the time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from api.values import dataclass, field, replace
from integration.containers.bundles import Container
from integration.node.faults.hits import GPU_LOST, XID, Hit
from shim.causes.record import MOST, Fault, Whose, by_weight
from shim.causes.xids import Action, about, with_recovery

GPU_MEMORY: Final = "gpu-memory"
KEPT: Final = 600.0
TOGETHER: Final = 30.0
"""Seconds within which two reports belong to the same failure of a GPU."""

_MOST_CONTAINERS: Final = 4096

Key = tuple[str, str]
"""containerd's namespace, and the container's id."""


@dataclass(frozen=True, slots=True)
class Entry:
    """The log of one container."""

    faults: tuple[Fault, ...] = ()  # the oldest first
    # its pod's namespace, name and uid, and its name there; empty without a pod
    pod: Mapping[str, str] = field(default_factory=dict)
    pid: int = 0  # its init process; 0 if unknown. Another pid means another container.
    # when it was first missing, in seconds since boot; None while it exists
    gone: float | None = None


class FaultLog:
    """The containers that were hit by faults.

    Attributes:
        entries: by namespace and id.
        unwritten: containers whose file on disk is out of date.
    """

    def __init__(self) -> None:
        self.entries: dict[Key, Entry] = {}
        self.unwritten: set[Key] = set()

    def add(self, hit: Hit) -> None:
        """Add a fault."""
        container = hit.container
        key = container.namespace, container.id
        before = self.entries.get(key, Entry())
        if before.pid and container.pid and before.pid != container.pid:
            before = Entry()
        entry = replace(
            before,
            faults=_with(before.faults, hit.fault),
            pod=_pod(container) or before.pod,
            pid=container.pid or before.pid,
        )
        self._put(key, entry)
        if len(self.entries) > _MOST_CONTAINERS:
            self._forget(min(self.entries, key=self._age))

    def drop(self, kind: str, keys: Iterable[Key]) -> None:
        """Remove the faults of one kind, which no longer apply, from some containers."""
        for key in keys:
            if (entry := self.entries.get(key)) is not None:
                self._set(key, entry, tuple(f for f in entry.faults if f.kind != kind))

    def heed(self, gpu: str, action: Action, since: float) -> None:
        """Apply the recovery action that the driver named to the faults of a GPU.

        Args:
            since: seconds since the epoch; older faults belong to another failure.
        """
        for key, entry in tuple(self.entries.items()):
            self._set(key, entry, tuple(_heeded(f, gpu, action, since) for f in entry.faults))

    def has_failed(self, container: Container, gpu: str) -> bool:
        """Whether the log already has a device failure of this GPU for a container."""
        entry = self.entries.get((container.namespace, container.id), Entry())
        is_same = not (entry.pid and container.pid) or entry.pid == container.pid
        return is_same and any(
            each.gpu == gpu and each.whose == Whose.DEVICE for each in entry.faults
        )

    def expire(self, containers: Iterable[Container], now: float) -> None:
        """Forget containers that were removed long ago, or whose name a new container has taken.

        Args:
            containers: those that exist now.
            now: seconds since boot.
        """
        there = {(each.namespace, each.id): each.pid for each in containers}
        for key, entry in tuple(self.entries.items()):
            pid = there.get(key)
            if pid is None:
                gone = now if entry.gone is None else entry.gone
                self.entries[key] = replace(entry, gone=gone)
                if now - gone > KEPT:
                    self._forget(key)
            elif pid and entry.pid and pid != entry.pid:
                self._forget(key)
            else:
                self.entries[key] = replace(entry, gone=None, pid=pid or entry.pid)

    def next_expiry(self) -> float | None:
        """When the next container expires, in seconds since boot; None if none is gone."""
        gone = [each.gone for each in self.entries.values() if each.gone is not None]
        return min(gone) + KEPT if gone else None

    def take_unwritten(self) -> dict[Key, Entry]:
        """Return the entries to write and clear the list; an empty entry deletes its file."""
        taken = {key: self.entries.get(key, Entry()) for key in self.unwritten}
        self.unwritten = set()
        return taken

    def _set(self, key: Key, entry: Entry, faults: tuple[Fault, ...]) -> None:
        if faults == entry.faults:
            return
        if faults:
            self._put(key, replace(entry, faults=faults))
        else:
            self._forget(key)

    def _put(self, key: Key, entry: Entry) -> None:
        self.entries[key] = entry
        self.unwritten.add(key)

    def _forget(self, key: Key) -> None:
        self.entries.pop(key, None)
        self.unwritten.add(key)

    def _age(self, key: Key) -> tuple[bool, float]:
        entry = self.entries[key]
        return entry.gone is None, entry.faults[-1].at


def first_faults(entries: Mapping[Key, Entry]) -> Iterator[tuple[Entry, Fault]]:
    """Yield the first occurrence of each distinct fault of each container, for reports."""
    for entry in entries.values():
        firsts: dict[object, Fault] = {}
        for each in entry.faults:
            firsts.setdefault((each.kind, each.code, each.gpu, each.whose), each)
        for fault in firsts.values():
            yield entry, fault


def _pod(container: Container) -> dict[str, str]:
    pod = container.pod
    if pod is None:
        return {}
    return {
        "namespace": pod.namespace, "name": pod.name, "uid": pod.uid, "container": container.name,
    }  # fmt: skip


def _same(one: Fault, other: Fault) -> bool:
    """Whether two faults differ only in time and in the action they need."""
    return replace(one, at=0.0, name="", action="") == replace(other, at=0.0, name="", action="")


def _with(faults: tuple[Fault, ...], fault: Fault) -> tuple[Fault, ...]:
    if fault.kind == GPU_MEMORY:
        faults = tuple(each for each in faults if each.kind != GPU_MEMORY)
    elif fault.kind == XID and fault.whose == Whose.DEVICE:
        faults = tuple(
            each
            for each in faults
            if each.kind != GPU_LOST or each.gpu != fault.gpu or abs(each.at - fault.at) > TOGETHER
        )
    repeats = [each for each in faults if _same(each, fault)]
    kept = [each for each in faults if each not in repeats[1:]]
    kept = sorted((*kept, fault), key=lambda each: each.at)
    if len(kept) > MOST:
        first, *others = kept
        kept = [first, *sorted(by_weight(others)[: MOST - 1], key=lambda each: each.at)]
    return tuple(kept)


def _heeded(fault: Fault, gpu: str, action: Action, since: float) -> Fault:
    if fault.gpu != gpu or fault.at < since or fault.kind not in {XID, GPU_LOST}:
        return fault
    if fault.kind == GPU_LOST:
        return replace(fault, action=action or fault.action)
    whose, needed = with_recovery(about(fault.code), action)
    if whose == Whose.DEVICE:
        return replace(fault, whose=whose, action=needed, sure=True)
    is_others = fault.whose == Whose.NEIGHBOUR
    return fault if is_others else replace(fault, action=needed)
