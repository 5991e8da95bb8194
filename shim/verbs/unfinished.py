"""Notes that ``delete`` writes before it acts, so that a later ``start`` can finish its work.

containerd runs ``delete`` once, with a limit of five seconds. Then it removes the bundle, and with
it all information on how to end the container. So ``delete`` first writes a note next to the
sockets, and removes it at the end. Meanwhile it holds a lock on the note, which the kernel releases
when the process ends: a note without a lock belongs to a killed ``delete``.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from shim import bundle as bundle_files
from shim import files
from shim.errors import NvshimError

_DIRECTORY: Final = "nvidia-v1-deletes"
_LONGEST: Final = 1 << 20
# Seconds to wait for a locked note: containerd's limit for `delete` is five. It may hang for ever.
_PATIENCE: Final = 6.0
_PAUSE: Final = 0.01


class Left(NamedTuple):
    """How to end a container whose bundle may be gone."""

    id: str
    bundle: str  # its path
    identity: tuple[int, int] | None  # the bundle's device and inode, if it existed
    record: bundle_files.RuntimeRecord
    pid: int  # its init process; 0 if unknown
    cgroup: str  # from its OCI spec; empty if unknown

    def is_there(self) -> bool:
        """Whether its bundle exists; a later one at that path does not count."""
        return self.identity is not None and self.identity == identity_of(self.bundle)

    def is_made_again(self) -> bool:
        """Whether a new container with that id has its bundle at that path."""
        return identity_of(self.bundle) not in {None, self.identity}


class Note:
    """A note of a ``delete``, locked by this process.

    Attributes:
        holder: the pid and start time of the process that holds a sandbox's namespaces; 0 for none.
        left: the containers to end, a sandbox's own first.
    """

    __slots__ = ("_fd", "_path", "holder", "left")

    def __init__(self, path: str, fd: int, holder: tuple[int, int], left: Sequence[Left]) -> None:
        self._path = path
        self._fd = fd
        self.holder = holder
        self.left = tuple(left)

    def remove(self) -> None:
        """Remove the note, since everything is done."""
        files.remove(self._path)
        self.leave()
        try:
            os.rmdir(os.path.dirname(self._path))
        except OSError:
            pass  # other notes remain

    def leave(self) -> None:
        """Release the lock, and let a later ``start`` try again."""
        os.close(self._fd)


def identity_of(path: str) -> tuple[int, int] | None:
    """Return the device and inode of a directory; None if there is none."""
    try:
        status = os.stat(path, follow_symlinks=False)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def write(sockets: str, name: str, holder: tuple[int, int], left: Sequence[Left]) -> Note:
    """Write a note before ending anything.

    Args:
        sockets: the directory of sockets.
        name: the note's name, one for each container of each containerd.
        holder, left: the attributes of :class:`Note`.

    Returns:
        The note, locked.

    Raises:
        OSError: it cannot be written, or another process holds its lock too long.
    """
    deadline = time.monotonic() + _PATIENCE
    path = os.path.join(sockets, _DIRECTORY, name)
    content = {"holder": holder, "left": [_fields(each) for each in left]}
    while True:
        try:
            os.mkdir(os.path.dirname(path), 0o700)
        except FileExistsError:
            pass
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:
            continue  # another process has removed the empty directory
        try:
            if _lock(fd, path, wait=True):
                os.ftruncate(fd, 0)
                os.write(fd, json.dumps(content).encode())
                return Note(path, fd, holder, left)
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        if time.monotonic() >= deadline:
            raise BlockingIOError(path)


def names(sockets: str) -> list[str]:
    """Return the names of all notes, including those of deletes in progress."""
    try:
        return os.listdir(os.path.join(sockets, _DIRECTORY))
    except OSError:
        return []


def take(sockets: str, name: str, *, wait: bool = False) -> Note | None:
    """Lock the note of a killed ``delete``.

    Args:
        sockets: the directory of sockets.
        name: the note's name.
        wait: whether to wait some seconds for a process that holds the lock.

    Returns:
        The note; None if it is missing, locked, or malformed. A malformed note is removed.
    """
    path = os.path.join(sockets, _DIRECTORY, name)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        if not _lock(fd, path, wait=wait):
            os.close(fd)
            return None
        content = files.parse_object(os.read(fd, _LONGEST), path)
        pid, start_time = content["holder"]
        left = [_parse(fields, path) for fields in content["left"]]
        return Note(path, fd, (int(pid), int(start_time)), left)
    except OSError:
        os.close(fd)
        return None
    except (NvshimError, AttributeError, LookupError, OverflowError, TypeError, ValueError):
        os.close(fd)
        files.remove(path)
        return None


def _lock(fd: int, path: str, *, wait: bool) -> bool:
    """Lock a note; return False if it was removed meanwhile, or is locked."""
    deadline = time.monotonic() + (_PATIENCE if wait else 0.0)
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_PAUSE)
    status = os.fstat(fd)
    return identity_of(path) == (status.st_dev, status.st_ino)


def _fields(left: Left) -> dict[str, Any]:
    return {**left._asdict(), "record": bundle_files.record_fields(left.record)}


def _parse(fields: dict[str, Any], path: str) -> Left:
    identity = fields["identity"]
    return Left(
        id=files.check_id(str(fields["id"])),
        bundle=str(fields["bundle"]),
        identity=None if identity is None else (int(identity[0]), int(identity[1])),
        record=bundle_files.parse_runtime_record(fields["record"], path),
        pid=int(fields["pid"]),
        cgroup=str(fields["cgroup"]),
    )
