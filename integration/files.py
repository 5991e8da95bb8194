"""Read, lock and replace files of the node; a reader sees the old content or the new, never a part.

Rules
- A link is followed, as an editor does. But root neither follows a link nor replaces a file that
  belongs to another user in a directory where every user may create files (/tmp), because that user
  could redirect the write. The kernel can prevent this, but not for a program that resolves the
  link before it opens the file.
- A process that is killed leaves its temporary file. The next one that replaces or removes the same
  file removes it (:mod:`hooks.node.temporary`).

Source: rename(2); fsync(2); proc_pid_fdinfo(5); proc_sys_fs(5), protected_symlinks and
protected_regular.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
import tempfile
import time
from collections import deque
from typing import Final

from hooks.node import temporary

_MODE: Final = 0o644
_SUFFIX: Final = ".new"
_LOCK_POLL: Final = 0.01
_MOST_LINKS: Final = 40  # the kernel's limit


def read_file(path: str) -> bytes | None:
    """Return a file's content.

    Args:
        path: the file's path; links are followed.

    Returns:
        The content; None if the file does not exist.

    Raises:
        OSError: the file cannot be read, or is not a regular file (reading a pipe might never end).
    """
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise FileExistsError(errno.EEXIST, "is not a file", path)
            return file.read()
    except FileNotFoundError:
        return None


def _open_at_once(path: str, flags: int) -> int:
    """Open a file without waiting, even if it is a pipe without a writer."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def read_some(path: str, most: int, flags: int = 0) -> bytes:
    """Return the first bytes of a file of any kind, without waiting.

    Args:
        path: the file's path.
        most: the maximum number of bytes.
        flags: further flags of open(2).

    Raises:
        OSError: it cannot be read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY | flags)
    content = b""
    try:
        while len(content) < most and (more := os.read(fd, most - len(content))):
            content += more
    except BlockingIOError:
        pass  # an empty pipe
    finally:
        os.close(fd)
    return content


def replace_file(
    path: str,
    content: bytes,
    *,
    mode: int = _MODE,
    staging: str | None = None,
    durable: bool = True,
) -> None:
    """Replace a file in one step, and keep the old file's owner, mode and attributes.

    A link is followed: its target is replaced, and it stays a link. A missing directory is created.

    Args:
        path: the file's path. The file may be missing, but must not be anything other than a file.
        content: the complete content.
        mode: the mode of a new file.
        staging: a directory for the temporary file, if that is on the same mount. Use it for
            a directory of which other programs read every file, whatever its name.
        durable: sync the file, so that it survives a power failure; otherwise it may then be empty.

    Raises:
        OSError: the file cannot be written, or another user could redirect the write; an existing
            file is unchanged.
    """
    os.makedirs(os.path.dirname(resolved(path)), mode=0o755, exist_ok=True)
    path = resolved(path)
    directory, name = os.path.split(path)
    before = None
    with contextlib.suppress(FileNotFoundError):
        before = os.stat(path)
        if not stat.S_ISREG(before.st_mode):
            raise FileExistsError(errno.EEXIST, "is not a file", path)
    where = _staging(directory, staging)
    sweep(path, staging=staging)
    fd, new = _temporary(where, name)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(content)
            if before is not None:
                os.fchown(fd, before.st_uid, before.st_gid)
                _copy_attributes(path, fd)
            os.fchmod(fd, mode if before is None else stat.S_IMODE(before.st_mode))
            file.flush()
            if durable:
                os.fsync(fd)
            os.rename(new, path)
    except BaseException:
        # A signal may come after the rename.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(new)
        raise
    if durable:
        sync_directory(directory)


def remove_file(path: str, *, durable: bool = True) -> None:
    """Remove a file.

    Args:
        path: the file's path; the target of a link is removed, and the link stays.
        durable: sync the directory, so that it stays removed after a power failure.

    Raises:
        OSError: it cannot be removed, or another user could redirect the call.
    """
    path = resolved(path)
    sweep(path)
    os.unlink(path)
    if durable:
        sync_directory(os.path.dirname(path))


def directories(path: str) -> list[str]:
    """Return the sorted paths of a directory's subdirectories; [] if it cannot be read."""
    try:
        with os.scandir(path) as entries:
            return sorted(each.path for each in entries if each.is_dir(follow_symlinks=False))
    except OSError:
        return []


