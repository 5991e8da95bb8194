"""GPU nodes that a spec already lists: from a device plugin, or from containerd's own CDI.

In a user namespace, nodes that not everyone may open need the same treatment as ours
(:mod:`shim.rootfs.node_cover`). There, a runtime mounts the host's node of the same path, so the
owner and the mode are the host's, not those in the spec.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

from hooks.ocispec import has_user_namespace, part, parts
from hooks.requests.places import GPU_NODES
from shim.rootfs.proc_cover import COVERED

_EVERYBODY: Final = 0o006


def shut_nodes(spec: Mapping[str, Any], known: Collection[str]) -> Iterator[dict[str, Any]]:
    """Yield a spec's GPU nodes that not everyone may open, if its users are mapped.

    Args:
        spec: the container's spec.
        known: the paths of nodes that are already handled.

    Yields:
        What :func:`shim.rootfs.node_cover.cover` takes.

    Raises:
        MalformedSpec: a part of the spec has the wrong shape.
    """
    if not has_user_namespace(spec):
        return
    for node in parts(part(spec, "linux", dict), "devices", dict, "linux."):
        path = node.get("path")
        if not isinstance(path, str) or not path.startswith(GPU_NODES) or path in known:
            continue
        try:
            seen = os.stat(path, follow_symlinks=False)
        except (OSError, ValueError):
            continue  # the runtime reports it
        numbers = os.major(seen.st_rdev), os.minor(seen.st_rdev)
        if not stat.S_ISCHR(seen.st_mode) or numbers != (node.get("major"), node.get("minor")):
            continue
        if seen.st_mode & _EVERYBODY != _EVERYBODY:
            yield {
                "path": path, "type": "c", "major": numbers[0], "minor": numbers[1],
                "fileMode": stat.S_IMODE(seen.st_mode), "uid": seen.st_uid, "gid": seen.st_gid,
                "state": COVERED,
            }  # fmt: skip
