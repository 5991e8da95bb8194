"""Choose the driver's files that a layer of an image may contain instead of mounts.

A mount costs the low-level runtime some tenth of a millisecond, and a container that may mount can
make it writable. A file in the lower layer of an overlay costs nothing, and the kernel never writes
to it. (:mod:`shim.work.driver_files` puts the files there.)

Rules
- Only a file that the inventory has observed, with the mount options of the driver's files: no
  socket, no directory, nothing from a CDI spec or from staging.
- Only where the layer itself contains its mount point. It has none at a path that the container
  covers with its own mount.
- No file with set-user-id or set-group-id: mounts of the driver's files have ``nosuid``, but an
  overlay does not.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator, Mapping
from typing import Any, Final

from api.values import dataclass
from hooks.image.rootfs import Rootfs
from hooks.image.staging import Placed
from hooks.plan import Mount, Plan

_OPTIONS: Final = Mount("", "").options


@dataclass(frozen=True, slots=True)
class LayerFile:
    """A driver file that can be in a layer."""

    mount: Mount  # the mount that it replaces
    path: str  # its path in the layer, without links
    seen: Any  # its observed properties (hooks.node.fingerprint)


def layer_files(
    image: Rootfs, plan: Plan, placed: Placed, files: Mapping[str, Any]
) -> tuple[LayerFile, ...]:
    """Return the files of a plan that the layer can contain.

    Args:
        image: the image with the layer, which has the plan's mount points.
        placed: what was written into the layer.
        files: the observed properties of the driver's files, by path.
    """
    return tuple(_layer_files(image, plan, frozenset(placed.written), files))


def _layer_files(
    image: Rootfs, plan: Plan, made: frozenset[str], files: Mapping[str, Any]
) -> Iterator[LayerFile]:
    for mount in plan.mounts:
        seen = files.get(mount.source)
        is_plain = mount.kind == "bind" and mount.options == _OPTIONS and not mount.required
        if not seen or not is_plain or mount.destination not in made:
            continue
        mode = seen[2]
        if not stat.S_ISREG(mode) or mode & (stat.S_ISUID | stat.S_ISGID):
            continue
        path = image.real_path(mount.destination)
        if path is not None:
            yield LayerFile(mount, path, seen)
