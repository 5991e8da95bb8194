"""Cover device nodes of a container in a user namespace with nodes that its users own.

In a user namespace a runtime cannot create nodes, so it mounts the host's, whose owners are not
mapped inside. So no process in the container, not even its root, can open a node with a restricted
mode (a DRM node is ``root:video`` 0660). devtmpfs does not support mapped mounts. So each such node
is created again, for the same device and with the same mode, but with the owner and group that have
the same numbers in the container, and mounted over the host's. The device cgroup still decides how
a device may be opened.

- Like procfs, nodes are covered between ``create`` and ``start`` (:mod:`shim.rootfs.proc_cover`).
- The ids are those of init's own user namespace, as the kernel reports it.
- The node is created in a directory of the bundle that only root may enter, and stays there,
  because the kernel attaches no mount of a removed file. Most bundles are on a mount without
  devices (``nodev``); the clone allows them.
- It is mounted only on a node of the same device that is itself a mount and not behind a link. That
  mount is made private first, so that nothing appears elsewhere.

A node that cannot be covered is reported, but is not an error: it exists, but cannot be opened.

Source: user_namespaces(7); mount_setattr(2); kernel drivers/base/devtmpfs.c; runc
libcontainer/rootfs_linux.go createDeviceNode.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from hooks.image.openat2 import open_without_links
from shim import files, forked, syscalls
from shim.rootfs.proc_cover import COVERED, UNCOVERED, in_container

_NODES: Final = "nodes"
_SET: Final = syscalls.MOUNT_ATTR_NOSUID | syscalls.MOUNT_ATTR_NOEXEC
_MAPPING: Final = 3


async def cover(pid: int, nodes: Iterable[Mapping[str, Any]], directory: str) -> dict[str, str]:
    """Cover device nodes of a container.

    Args:
        pid: the pid of the container's init, a child of ours that is not reaped.
        nodes: the nodes in OCI form: for each its ``path`` in the container, ``major``, ``minor``,
            ``fileMode``, and ``uid`` and ``gid`` as the container numbers them.
        directory: where to create them: the bundle's staging directory.

    Returns:
        For each path :data:`~shim.rootfs.proc_cover.COVERED`, or the reason against it.
    """
    mounts: dict[str, int] = {}
    states: dict[str, str] = {}
    directory = os.path.join(directory, _NODES)
    for number, node in enumerate(nodes):
        try:
            os.makedirs(directory, 0o700, exist_ok=True)
            owner = _outside(pid, "uid", node["uid"]), _outside(pid, "gid", node["gid"])
            mounts[node["path"]] = _make(node, owner, os.path.join(directory, str(number)))
        except OSError as error:
            states[node["path"]] = f"to make it: {forked.reason(error)}"

    def work(opened: list[int]) -> dict[str, str]:
        return {path: _attempt(path, mount, opened) for path, mount in mounts.items()}

    return states | await in_container(pid, mounts, work)


async def uncover(pid: int, paths: Sequence[str]) -> dict[str, str]:
    """Undo :func:`cover`.

    Args:
        pid: the pid of the container's init, a child of ours that is not reaped.
        paths: the covered nodes.

    Returns:
        For each path :data:`~shim.rootfs.proc_cover.UNCOVERED`, or the reason against it.
    """

    def work(opened: list[int]) -> dict[str, str]:
        return {path: _attempt(path, None, opened) for path in paths}

    return await in_container(pid, dict.fromkeys(paths), work)


def _outside(pid: int, kind: str, number: int) -> int:
    """Return the host's id for a container's id; that of its root if unmapped."""
    outside = {}
    with open(f"/proc/{pid}/{kind}_map", "rb") as file:
        for line in file:
            inside, first, count = map(int, line.split()[:_MAPPING])
            for wanted in (number, 0):
                if inside <= wanted < inside + count:
                    outside[wanted] = first + wanted - inside
    if not outside:
        raise OSError(0, f"its {kind}s have no root")
    return outside.get(number, outside.get(0, -1))


def _make(node: Mapping[str, Any], owner: tuple[int, int], path: str) -> int:
    files.remove(path)  # left if a container continues after a checkpoint
    os.mknod(path, stat.S_IFCHR, os.makedev(node["major"], node["minor"]))
    os.chown(path, *owner)
    os.chmod(path, node["fileMode"])
    mount = syscalls.clone_mount(path)
    try:
        syscalls.set_mount_attributes(
            mount, _SET, syscalls.MS_PRIVATE, clear=syscalls.MOUNT_ATTR_NODEV
        )
    except OSError:
        os.close(mount)
        raise
    return mount


# -- in the thread ---------------------------------------------------------------------------


def _attempt(path: str, mount: int | None, opened: list[int]) -> str:
    above, name = os.path.split(path.lstrip("/"))
    try:
        root = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        opened.append(root)
        directory = open_without_links(root, above, os.O_PATH | os.O_DIRECTORY)
        opened.append(directory)
        if mount is None:
            os.fchdir(directory)
            syscalls.umount(name, syscalls.UMOUNT_NOFOLLOW | syscalls.MNT_DETACH)
            return UNCOVERED
        target = open_without_links(directory, name, os.O_PATH)
        opened.append(target)
        there, ours = os.fstat(target), os.fstat(mount)
        if not stat.S_ISCHR(there.st_mode) or there.st_rdev != ours.st_rdev:
            return "it is another device, or none"
        syscalls.set_mount_attributes(target, 0, syscalls.MS_PRIVATE)
        syscalls.attach_mount(mount, target)
    except OSError as error:
        return forked.reason(error)
    return COVERED
