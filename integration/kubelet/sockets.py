"""The sockets of plugins, beside the kubelet's: whose one is, and putting one in place.

Rules
- A socket is made under another name and moved into place, so that it is there with its mode and
  its listener, or not at all. gRPC itself would remove whatever is at a path that it is told to
  listen at, and whatever is there when it ends; here neither is anybody else's.
- A socket is known by its file, not by its path: as long as somebody listens at it, the file's
  number is no other's. So nothing is removed but what is ours.
- Whether somebody serves a socket is seen by connecting: that of a program that died refuses.

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
    """What the socket of a resource is called, as NVIDIA's plugin does: "nvidia-gpu.sock"."""
    return f"{_PREFIX}{resource.rpartition('/')[2]}{_SUFFIX}"


def identity_of(path: str) -> Identity | None:
    """Which socket is at a path; None if none is."""
    try:
        seen = os.lstat(path)
    except OSError:
        return None
    return (seen.st_dev, seen.st_ino) if stat.S_ISSOCK(seen.st_mode) else None


def is_served(path: str) -> bool:
    """Whether somebody listens at a socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(path)
        except BlockingIOError:  # it has more to do than it can
            return True
        except OSError:
            return False
    return True


def others(directory: str, ours: Collection[Identity]) -> list[str]:
    """The sockets of device plugins of NVIDIA's that somebody else serves, by name."""
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
    """Where the socket of a path is to be made first.

    Raises:
        PluginSocketUnusable: no socket can be made there.
    """
    directory = os.path.dirname(path)
    aside = os.path.join(directory, f".{os.getpid()}.{next(_numbers)}{_SUFFIX}")
    found = ""
    if not os.path.isdir(directory):
        found = "its directory is not there"
    elif not os.access(directory, os.W_OK | os.X_OK):
        found = "its directory cannot be written to"
    elif max(len(os.fsencode(each)) for each in (path, aside)) > LONGEST:
        found = f"its path is longer than the {LONGEST} bytes that a socket's may have"
    if found:
        raise PluginSocketUnusable(
            f"the socket {path}", found=found, do="see --kubelet-socket and kubelet-root"
        )
    return aside


def refuse_served(path: str) -> None:
    """See that nobody serves a socket that is to be ours.

    Raises:
        OtherPlugin: somebody does.
    """
    if is_served(path):
        raise OtherPlugin(
            f"to serve {path}", found="another program serves it", do="stop that device plugin"
        )


def put_in_place(aside: str, path: str) -> Identity:
    """Move a socket to where the kubelet looks for it, in place of a dead predecessor's.

    Args:
        aside: where it was made, and is listened at.

    Raises:
        OtherPlugin: somebody serves a socket there.
        PluginSocketUnusable: it cannot be done.
    """
    try:
        refuse_served(path)
        seen = _closed(aside)
        os.rename(aside, path)
    except OSError as error:
        raise PluginSocketUnusable(
            f"the socket {path}",
            found=error.strerror or errno.errorcode.get(error.errno or 0, ""),
            do="see who may write there",
        ) from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(aside)
    return seen.st_dev, seen.st_ino


def _closed(path: str) -> os.stat_result:
    """Give a socket its mode; what it is. Nothing that a link leads to is given one."""
    fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        seen = os.fstat(fd)
        if not stat.S_ISSOCK(seen.st_mode):
            raise FileExistsError(errno.EEXIST, "somebody has put something else there", path)
        os.chmod(f"/proc/self/fd/{fd}", _MODE)
    finally:
        os.close(fd)
    return seen


def remove(path: str, identity: Identity) -> None:
    """Remove a socket, if it is still the one that we put there."""
    if identity_of(path) == identity:
        with contextlib.suppress(OSError):
            os.unlink(path)


def socket_identity(path: str) -> tuple[int, int, int] | None:
    """Which socket is at a path: one that was made anew is another; None if none is there."""
    try:
        seen = os.stat(path)
    except OSError:
        return None
    if not stat.S_ISSOCK(seen.st_mode):
        return None
    # The number of a file that is gone may be that of the next.
    return seen.st_dev, seen.st_ino, seen.st_ctime_ns
