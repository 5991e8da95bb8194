"""Which containers have the pipes of a daemon: who may become a client at any moment.

They are told by their bundles, so also one that was made and not started yet, or has not called
CUDA yet, is known; a daemon itself knows of neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from integration.inspection.errors import InspectionError
from integration.inspection.processes import all_containers
from shim.errors import BundleUnusable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from integration.inspection.bundles import Container
    from integration.node.mps.places import Places

__all__ = ["UNKNOWN", "users_of"]

UNKNOWN = "containers that could not be read"


def users_of(places: Places, states: Iterable[str]) -> tuple[str, ...]:
    """The containers that have a daemon's pipe directory.

    Args:
        places: of its resource.
        states: containerd's state directories; none for those that are known.

    Returns:
        What people call them; :data:`UNKNOWN` stands for those that could not be read.
    """
    try:
        containers = all_containers(states)
    except InspectionError:
        return (UNKNOWN,)
    return tuple(each.title for each in containers if _has(each, places.pipe))


def _has(container: Container, pipe: str) -> bool:
    try:
        mounts = container.spec().get("mounts")
    except BundleUnusable:
        return False  # it has just gone
    return isinstance(mounts, list) and any(
        isinstance(mount, dict) and mount.get("source") == pipe for mount in mounts
    )
