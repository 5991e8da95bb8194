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
import re
import socket
import stat
import time
from typing import TYPE_CHECKING, Final

from integration.node.plugin.serving_errors import OtherPlugin, PluginSocketUnusable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

__all__ = [
    "Identity",
    "identity_of",
    "is_served",
    "others",
    "put_in_place",
    "refuse_served",
    "remove",
    "socket_name",
    "sweep",
    "temporary_path",
]

Identity = tuple[int, int]

_PREFIX: Final = "nvidia-"
_SUFFIX: Final = ".sock"
_ASIDE: Final = re.compile(r"\.\d+\.\d+\.sock", re.ASCII)
_LONGEST: Final = 107  # sun_path, without its zero byte
_MODE: Final = 0o600
_SETTLED: Final = 10.0  # seconds
_numbers: Final[Iterator[int]] = itertools.count()


def socket_name(resource: str) -> str:
    """What the socket of a resource is called, as NVIDIA's plugin does.

    Args:
        resource: "nvidia.com/mig-1g.10gb".

    Returns:
        "nvidia-mig-1g.10gb.sock".
    """
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
    """The sockets of device plugins of NVIDIA's that somebody else serves.

    Args:
        directory: of the kubelet's plugins.
        ours: the sockets that we serve.

    Returns:
        Their paths, by name.
    """
    return [
        path for path in _of_plugins(directory) if identity_of(path) not in ours and is_served(path)
    ]


def _of_plugins(directory: str) -> list[str]:
    return _sockets(directory, lambda name: name.startswith(_PREFIX) and name.endswith(_SUFFIX))


def _sockets(directory: str, is_wanted: Callable[[str], object]) -> list[str]:
    try:
        names = sorted(os.listdir(directory))
    except OSError:
        return []
    paths = [os.path.join(directory, name) for name in names if is_wanted(name)]
    return [path for path in paths if identity_of(path) is not None]


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
    elif max(len(os.fsencode(each)) for each in (path, aside)) > _LONGEST:
        found = f"its path is longer than the {_LONGEST} bytes that a socket's may have"
    if found:
        raise PluginSocketUnusable(f"the socket {path}", found=found, do="see --kubelet-socket")
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
        path: where it is to be.

    Returns:
        Which one it is.

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


def sweep(directory: str) -> None:
    """Remove the sockets that plugins have left which were killed, and resources have no more.

    Args:
        directory: of the kubelet's plugins.
    """
    for path in (*_of_plugins(directory), *_sockets(directory, _ASIDE.fullmatch)):
        with contextlib.suppress(OSError):
            # One that was made just now may be about to be listened at.
            if time.time() - os.lstat(path).st_mtime > _SETTLED and not is_served(path):
                os.unlink(path)


def remove(path: str, identity: Identity) -> None:
    """Remove a socket, if it is still the one that we put there."""
    if identity_of(path) == identity:
        with contextlib.suppress(OSError):
            os.unlink(path)
