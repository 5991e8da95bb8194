"""The sockets of plugins in the kubelet's directory: put them in place, identify and remove them.

Rules
- A socket is created under another name and moved into place, so that it has its mode and its
  listener from the start. gRPC itself would remove any file at the path where it starts to listen,
  and again when it stops, even if another program had created that file.
- A socket is identified by the device and inode of its file: no other file can have them while a
  program listens on it. So only our own sockets are removed.
- Connecting shows whether a program still serves a socket: the socket of a dead program refuses.

Source: unix(7); grpc doc/naming.md.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import socket
import stat
from collections.abc import Collection, Iterator
from typing import Final

from integration.agent_errors import OtherPlugin, PluginSocketUnusable

Identity = tuple[int, int]

_PREFIX: Final = "nvidia-"
_SUFFIX: Final = ".sock"
LONGEST: Final = 107  # of sun_path, without its zero byte
_MODE: Final = 0o600
_numbers: Final[Iterator[int]] = itertools.count()


def socket_name(resource: str) -> str:
    """Return a resource's socket name, the same as NVIDIA's plugin uses: "nvidia-gpu.sock"."""
    return f"{_PREFIX}{resource.rpartition('/')[2]}{_SUFFIX}"


def identity_of(path: str) -> Identity | None:
    """Return the identity of the socket at a path; None if there is none."""
    try:
        seen = os.lstat(path)
    except OSError:
        return None
    return (seen.st_dev, seen.st_ino) if stat.S_ISSOCK(seen.st_mode) else None


def is_served(path: str) -> bool:
    """Return whether a program listens at a socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(path)
        except BlockingIOError:  # its backlog is full
            return True
        except OSError:
            return False
    return True


def others(directory: str, ours: Collection[Identity]) -> list[str]:
    """Return the sockets of NVIDIA device plugins that another program serves, sorted."""
    try:
        names = sorted(os.listdir(directory))
    except OSError:
        return []
    paths = (
        os.path.join(directory, name)
        for name in names
        if name.startswith(_PREFIX) and name.endswith(_SUFFIX)
    )
    found = ((path, identity_of(path)) for path in paths)
    return [path for path, who in found if who and who not in ours and is_served(path)]


def temporary_path(path: str) -> str:
    """Return the temporary path at which to create a socket.

    Raises:
        PluginSocketUnusable: no socket can be created there.
    """
    directory = os.path.dirname(path)
    temporary = os.path.join(directory, f".{os.getpid()}.{next(_numbers)}{_SUFFIX}")
    found = ""
    if not os.path.isdir(directory):
        found = "its directory does not exist"
    elif not os.access(directory, os.W_OK | os.X_OK):
        found = "its directory is not writable"
    elif max(len(os.fsencode(each)) for each in (path, temporary)) > LONGEST:
        found = f"its path is longer than the {LONGEST} bytes that a socket's path may have"
    if found:
        raise PluginSocketUnusable(
            f"the socket {path}", found=found, do="check --kubelet-socket and kubelet-root"
        )
    return temporary


def refuse_served(path: str) -> None:
    """Raise an error if another program serves a socket.

    Raises:
        OtherPlugin: another program serves it.
    """
    if is_served(path):
        raise OtherPlugin(
            f"to serve {path}", found="another program serves it", do="stop that device plugin"
        )


def put_in_place(temporary: str, path: str) -> Identity:
    """Move a socket to the path that the kubelet uses, replacing the socket of a dead program.

    Args:
        temporary: the path where the socket was created; a server already listens on it.

    Raises:
        OtherPlugin: another program serves a socket there.
        PluginSocketUnusable: the socket cannot be moved.
    """
    try:
        refuse_served(path)
        seen = _close_to_others(temporary)
        os.rename(temporary, path)
    except OSError as error:
        raise PluginSocketUnusable(
            f"the socket {path}",
            found=error.strerror or errno.errorcode.get(error.errno or 0, ""),
            do="check who may write there",
        ) from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
    return seen.st_dev, seen.st_ino


def _close_to_others(path: str) -> os.stat_result:
    """Set a socket's mode, following no link; return its status."""
    fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        seen = os.fstat(fd)
        if not stat.S_ISSOCK(seen.st_mode):
            raise FileExistsError(errno.EEXIST, "another program has replaced it", path)
        os.chmod(f"/proc/self/fd/{fd}", _MODE)
    finally:
        os.close(fd)
    return seen


def remove(path: str, identity: Identity) -> None:
    """Remove a socket if it is still ours."""
    if identity_of(path) == identity:
        with contextlib.suppress(OSError):
            os.unlink(path)


def socket_identity(path: str) -> tuple[int, int, int] | None:
    """Return the identity of the socket at a path, which changes when the socket is recreated.

    None if there is no socket.
    """
    try:
        seen = os.stat(path)
    except OSError:
        return None
    if not stat.S_ISSOCK(seen.st_mode):
        return None
    # A new file may have the inode of a removed one.
    return seen.st_dev, seen.st_ino, seen.st_ctime_ns
