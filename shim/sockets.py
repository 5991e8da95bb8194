"""The shim's listening socket: its path; creating, finding, taking over and removing it.

All containers of a pod share one shim. Its socket's name is a digest of the pod's identity, so it
is short and the same for every ``start`` of the pod. So the second ``start`` finds the shim of the
first.

Two containers of a pod can start at the same moment, and a shim can exit while a ``start`` looks
for it. So a process binds or removes a socket only under a lock on its path, and waits only for the
kernel while it holds the lock. If the holder is stopped or frozen, only its own pod is affected:
its other starts fail with a line that says so. A running shim does not wait for the lock: if it is
held, a ``start`` is looking for this shim.

``start`` never returns the address of an exiting shim. Under the lock, it finds or creates the
socket, and announces its container with a link to the bundle next to the socket. A shim without
tasks looks for announcements under the lock before it exits, and stays if there is one. Create,
Delete and Shutdown of the container remove its announcement. An old announcement, or one without
its bundle, does not count.

A shim that is killed before its first Create leaves its socket behind, because containerd removes
the bundle without calling ``delete``. Such a socket still has its announcement, so an exiting shim
and the ``delete`` verb remove both.

Source: unix(7); containerd pkg/shim/util_unix.go (never an abstract socket: CVE-2020-15257);
cmd/containerd-shim-runc-v2/manager.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import time
from collections.abc import Mapping, Sequence
from typing import Final

from shim import files
from shim.errors import SocketDirectoryUnusable, SocketPathTooLong, SocketUnavailable

SCHEME: Final = "unix://"

# containerd's limit; the kernel's is 107.
LONGEST_PATH: Final = 106

_DIGITS: Final = 64
_HEXADECIMAL: Final = frozenset("0123456789abcdef")

DIRECTORY: Final = "/run/containerd/s"

# The kernel lowers it to net.core.somaxconn. Clients wait while the backlog is full.
_BACKLOG: Final = 1 << 16
_LOCK_PAUSE: Final = 0.001  # seconds
_LOCK_PATIENCE: Final = 1.0
_LOCKED: Final = "~"
# Seconds from a container's announcement until its Create is no longer expected: containerd sends
# it at once, unless it was killed in between.
LATEST_CREATE: Final = 60.0

_OTHERS_MAY_WRITE: Final = 0o022

# Errors of users other than root for the system's directory.
_NOT_OURS_TO_MAKE: Final = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT)


def name_of(address: str, namespace: str, group: str) -> str:
    """Return the name of a group's socket in its directory.

    Args:
        address: containerd's gRPC address, which differs between containerds on a machine.
        namespace: containerd's namespace.
        group: the group.

    Returns:
        64 hexadecimal digits.
    """
    return files.digest(f"{address}/{namespace}/{group}".encode())


def is_name(name: str) -> bool:
    """Whether a name may be a result of :func:`name_of`."""
    return len(name) == _DIGITS and _HEXADECIMAL.issuperset(name)


def path_of(directory: str, name: str) -> str:
    """Return the path of a socket.

    Args:
        directory: the directory of sockets.
        name: the result of :func:`name_of`.

    Raises:
        SocketPathTooLong: the path exceeds the 106 bytes of a socket's address.
    """
    path = os.path.join(directory, name)
    if len(os.fsencode(path)) > LONGEST_PATH:
        raise SocketPathTooLong(
            f"a socket in {directory}",
            found=f"a path of {len(os.fsencode(path))} bytes, and {LONGEST_PATH} are allowed",
            do="let containerd's state directory have a shorter path",
        )
    return path


def directories(wanted: str, environment: Mapping[str, str], uid: int) -> list[str]:
    """Return the directories that may contain the socket, best first.

    Args:
        wanted: the only allowed directory, if containerd requested one; else "".
        environment: our environment.
        uid: our effective user id.

    Returns:
        Absolute paths. All except the first are for a containerd without root privileges.
    """
    if wanted:
        return [wanted]
    found = [DIRECTORY]
    runtime_directory = environment.get("XDG_RUNTIME_DIR", "")
    if runtime_directory.startswith("/"):
        found.append(os.path.join(runtime_directory, "containerd/s"))
    return [*found, f"/run/user/{uid}/containerd/s", f"/tmp/containerd-s-{uid}"]  # noqa: S108 - checked to be ours alone before use


def prepare_directory(wanted: str = "") -> str:
    """Find or create the directory for sockets.

    Args:
        wanted: the only allowed directory, if containerd requested one; else "".

    Returns:
        The best of :func:`directories` that is ours and that no other user may write.

    Raises:
        SocketDirectoryUnusable: there is none.
    """
    return first_usable(directories(wanted, os.environ, os.geteuid()))


def first_usable(candidates: Sequence[str]) -> str:
    """Find or create a directory for sockets.

    Args:
        candidates: absolute paths, best first.

    Returns:
        The first that exists or can be created, is ours, and that no other user may write.

    Raises:
        SocketDirectoryUnusable: there is none.
    """
    found = []
    for path in candidates:
        try:
            os.makedirs(path, 0o700, exist_ok=True)
            status = os.stat(path, follow_symlinks=False)
            writable = os.access(path, os.W_OK | os.X_OK)
        except OSError as error:
            found.append(f"{path}: {os.strerror(error.errno or 0).lower()}")
            if error.errno not in _NOT_OURS_TO_MAKE:
                break
            continue
        if not stat.S_ISDIR(status.st_mode):
            found.append(f"{path}: not a directory")
        elif status.st_uid != os.geteuid():
            found.append(f"{path}: belongs to user {status.st_uid}")
        elif status.st_mode & _OTHERS_MAY_WRITE:
            found.append(f"{path}: others may write to it")
        elif not writable:
            found.append(f"{path}: may not be written")
        else:
            return path
    raise SocketDirectoryUnusable(
        "a directory for the shim's socket",
        found="; ".join(found),
        do="make it a directory of containerd's user, with mode 0700",
    )


def listen(path: str, *, container_id: str = "", bundle_path: str = "") -> int | None:
    """Listen at a path, unless a shim already does, and announce a container to the listener.

    Args:
        path: the path, whose directory exists.
        container_id: the container, whose Create will follow; "" to announce none.
        bundle_path: its bundle; the announcement is valid as long as the bundle exists.

    Returns:
        The descriptor of a listening, non-inheritable socket with mode 0600; None if a living
        process listens at the path.

    Raises:
        SocketUnavailable: the kernel refused.
    """
    try:
        with _Lock(path):
            listener = _listen_or_find(path)
            try:
                if container_id:
                    announcement = f"{path}.{container_id}"
                    files.remove(announcement)
                    os.symlink(bundle_path, announcement)
            except OSError:
                if listener is not None:
                    os.unlink(path)
                    os.close(listener)
                raise
    except BlockingIOError as error:
        raise SocketUnavailable(
            f"to listen at {path}",
            found=f"another process has had the lock on it for {_LOCK_PATIENCE:g} s",
            do=f"see by `fuser {_lock_path(path)}` which one is stopped or frozen, and end it",
        ) from error
    except OSError as error:
        found = os.strerror(error.errno or 0).lower()
        raise SocketUnavailable(f"to listen at {path}", found=found) from error
    return listener


def forget(path: str, container_id: str) -> None:
    """Remove the announcement of a container, if there is one.

    Args:
        path: the socket.
        container_id: the container, which was created or will not be.
    """
    try:
        files.remove(f"{path}.{container_id}")
    except OSError:
        pass  # it stops counting once its bundle is removed


def _listen_or_find(path: str) -> int | None:
    try:
        return _bind(path)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
    if is_alive(path):
        return None
    files.remove(path)
    return _bind(path)


def is_alive(path: str) -> bool:
    """Whether a process listens at a path.

    Args:
        path: the path of the socket.

    Returns:
        False only if the kernel reports that none does. A listener too busy to accept counts.
    """
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except OSError as error:
            return error.errno not in (errno.ECONNREFUSED, errno.ENOENT)
    return True


def identity(path: str) -> tuple[int, int] | None:
    """Return the device and inode of the file at a path; None if there is none."""
    try:
        status = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def remove_own(path: str, own: tuple[int, int] | None) -> None:
    """Remove a socket, unless another shim has taken over its path.

    Call this before closing the listener. Otherwise a ``start`` in between would replace the
    seemingly dead socket, and we would then remove the new one. If another process holds the lock,
    the socket stays; it will be dead soon, and the next ``start`` replaces it.

    Args:
        path: the path of the socket.
        own: its :func:`identity` while it was ours.

    Raises:
        OSError: the socket exists and cannot be removed.
    """
    if own is None:
        return
    try:
        with _Lock(path):
            if identity(path) == own:
                os.unlink(path)
    except (FileNotFoundError, BlockingIOError):
        pass


def retire(path: str, own: tuple[int, int] | None, *, regardless: bool = False) -> bool:
    """Remove a shim's socket unless a container is announced there.

    Like :func:`remove_own`, call this before closing the listener. It does not wait: while another
    process holds the lock, it removes nothing.

    Args:
        path: the path of the socket.
        own: its :func:`identity` while it was ours.
        regardless: whether to remove it anyway, with its announcements.

    Returns:
        Whether its shim may exit: no ``start`` has returned, or is about to return, its address for
            a container that does not exist yet.
    """
    directory, name = os.path.split(path)
    try:
        with _Lock(path, patience=0):
            names = os.listdir(directory)
            announced = [n for n in names if n.startswith(f"{name}.")]
            for announcement in [os.path.join(directory, n) for n in announced]:
                if _counts(announcement) and not regardless:
                    return False
                files.remove(announcement)
            if own is not None and identity(path) == own:
                os.unlink(path)
        _sweep(directory, [n for n in names if n not in announced and n != f"{name}{_LOCKED}"])
    except BlockingIOError:
        return False
    except OSError:
        pass  # no start finds a socket in such a directory
    return True


def sweep(directory: str) -> None:
    """Remove the sockets of shims that were killed before their announced container existed.

    Args:
        directory: the directory of sockets. Other programs' files, and sockets whose lock is held,
            stay.

    Raises:
        OSError: something in it cannot be removed.
    """
    try:
        names = os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return
    _sweep(directory, names)


def _sweep(directory: str, names: Sequence[str]) -> None:
    for name in names:
        is_lock = name.endswith(_LOCKED)
        of_shim, _, container_id = name.removesuffix(_LOCKED).partition(".")
        path, found = os.path.join(directory, of_shim), os.path.join(directory, name)
        # Check first without the lock, for which an exiting shim does not wait.
        if not is_name(of_shim) or not (
            _is_old(found) if is_lock else container_id and _is_left(found)
        ):
            continue
        try:
            with _Lock(path, patience=0):  # the lock removes a leftover file
                if not (is_lock or _counts(found) or is_alive(path)):
                    files.remove(path)
                    files.remove(found)
        except BlockingIOError:
            continue


def _is_left(announcement: str) -> bool:
    return os.path.islink(announcement) and not _counts(announcement)


def _is_old(path: str) -> bool:
    """Whether a file is older than any process needs."""
    try:
        return time.time() - os.lstat(path).st_mtime > LATEST_CREATE
    except FileNotFoundError:
        return False


def _counts(announcement: str) -> bool:
    """Whether an announced container may still be created."""
    try:
        age = time.time() - os.lstat(announcement).st_mtime
    except FileNotFoundError:
        return False  # it was created
    return age < LATEST_CREATE and os.path.isdir(announcement)


def remove_dead(path: str) -> bool:
    """Remove a socket that has no listener.

    Args:
        path: the path of the socket; any other file stays.

    Returns:
        Whether it was removed.

    Raises:
        OSError: the socket exists and cannot be removed.
    """
    try:
        # Create nothing, not even a lock, next to a file that is not a socket.
        if not _is_socket(path):
            return False
        with _Lock(path):
            if not _is_socket(path) or is_alive(path):
                return False
            os.unlink(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _is_socket(path: str) -> bool:
    return stat.S_ISSOCK(os.stat(path, follow_symlinks=False).st_mode)


class _Lock:
    """Locks a path against processes that bind or remove its socket.

    Args:
        path: the path of the socket.
        patience: seconds to wait for other processes, which take less than a millisecond.
    """

    def __init__(self, path: str, *, patience: float = _LOCK_PATIENCE) -> None:
        self._path = _lock_path(path)
        self._patience = patience
        self._fd = -1

    def __enter__(self) -> None:
        """Acquire the lock.

        Raises:
            BlockingIOError: another process has it.
            OSError: the directory is missing or cannot be written to.
        """
        deadline = time.monotonic() + self._patience
        while not self._try():
            if time.monotonic() >= deadline:
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), self._path)
            time.sleep(_LOCK_PAUSE)

    def _try(self) -> bool:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(self._path, flags, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            status = os.fstat(fd)
            # The previous holder has removed the locked file.
            if identity(self._path) == (status.st_dev, status.st_ino):
                self._fd, fd = fd, -1
                return True
        except BlockingIOError:
            pass
        finally:
            if fd >= 0:
                os.close(fd)
        return False

    def __exit__(self, *_: object) -> None:
        try:
            os.unlink(self._path)
        finally:
            os.close(self._fd)


def _lock_path(path: str) -> str:
    return f"{path}{_LOCKED}"


def _bind(path: str) -> int:
    listener = socket.socket(socket.AF_UNIX)
    # bind(2) creates the file with the umask's mode; chmod would come too late.
    umask = os.umask(0o177)
    try:
        listener.bind(path)
    except OSError:
        listener.close()
        raise
    finally:
        os.umask(umask)
    listener.listen(_BACKLOG)
    return listener.detach()
