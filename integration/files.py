"""Replacing files of the node, so that whoever reads one sees all of the old or all of the new.

Source: rename(2); fsync(2).
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from typing import Final

__all__ = ["read_file", "replace_file"]

_MODE: Final = 0o644


def read_file(path: str) -> bytes | None:
    """What a file holds.

    Args:
        path: of a file; links are followed.

    Returns:
        Its content; None if there is none of that name.

    Raises:
        OSError: there is something that cannot be read.
    """
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None


def replace_file(path: str, content: bytes, *, mode: int = _MODE) -> None:
    """Put a file in place in one step, with the owner and the mode of the one that it replaces.

    A link is followed, as an editor would: what it leads to is replaced, and it stays a link. Its
    directory is made if it is missing.

    Args:
        path: where; what is there must be a file, or nothing.
        content: all of it.
        mode: of a file that has not been there before.

    Raises:
        OSError: it cannot be written; what was there is untouched.
    """
    path = os.path.realpath(path)
    directory, name = os.path.split(path)
    os.makedirs(directory, mode=0o755, exist_ok=True)
    before = None
    with contextlib.suppress(FileNotFoundError):
        before = os.stat(path)
        if not stat.S_ISREG(before.st_mode):
            raise FileExistsError(errno.EEXIST, "is no file", path)
    # Readers of configuration directories go by the end of the name, and by the dot before it.
    fd, aside = tempfile.mkstemp(prefix=f".{name}.", suffix=".new", dir=directory)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(content)
            file.flush()
            if before is not None:
                os.fchown(fd, before.st_uid, before.st_gid)
            os.fchmod(fd, mode if before is None else stat.S_IMODE(before.st_mode))
            os.fsync(fd)
        os.rename(aside, path)
    except BaseException:
        os.unlink(aside)
        raise
    _sync(directory)


def _sync(directory: str) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
