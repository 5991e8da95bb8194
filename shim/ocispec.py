"""What the shim itself has to know of a container's config.json.

Source: OCI runtime specification, config.md (root) and config-linux.md (namespaces).
"""

from __future__ import annotations

import os

from shim.errors import BundleUnusable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["cgroups_path_of", "has_own_pid_namespace", "has_user_namespace", "root_of"]


def root_of(spec: dict[str, Any], bundle: str) -> str:
    """The directory that the container's processes will see as /.

    Raises:
        BundleUnusable: the spec names none, or it is not there.
    """
    root = spec.get("root")
    path = root.get("path") if isinstance(root, dict) else None
    if not isinstance(path, str) or not path:
        raise BundleUnusable(
            f"the rootfs of {bundle}", found="no root.path in config.json", do="name one there"
        )
    path = os.path.join(bundle, path)
    if not os.path.isdir(path):
        raise BundleUnusable(
            f"the rootfs {path}", found="no such directory", do="check the snapshot or --rootfs"
        )
    return path


def cgroups_path_of(spec: dict[str, Any]) -> str:
    """The cgroup that the spec names; empty if it names none."""
    linux = spec.get("linux")
    path = linux.get("cgroupsPath") if isinstance(linux, dict) else None
    return path if isinstance(path, str) else ""


def has_own_pid_namespace(spec: dict[str, Any]) -> bool:
    """Whether the spec asks for a new pid namespace: then init's death kills all in it.

    Raises:
        BundleUnusable: the spec's namespaces are not what the OCI spec says they are.
    """
    return any(n.get("type") == "pid" and not n.get("path") for n in _namespaces(spec))


def has_user_namespace(spec: dict[str, Any]) -> bool:
    """Whether the container's root is somebody else on the host.

    Raises:
        BundleUnusable: the spec's namespaces are not what the OCI spec says they are.
    """
    return any(n.get("type") == "user" for n in _namespaces(spec))


def _namespaces(spec: dict[str, Any]) -> list[dict[str, Any]]:
    linux = spec.get("linux") or {}
    namespaces = linux.get("namespaces") if isinstance(linux, dict) else None
    if not isinstance(namespaces, list | None) or not all(
        isinstance(n, dict) for n in namespaces or []
    ):
        raise BundleUnusable(
            "the namespaces in config.json", found=f"{namespaces!r}", do="make a list of objects"
        )
    return namespaces or []