def sweep(path: str, *, staging: str | None = None) -> None:
    """Remove the temporary files left by a process that was killed while it replaced a file.

    Args:
        path: the file's path.
        staging: as for :func:`replace_file`.
    """
    directory, name = os.path.split(resolved(path))
    is_temporary = re.compile(rf"[.]{re.escape(name)}[.].{{8}}{re.escape(_SUFFIX)}").fullmatch
    for place in {directory, _staging(directory, staging)}:
        with contextlib.suppress(OSError):  # the directory does not exist
            fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                temporary.sweep(fd, lambda each: is_temporary(each) is not None)
            finally:
                os.close(fd)


def _temporary(directory: str, name: str) -> tuple[int, str]:
    """Create and lock a temporary file; return its descriptor and path."""
    # Readers of configuration directories ignore other suffixes, and names that start with a dot.
    while True:
        fd, path = tempfile.mkstemp(prefix=f".{name}.", suffix=_SUFFIX, dir=directory)
        if temporary.lock(fd, path):
            return fd, path
        os.close(fd)


def _staging(directory: str, wanted: str | None) -> str:
    try:
        if wanted is not None and _mount_of(wanted) == _mount_of(directory):
            return wanted
    except OSError:
        pass
    return directory


def _mount_of(directory: str) -> str:
    """Return the mount that a directory is on: rename(2) does not cross bind mounts either."""
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as file:
            return next(line for line in file if line.startswith("mnt_id:"))
    finally:
        os.close(fd)


def resolved(path: str) -> str:
    """Resolve a path, following only links of trusted users.

    Args:
        path: the path; its last components need not exist.

    Raises:
        OSError: a link or file belongs to another user, in a directory where every user may create
            files.
    """
    here = "/" if path.startswith("/") else os.getcwd()
    parts = deque(path.split("/"))
    links = 0
    while parts:
        part = parts.popleft()
        if part in {"", "."}:
            continue
        if part == "..":
            here = os.path.dirname(here)
            continue
        above, here = here, os.path.join(here, part)
        try:
            seen = os.lstat(here)
        except FileNotFoundError:
            continue
        if stat.S_ISDIR(seen.st_mode):
            continue
        _refuse_strangers(above, here, seen)
        if stat.S_ISLNK(seen.st_mode):
            links += 1
            if links > _MOST_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            target = os.readlink(here)
            parts.extendleft(reversed(target.split("/")))
            here = "/" if target.startswith("/") else above
    return here


def _refuse_strangers(directory: str, path: str, seen: os.stat_result) -> None:
    above = os.stat(directory)
    shared = stat.S_ISVTX | stat.S_IWOTH
    if above.st_mode & shared != shared or seen.st_uid in {os.geteuid(), above.st_uid}:
        return
    raise PermissionError(
        errno.EACCES,
        f"{path} belongs to user {seen.st_uid}, in a directory where every user may create files",
        path,
    )


def _copy_attributes(path: str, fd: int) -> None:
    """Copy extended attributes, such as SELinux's label, if the file system has any."""
    with contextlib.suppress(OSError):
        for name in os.listxattr(path):
            with contextlib.suppress(OSError):
                os.setxattr(fd, name, os.getxattr(path, name))


def sync_directory(directory: str) -> None:
    """Sync a directory's entries to disk."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def flock_within(fd: int, kind: int, seconds: float) -> bool:
    """Lock a file (flock(2)); return whether the lock became free in time.

    Args:
        kind: LOCK_SH or LOCK_EX.
        seconds: how long to try.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_LOCK_POLL)
        else:
            return True
