"""A sandbox's records in its bundle for the clean-up: its namespaces' holder and its containers.

The table of :mod:`shim.bundle` has the names of the files.
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
    """Record in a sandbox's bundle how to end one of its containers.

    Args:
        sandbox_bundle: the sandbox's bundle.
        container_id: the container.
        bundle: the container's bundle.
        record: its runtime and options.

    Raises:
        BundleUnusable: the record cannot be written.
    """
    content = json.dumps({"bundle": bundle, **bundle_files.record_fields(record)}).encode()
    files.write(_member(sandbox_bundle, container_id), content)


def forget_member(sandbox_bundle: str, container_id: str) -> None:
    """Remove the record from :func:`write_member`, if it exists."""
    files.remove(_member(sandbox_bundle, container_id))


def members(sandbox_bundle: str) -> list[str]:
    """Return the ids of the containers recorded in a sandbox's bundle.

    Args:
        sandbox_bundle: the bundle. It need not exist, or be that of a sandbox.
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
    """Read the record from :func:`write_member`.

    Returns:
        The container's bundle, and its runtime and options.

    Raises:
        BundleUnusable: the record is missing or malformed.
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
    """Record the process that holds a sandbox's namespaces.

    Args:
        bundle: the sandbox's bundle.
        pid: the pid of that process.
        start_time: when it started, in clock ticks since boot.

    Raises:
        BundleUnusable: the record cannot be written.
    """
    files.write(os.path.join(bundle, HOLDER), f"{pid} {start_time}\n".encode())


def read_holder(bundle: str) -> tuple[int, int]:
    """Read the record from :func:`write_holder`.

    Returns:
        The pid and the start time; 0 without the file.

    Raises:
        BundleUnusable: the file is malformed.
    """
    path = os.path.join(bundle, HOLDER)
    line = bundle_files.read_line(path)
    return bundle_files.pid_and_start_time(path, line) if line else (0, 0)


def pin_namespaces(bundle: str, pid: int, names: Iterable[str]) -> None:
    """Mount a process's namespaces in a sandbox's bundle, so that they outlive the process.

    Args:
        bundle: the sandbox's bundle.
        pid: the pid of the process.
        names: the names of the namespaces in /proc/PID/ns.

    Raises:
        OSError: the kernel refused.
    """
    os.mkdir(os.path.join(bundle, NAMESPACES), 0o700)
    for name in names:
        path = pinned_namespace(bundle, name)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        syscalls.mount(f"/proc/{pid}/ns/{name}", path, "", syscalls.MS_BIND)


def pinned_namespace(bundle: str, name: str) -> str:
    """Return where :func:`pin_namespaces` mounts a namespace."""
    return os.path.join(bundle, NAMESPACES, name)


def unpin_namespaces(bundle: str) -> None:
    """Undo :func:`pin_namespaces`, if necessary.

    Args:
        bundle: the bundle. It need not exist, or be that of a sandbox.

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
