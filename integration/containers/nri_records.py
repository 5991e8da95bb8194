"""Find the record of a container that got its GPUs through NRI, and not from the shim.

The agent keeps the record in ``STATE/nri/CONTAINER``
(:mod:`integration.node.services.nri.records`), and mounts the driver's libraries from the same
directory. So the container's own spec shows where its record is, whatever state directory that
agent uses. A pod cannot forge this path: containerd chooses the id only after the pod's mounts are
fixed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

from integration.containers.records import entries

DIRECTORY: Final = "nri"
RECORD: Final = "nvidia.json"


def record_path(spec: Mapping[str, Any], container: str) -> str:
    """Return the path of a container's record; "" if it got nothing through NRI.

    Args:
        spec: its config.json, decoded.
        container: its id.
    """
    mark = f"/{DIRECTORY}/{container}/"
    for mount in entries(spec, "mounts"):
        above, found, _ = str(mount.get("source")).partition(mark)
        if found:
            return os.path.join(above, DIRECTORY, container, RECORD)
    return ""
