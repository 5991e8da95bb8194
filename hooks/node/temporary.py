"""Temporary files with which files are replaced: those that a killed process left are removed.

Rules
- A writer holds a lock on its temporary file from its creation until it is renamed. The kernel
  releases the lock when the writer ends, however it ends. So a file that can be locked was left
  behind, whatever its age and whatever pid namespace its writer was in.
- Between its creation and its lock a file looks as if it were left. So a writer that finds it
  locked or removed creates another one.
- Where a file system has no locks, nothing is removed.

Source: flock(2).
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable


def lock(fd: int, path: str, directory: int | None = None) -> bool:
    """Lock a temporary file that was just created; the lock ends when it is closed.

    Args:
        path: its path; relative to ``directory``, if that is given.

    Returns:
        Whether the file is still there; if not, create another one.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False  # it is being removed
    except OSError:
        return True
    try:
        return os.path.samestat(
            os.fstat(fd), os.stat(path, dir_fd=directory, follow_symlinks=False)
        )
    except FileNotFoundError:
        return False


def sweep(directory: int, is_temporary: Callable[[str], bool]) -> None:
    """Remove the temporary files whose writers have ended.

    Args:
        directory: a descriptor of the directory.
        is_temporary: whether a name is that of such a file.
    """
    for name in filter(is_temporary, os.listdir(directory)):
        try:
            _remove(directory, name)
        except OSError:
            continue  # its writer is at work, or has just renamed it


def _remove(directory: int, name: str) -> None:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(name, flags, dir_fd=directory)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(name, dir_fd=directory)
    finally:
        os.close(fd)
