"""List the devices of all spec files, and show which file wins for each.

========  ====================================================================
state     what a container that names the device gets
========  ====================================================================
used      the device as defined in this file
hidden    the device as defined in a file in a later directory, which wins
conflict  nothing: another file in the same directory defines the device, too
========  ====================================================================

Source: the rules of :mod:`hooks.cdi.registry`.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Final

from hooks.cdi.registry import Registry

USED: Final = "used"
HIDDEN: Final = "hidden"
CONFLICT: Final = "conflict"


def list_devices(registry: Registry) -> list[dict[str, Any]]:
    """List every device of every file.

    Returns:
        Rows sorted by name, the winning file first: ``name``, ``kind``, ``device``, ``file`` and
        ``state``.
    """
    having: dict[str, list[tuple[int, str, str, str]]] = defaultdict(list)
    for file in registry.files:
        kind = file.spec.kind
        for device in file.spec.devices:
            row = (-file.priority, file.path, kind, device.name)
            having[f"{kind}={device.name}"].append(row)
    rows = []
    for name, places in sorted(having.items()):
        places.sort()
        deciding = [place for place in places if place[0] == places[0][0]]
        for place in places:
            state = HIDDEN if place not in deciding else CONFLICT if deciding[1:] else USED
            _, path, kind, own = place
            rows.append({"name": name, "kind": kind, "device": own, "file": path, "state": state})
    return rows


def list_faults(registry: Registry) -> list[dict[str, str]]:
    """List the files and directories that cannot be used.

    Returns:
        Objects with ``file``, ``code`` and ``found``.
    """
    return [
        {"file": fault.path, "code": fault.error.code, "found": fault.error.found}
        for fault in registry.faults
    ]
