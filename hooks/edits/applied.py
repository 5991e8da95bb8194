"""The driver's files that an engine has mounted, with a CDI spec of NVIDIA's.

They are what the engine here mounts for others: read-only binds of single files that the inventory
has observed. So a layer of the image may have the files too (:mod:`hooks.image.layer_files`), and
the mounts leave the spec. That takes nothing from the container and gives it nothing.

Rules
- Only in a spec with hooks that are done in process (:mod:`hooks.requests.oci_hooks`): others are
  none of ours.
- An OCI spec does not say who wrote a mount. A volume that is such a bind is one of the driver's
  files, too.
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
# What nvidia-ctk writes, in its versions: "bind" or "rbind", with or without a propagation.
_NEEDED: Final = frozenset({"ro", "nosuid", "nodev"})
_BIND: Final = frozenset({"bind", "rbind"})
_OPTIONS: Final = _NEEDED | _BIND | {"private", "rprivate"}


def driver_mounts(spec: Mapping[str, Any], files: Collection[str]) -> tuple[Mount, ...]:
    """The mounts of a spec that may be files of a layer.

    Args:
        files: the driver's files that were observed, by their paths on the host.

    Raises:
        MalformedSpec: a part of the spec has the wrong shape.
    """
    if not calls_of(spec):
        return ()
    found = map(_mount_of, parts(spec, "mounts", dict))
    return tuple(mount for mount in found if mount is not None and mount.source in files)


def without(entries: Iterable[Any], mounts: Iterable[Mount]) -> list[Any]:
    """The entries of a spec's mounts that are none of ``mounts``."""
    gone = frozenset(mounts)
    return [entry for entry in entries if not gone or _mount_of(entry) not in gone]


def key_of(spec: Mapping[str, Any], inventory: Inventory) -> object | None:
    """What the files of a container depend on whose engine has applied a CDI spec of NVIDIA's.

    Returns:
        Values whose representation is the same if all of it is; None if libraries of volumes are
        among those that the hooks look at.

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
    """The bind of a file that an entry of mounts is; None if it is not as those of the driver."""
    if not isinstance(entry, dict):
        return None
    source, destination, options = entry.get("source"), entry.get("destination"), options_of(entry)
    if not isinstance(source, str) or not isinstance(destination, str):
        return None
    is_alike = _NEEDED <= options <= _OPTIONS and not options.isdisjoint(_BIND)
    is_clean = destination.startswith("/") and posixpath.normpath(destination) == destination
    return Mount(source, destination, reason=_REASON) if is_alike and is_clean else None


def _is_looked_at(entry: Json, calls: Iterable[Call]) -> bool:
    """Whether a mount is in a directory whose libraries a hook looks at, or over one."""
    place = posixpath.normpath(str(entry.get("destination")))
    return any(
        posixpath.dirname(place) == folder or f"{folder}/".startswith(f"{place.rstrip('/')}/")
        for folder in _folders(calls)
    )


def _folders(calls: Iterable[Call]) -> Iterator[str]:
    for call in calls:
        yield from filter(None, map(absolute, call.items_of("folder")))
