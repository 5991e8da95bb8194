"""Find the record of a container that got its GPUs by NRI, and not from the shim.

The agent keeps it in ``STATE/nri/CONTAINER`` (:mod:`integration.node.services.nri.records`), from
where it also mounts the driver's libraries. So the container's own spec says where its record is,
whatever the state directory of that agent is. A pod cannot name it: containerd chooses the id when
the pod's mounts are known already.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

from integration.containers.records import entries

DIRECTORY: Final = "nri"
RECORD: Final = "nvidia.json"


def record_path(spec: Mapping[str, Any], container: str) -> str:
    """Return the path of a container's record; "" if it got nothing by NRI.

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
