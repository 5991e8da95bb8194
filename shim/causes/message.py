"""The termination message of a Kubernetes container: a file of the host, mounted into it.

For each attempt the kubelet creates a file, ``ROOT/pods/UID/containers/NAME/`` and eight
hexadecimal digits, and mounts it at the container's ``terminationMessagePath``. After the
container's end, it reports the last 4096 bytes of that file as the container's message.

Rules
- Only a file that the kubelet created counts: the mount's source must have such a name. A pod's own
  volume at ``/dev/termination-log`` does not count.
- Of several, the last one at ``/dev/termination-log``, or at the path in the annotation
  ``terminationMessagePath`` if the engine passes that on, counts; or else the last one.
- A read-only mount is not written to, since the container could not write to it either.
- The text is appended to the container's own, on a separate line, if both fit into 4096 bytes. The
  container's text is never cut or replaced.
- An empty file stays empty if the policy is known to be FallbackToLogsOnError: the kubelet then
  reports the end of the log, which has the same line.
- The ended container may have had the source's directory as a volume. So no link is followed below
  the kubelet's own directory, and only a regular file with a single name is opened, because opening
  a device or a FIFO can have side effects.

Source: the kubelet's pkg/kubelet/kuberuntime (makeMounts, getTerminationMessage); openat2(2).
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Mapping
from typing import Any, Final

from hooks.image.openat2 import open_without_links

__all__ = ["LARGEST", "append", "find_message_file"]

LARGEST: Final = 4096
"""The bytes of the file that the kubelet reports."""

_DEFAULT: Final = "/dev/termination-log"
_PATH: Final = "io.kubernetes.container.terminationMessagePath"
_POLICY: Final = "io.kubernetes.container.terminationMessagePolicy"
_FALLBACK: Final = "FallbackToLogsOnError"
_OF_KUBELET: Final = re.compile(r"(/.*)?/(pods/[^/]+/containers/[^/]+/[0-9a-f]{8})", re.ASCII)


def find_message_file(spec: Mapping[str, Any]) -> tuple[str, bool]:
    """Return the host's file for a container's termination message.

    Args:
        spec: config.json, decoded.

    Returns:
        The file's path, "" if there is none; and whether it must stay empty if it is empty.
    """
    annotations = spec.get("annotations")
    annotations = annotations if isinstance(annotations, dict) else {}
    wanted = (_DEFAULT, annotations.get(_PATH))
    mounts = spec.get("mounts")
    binds = [m for m in mounts if _is_writable_bind(m)] if isinstance(mounts, list) else []
    ours = [m for m in binds if _OF_KUBELET.fullmatch(os.path.normpath(m["source"]))]
    found = [m for m in ours if os.path.normpath(m["destination"]) in wanted] or ours
    return (found[-1]["source"] if found else ""), annotations.get(_POLICY) == _FALLBACK


def append(path: str, text: str, *, unless_empty: bool = False) -> bool:
    """Append a line to a container's termination message.

    Args:
        path: the host's file, as returned by :func:`find_message_file`.
        text: the line, without a line end.
        unless_empty: whether to leave an empty file empty.

    Returns:
        Whether the line was written; if not, there is no room or the file must stay empty.

    Raises:
        OSError: the file cannot be written; it is unchanged.
    """
    fd = _open(path)
    try:
        size = os.fstat(fd).st_size
        if not size and unless_empty:
            return False
        begun = bool(size) and os.pread(fd, 1, size - 1) != b"\n"
        line = b"\n" * begun + text.encode(errors="replace") + b"\n"
        if size + len(line) > LARGEST:
            return False
        _write_whole(fd, line, size)
    finally:
        os.close(fd)
    return True


def _write_whole(fd: int, line: bytes, size: int) -> None:
    """Append a whole line to a file, or nothing (OSError)."""
    written = 0
    try:
        written = os.pwrite(fd, line, size)
    finally:
        if written < len(line):
            os.ftruncate(fd, size)
    if written < len(line):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _is_writable_bind(mount: object) -> bool:
    if not isinstance(mount, dict):
        return False
    source, destination = mount.get("source"), mount.get("destination")
    options = mount.get("options") or []
    if not (isinstance(source, str) and isinstance(destination, str) and source.startswith("/")):
        return False
    if not isinstance(options, list):
        return False
    is_bind = mount.get("type") == "bind" or "bind" in options or "rbind" in options
    return is_bind and not {"ro", "rro"}.intersection(map(str, options))


def _open(path: str) -> int:
    """Open the kubelet's file to read and write it; the kubelet's own directory may be a link."""
    of_kubelet = _OF_KUBELET.fullmatch(os.path.normpath(path))
    if of_kubelet is None:
        raise OSError(errno.EINVAL, "is not a file of the kubelet", path)
    directory = os.open(of_kubelet[1] or "/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        location = open_without_links(directory, of_kubelet[2], os.O_PATH | os.O_NOFOLLOW)
    finally:
        os.close(directory)
    try:
        status = os.fstat(location)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
            raise OSError(errno.EINVAL, "is not a regular file with one name", path)
        # The descriptor's link in our procfs leads to the inode that was just checked.
        flags = os.O_RDWR | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        return os.open(f"/proc/self/fd/{location}", flags)
    finally:
        os.close(location)
