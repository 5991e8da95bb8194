"""Find the driver's files that an engine has mounted for one of NVIDIA's CDI specs.

These are the files that our engine mounts for other containers: read-only binds of single files
that the inventory has observed. So a layer of the image may contain them instead
(:mod:`hooks.image.layer_files`), and the mounts are removed from the spec. The container sees the
same files.

Rules
- This applies only to a spec with hooks that are done in process (:mod:`hooks.requests.oci_hooks`);
  other specs are left alone.
- An OCI spec does not show who wrote a mount. A volume that is such a bind also counts as one of
  the driver's files.
"""

from __future__ import annotations

import posixpath
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Final

from hooks.image.layout import options_of
from hooks.node.inventory import Inventory
from hooks.ocispec import Json, part, parts
from hooks.plan import Mount
from hooks.requests.oci_hooks import Call, absolute, calls_of

_REASON: Final = "CDI spec of the engine"
# What versions of nvidia-ctk write: "bind" or "rbind", with or without a propagation.
_NEEDED: Final = frozenset({"ro", "nosuid", "nodev"})
_BIND: Final = frozenset({"bind", "rbind"})
_OPTIONS: Final = _NEEDED | _BIND | {"private", "rprivate"}


def driver_mounts(spec: Mapping[str, Any], files: Collection[str]) -> tuple[Mount, ...]:
    """Return the mounts of a spec that may become files of a layer.

    Args:
        files: the observed files of the driver, by their paths on the host.

    Raises:
        MalformedSpec: a part of the spec has the wrong shape.
    """
    if not calls_of(spec):
        return ()
    found = map(_mount_of, parts(spec, "mounts", dict))
    return tuple(mount for mount in found if mount is not None and mount.source in files)


def without(entries: Iterable[Any], mounts: Iterable[Mount]) -> list[Any]:
    """Return the entries of a spec's mounts that are not in ``mounts``."""
    gone = frozenset(mounts)
    return [entry for entry in entries if not gone or _mount_of(entry) not in gone]


def key_of(spec: Mapping[str, Any], inventory: Inventory) -> object | None:
    """Return the dependencies of a container's files if its engine has applied NVIDIA's CDI spec.

    Returns:
        Values whose representation changes with the dependencies; None if the hooks also examine
        libraries of volumes.

    Raises:
        MalformedSpec: a part of the spec has the wrong shape.
    """
    calls = calls_of(spec)
    files = inventory.files or {}
    ours = driver_mounts(spec, files)
    if any(_is_looked_at(entry, calls) for entry in without(parts(spec, "mounts", dict), ours)):
        return None
    return (
        [(call.name, call.options) for call in calls],
        [(mount.source, mount.destination) for mount in ours],
        part(part(spec, "linux", dict), "devices", list, "linux."),
    )


def _mount_of(entry: object) -> Mount | None:
    """Return an entry of mounts as a bind of a file; None if it is unlike the driver's."""
    if not isinstance(entry, dict):
        return None
    source, destination, options = entry.get("source"), entry.get("destination"), options_of(entry)
    if not isinstance(source, str) or not isinstance(destination, str):
        return None
    is_alike = _NEEDED <= options <= _OPTIONS and not options.isdisjoint(_BIND)
    is_clean = destination.startswith("/") and posixpath.normpath(destination) == destination
    return Mount(source, destination, reason=_REASON) if is_alike and is_clean else None


def _is_looked_at(entry: Json, calls: Iterable[Call]) -> bool:
    """Whether a mount is in, or over, a directory whose libraries a hook examines."""
    place = posixpath.normpath(str(entry.get("destination")))
    return any(
        posixpath.dirname(place) == folder or f"{folder}/".startswith(f"{place.rstrip('/')}/")
        for folder in _folders(calls)
    )


def _folders(calls: Iterable[Call]) -> Iterator[str]:
    for call in calls:
        yield from filter(None, map(absolute, call.items_of("folder")))
