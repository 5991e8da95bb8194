"""Find the containers with a daemon's pipe directory, which may become clients at any moment.

For containerd, the bundles show such containers even before they start. For other engines (Docker,
CRI-O, Podman), the mounts of their processes show them even before they call CUDA. The daemon
itself does not know of either.
"""

from __future__ import annotations

from collections.abc import Iterable

from integration.containers.bundles import Container
from integration.containers.errors import InspectionError
from integration.containers.mount_users import mount_users
from integration.containers.shims import all_containers
from integration.node.mps.paths import Places
from shim.errors import BundleUnusable

UNKNOWN = "containers that could not be read"


def users_of(places: Places, states: Iterable[str]) -> tuple[str, ...]:
    """Return the containers, and processes with their own mounts, that have a pipe directory.

    Args:
        states: containerd's state directories; empty for the known ones.

    Returns:
        Names for display; :data:`UNKNOWN` stands for those that could not be read.
    """
    try:
        containers = all_containers(states)
    except InspectionError:
        return (UNKNOWN,)
    users = [each for each in containers if _mounts(each, places.pipe)]
    others = mount_users(places.pipe, (each.pid for each in users if each.pid))
    return (
        *(each.title for each in users),
        *(f"process {pid} ({name})" for pid, name in others),
    )


def _mounts(container: Container, pipe: str) -> bool:
    try:
        mounts = container.spec().get("mounts")
    except BundleUnusable:
        return False  # the container was removed
    return isinstance(mounts, list) and any(
        isinstance(mount, dict) and mount.get("source") == pipe for mount in mounts
    )
