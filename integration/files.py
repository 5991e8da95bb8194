"""Replacing files of the node, so that whoever reads one sees all of the old or all of the new.

Rules
- A link is written through, as an editor would. But root follows no link, and replaces no file, of
  another user in a directory where everybody may make one (/tmp): that is theirs to lead astray.
  The kernel can see to it itself, but not for who looks where a link leads before it opens a file.

Source: rename(2); fsync(2); proc_sys_fs(5), protected_symlinks and protected_regular.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import stat
import tempfile
from collections import deque
from typing import Final

_MODE: Final = 0o644
_SUFFIX: Final = ".new"
_MOST_LINKS: Final = 40  # as the kernel


def read_file(path: str) -> bytes | None:
    """What a file holds.

    Args:
        path: of a file; links are followed.

    Returns:
        Its content; None if there is none of that name.

    Raises:
        OSError: there is something that cannot be read, or is no file: a pipe has no end.
    """
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise FileExistsError(errno.EEXIST, "is no file", path)
            return file.read()
    except FileNotFoundError:
        return None


def _open_at_once(path: str, flags: int) -> int:
    """Open what may be a pipe that nobody writes to."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def read_some(path: str, most: int) -> bytes:
    """The beginning of a file, also of /dev/null, for which nobody ever has to be waited.

    Raises:
        OSError: it cannot be read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    content = b""
    try:
        while len(content) < most and (more := os.read(fd, most - len(content))):
            content += more
    except BlockingIOError:
        pass  # a pipe, to which nobody has written yet
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
    """Put a file in place in one step, with owner, mode and attributes of the one it replaces.

    A link is followed, as an editor would: what it leads to is replaced, and it stays a link. Its
    directory is made if it is missing.

    Args:
        path: where; what is there must be a file, or nothing.
        content: all of it.
        mode: of a file that has not been there before.
        staging: a directory where it is written first, if that is on the same file system; for
            a directory of which others read every file, whatever its name.
        durable: whether it is to be there after the machine has stopped without a word; if not, it
            may be empty then.

    Raises:
        OSError: it cannot be written, or is where another user can lead us; what was there is
            untouched.
    """
    os.makedirs(os.path.dirname(resolved(path)), mode=0o755, exist_ok=True)
    path = resolved(path)
    directory, name = os.path.split(path)
    before = None
    with contextlib.suppress(FileNotFoundError):
        before = os.stat(path)
        if not stat.S_ISREG(before.st_mode):
            raise FileExistsError(errno.EEXIST, "is no file", path)
    # Readers of configuration directories go by the end of the name, and by the dot before it.
    where = _staging(directory, staging)
    fd, aside = tempfile.mkstemp(prefix=f".{name}.", suffix=_SUFFIX, dir=where)
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
        os.rename(aside, path)
    except BaseException:
        # A signal may come when it is in its place already.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(aside)
        raise
    if durable:
        sync_directory(directory)


def remove_file(path: str, *, durable: bool = True) -> None:
    """Remove a file, for good.

    Args:
        path: of it; what a link leads to is removed, and the link stays.
        durable: whether it is to be gone after the machine has stopped without a word.

    Raises:
        OSError: it cannot be removed, or is where another user can lead us.
    """
    path = resolved(path)
    os.unlink(path)
    if durable:
        sync_directory(os.path.dirname(path))


def directories(path: str) -> list[str]:
    """The paths of the directories in one, in order; none if it cannot be read."""
    try:
        with os.scandir(path) as entries:
            return sorted(each.path for each in entries if each.is_dir(follow_symlinks=False))
    except OSError:
        return []


def sweep(path: str, *, staging: str | None = None) -> None:
    """Remove what one that was killed while it replaced a file has left of it.

    Args:
        path: of the file, which nobody else replaces just now.
        staging: where it was written first.
    """
    directory, name = os.path.split(resolved(path))
    for place in {directory, _staging(directory, staging)}:
        for left in glob.glob(f"{glob.escape(f'{place}/.{name}.')}????????{_SUFFIX}"):
            with contextlib.suppress(OSError):
                os.unlink(left)


def _staging(directory: str, wanted: str | None) -> str:
    try:
        if wanted is not None and os.stat(wanted).st_dev == os.stat(directory).st_dev:
            return wanted
    except OSError:
        pass
    return directory


def resolved(path: str) -> str:
    """The place that a path leads to, by nobody's links but those of who may be trusted.

    Args:
        path: whose last parts need not be there.

    Raises:
        OSError: a link, or what is there, is another user's where everybody may make one.
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
    everybodys = stat.S_ISVTX | stat.S_IWOTH
    if above.st_mode & everybodys != everybodys or seen.st_uid in {os.geteuid(), above.st_uid}:
        return
    raise PermissionError(
        errno.EACCES, f"{path} is of user {seen.st_uid}, where everybody may make files", path
    )


def _copy_attributes(path: str, fd: int) -> None:
    """Above all the label of SELinux. Not every file system has them."""
    with contextlib.suppress(OSError):
        for name in os.listxattr(path):
            with contextlib.suppress(OSError):
                os.setxattr(fd, name, os.getxattr(path, name))


def sync_directory(directory: str) -> None:
    """Have the names in a directory on the disk before anything else is done."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
