"""What a sandbox leaves in its bundle for who cleans up: what holds its namespaces, its containers.

The names of the files are in the table of :mod:`shim.bundle`.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable
from typing import Final

from shim import bundle as bundle_files
from shim import files, syscalls
from shim.errors import BundleUnusable

POD: Final = "pod"
HOLDER: Final = "holder"
NAMESPACES: Final = "ns"
_MEMBER_PREFIX: Final = "member."
_MEMBER_SUFFIX: Final = ".json"


def write_member(
    sandbox_bundle: str, container_id: str, bundle: str, record: bundle_files.RuntimeRecord
) -> None:
    """Note in a sandbox's bundle how to end one of its containers.

    Args:
        sandbox_bundle: the sandbox's bundle.
        container_id: the container.
        bundle: the container's bundle.
        record: how its runtime is called.

    Raises:
        BundleUnusable: it cannot be written.
    """
    content = json.dumps({"bundle": bundle, **bundle_files.record_fields(record)}).encode()
    files.write(_member(sandbox_bundle, container_id), content)


def forget_member(sandbox_bundle: str, container_id: str) -> None:
    """Remove what :func:`write_member` wrote, if it is there."""
    files.remove(_member(sandbox_bundle, container_id))


def members(sandbox_bundle: str) -> list[str]:
    """The ids of the containers that are noted in a sandbox's bundle.

    Args:
        sandbox_bundle: the bundle; it need not exist, or be a sandbox's.
    """
    try:
        names = os.listdir(sandbox_bundle)
    except OSError:
        return []
    return [
        name.removeprefix(_MEMBER_PREFIX).removesuffix(_MEMBER_SUFFIX)
        for name in names
        if name.startswith(_MEMBER_PREFIX) and name.endswith(_MEMBER_SUFFIX)
    ]


def read_member(sandbox_bundle: str, container_id: str) -> tuple[str, bundle_files.RuntimeRecord]:
    """Read what :func:`write_member` wrote.

    Returns:
        The container's bundle, and how its runtime is called.

    Raises:
        BundleUnusable: it is gone, or is not what the server writes.
    """
    path = _member(sandbox_bundle, container_id)
    content = files.parse_object(files.read(path, files.CHUNK), path)
    bundle = content.get("bundle")
    if not (isinstance(bundle, str) and bundle.startswith("/")):
        raise BundleUnusable(f"the bundle in {path}", found="no absolute path")
    return bundle_files.without_zero(bundle, path), bundle_files.parse_runtime_record(content, path)


def _member(sandbox_bundle: str, container_id: str) -> str:
    return os.path.join(sandbox_bundle, f"{_MEMBER_PREFIX}{container_id}{_MEMBER_SUFFIX}")


def write_holder(bundle: str, pid: int, start_time: int) -> None:
    """Note the process that holds a sandbox's namespaces.

    Args:
        bundle: the sandbox's bundle.
        pid: the process.
        start_time: when it started, in clock ticks since boot.

    Raises:
        BundleUnusable: it cannot be written.
    """
    files.write(os.path.join(bundle, HOLDER), f"{pid} {start_time}\n".encode())


def read_holder(bundle: str) -> tuple[int, int]:
    """Read what :func:`write_holder` wrote.

    Returns:
        The pid and the start time; zeros if there is no such file.

    Raises:
        BundleUnusable: there is something else in it.
    """
    path = os.path.join(bundle, HOLDER)
    line = bundle_files.read_line(path)
    return bundle_files.pid_and_start_time(path, line) if line else (0, 0)


def pin_namespaces(bundle: str, pid: int, names: Iterable[str]) -> None:
    """Mount namespaces of a process in a sandbox's bundle, so that they outlive it.

    Args:
        bundle: the sandbox's bundle.
        pid: the process.
        names: as /proc/PID/ns has them.

    Raises:
        OSError: the kernel refused.
    """
    os.mkdir(os.path.join(bundle, NAMESPACES), 0o700)
    for name in names:
        path = pinned_namespace(bundle, name)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        syscalls.mount(f"/proc/{pid}/ns/{name}", path, "", syscalls.MS_BIND)


def pinned_namespace(bundle: str, name: str) -> str:
    """Where :func:`pin_namespaces` mounts a namespace."""
    return os.path.join(bundle, NAMESPACES, name)


def unpin_namespaces(bundle: str) -> None:
    """Unmount what :func:`pin_namespaces` has mounted, if anything.

    Args:
        bundle: the bundle; it need not exist, or be a sandbox's.

    Raises:
        OSError: something cannot be unmounted or removed.
    """
    directory = os.path.join(bundle, NAMESPACES)
    try:
        names = os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return
    for name in names:
        path = os.path.join(directory, name)
        try:
            syscalls.umount(path, syscalls.UMOUNT_NOFOLLOW | syscalls.MNT_DETACH)
        except OSError as error:
            if error.errno != errno.EINVAL:  # not mounted
                raise
        files.remove(path)
    os.rmdir(directory)
