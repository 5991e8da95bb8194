"""A spec file of the operator's, opened with care.

What a spec file says is done as root: it may mount any file of the host into a container. So a
file counts only if nobody but root can have written it.

Rules
- The directory and the file belong to root, or to the user that we are, and others may not write
  them; a directory that others may write counts if it is sticky, since they can then only add
  files of their own. Group's writing is the operator's choice.
- A link in a directory belongs to root or to us as well: another's could make a spec of any file of
  root's, one in an image among them.
- The file is a regular one, of at most 4 MiB; nothing that blocks or acts is ever opened for
  reading. It may be a link: then that is said of what it leads to.
- A file whose text begins with a brace is JSON, whatever its name: most YAML files that programs
  write are, and PyYAML need not be loaded for them.
"""

from __future__ import annotations

import os
import stat
from typing import Any, Final, NamedTuple

from hooks.cdi.errors import CdiFileUnusable, CdiSpecInvalid
from hooks.cdi.tree import BadTree, of_json, of_yaml

__all__ = ["SUFFIXES", "Content", "is_json", "names_in", "open_directory", "read", "tree_of"]

SUFFIXES: Final = (".json", ".yaml")
LARGEST: Final = 4 << 20
MOST_NAMES: Final = 4096


class Content(NamedTuple):
    """What a file holds.

    Attributes:
        data: all of it.
        identity: numbers that differ for another file, and for another content of this one.
        changed: when it was changed last, in seconds of the clock.
    """

    data: bytes
    identity: tuple[int, ...] = ()
    changed: float = 0.0


def open_directory(path: str) -> int | None:
    """Opens a directory of spec files.

    Args:
        path: of the host.

    Returns:
        A descriptor that the caller closes; None if there is no such directory.

    Raises:
        CdiFileUnusable: it cannot be read, or anybody may put files there.
    """
    asked = f"the CDI specs in {path}"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CdiFileUnusable(asked, found=str(error.strerror)) from error
    try:
        _check_owner(asked, os.fstat(fd))
    except CdiFileUnusable:
        os.close(fd)
        raise
    return fd


def names_in(fd: int, path: str) -> list[str]:
    """The names of the spec files in an open directory, in order.

    Args:
        fd: the directory.
        path: of it, for messages.

    Raises:
        CdiFileUnusable: it cannot be read.
    """
    try:
        names = sorted(os.listdir(fd))
    except FileNotFoundError:
        return []  # it was removed meanwhile
    except OSError as error:
        raise CdiFileUnusable(f"the CDI specs in {path}", found=str(error.strerror)) from error
    return [name for name in names if name.endswith(SUFFIXES)][:MOST_NAMES]


def read(path: str, *, dir_fd: int | None = None, name: str | None = None) -> Content | None:
    """The content of a spec file.

    Args:
        path: of the host; for messages, if the next two are given.
        dir_fd: an open directory.
        name: the file's name in it.

    Returns:
        The content; None if the file has gone, or is a directory.

    Raises:
        CdiFileUnusable: it cannot be read, is no regular file, is too long, or somebody else
            than root may have written it.
    """
    asked = f"the CDI spec {path}"
    content = bytearray()
    try:
        # Opening a device may act, and opening a FIFO may block: this does neither.
        place = os.open(path if name is None else name, os.O_PATH | os.O_CLOEXEC, dir_fd=dir_fd)
        try:
            seen = os.fstat(place)
            if stat.S_ISDIR(seen.st_mode):
                return None
            if not stat.S_ISREG(seen.st_mode):
                raise CdiFileUnusable(asked, found="it is no regular file")
            _check_owner(asked, seen)
            if name is not None:
                _check_link(asked, os.lstat(name, dir_fd=dir_fd))
            fd = os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(place)
        try:
            while len(content) <= LARGEST and (part := os.read(fd, LARGEST + 1 - len(content))):
                content += part
        finally:
            os.close(fd)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CdiFileUnusable(asked, found=str(error.strerror)) from error
    if len(content) > LARGEST:
        raise CdiFileUnusable(asked, found=f"it is longer than {LARGEST >> 20} MiB")
    identity = (seen.st_dev, seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns)
    return Content(bytes(content), identity, seen.st_ctime)


def is_json(data: bytes) -> bool:
    """Whether a file's text begins as an object of JSON does."""
    return data.lstrip()[:1] == b"{"


def tree_of(data: bytes, path: str) -> Any:
    """The tree that a spec file holds.

    Args:
        data: the file's content.
        path: of the file, for messages.

    Returns:
        Dicts, lists, texts, numbers, truth values and None.

    Raises:
        CdiSpecInvalid: it is neither JSON nor YAML.
    """
    try:
        text = data.decode()
        return of_json(text) if is_json(data) else of_yaml(text)
    except (UnicodeDecodeError, BadTree) as error:
        raise CdiSpecInvalid(
            f"the CDI spec {path}", found=str(error), do="have the vendor's program write it anew"
        ) from error


def _check_link(asked: str, seen: os.stat_result) -> None:
    # Whatever it is now: who owns the name may have changed it since it was followed.
    if seen.st_uid not in {0, os.geteuid()}:
        raise CdiFileUnusable(
            asked, found=f"it is a link of user {seen.st_uid}", do="make it root's: chown -h root"
        )


def _check_owner(asked: str, seen: os.stat_result) -> None:
    if seen.st_uid not in {0, os.geteuid()}:
        raise CdiFileUnusable(
            asked, found=f"user {seen.st_uid} owns it", do="make it root's: chown root"
        )
    sticky_directory = stat.S_ISDIR(seen.st_mode) and seen.st_mode & stat.S_ISVTX
    if seen.st_mode & stat.S_IWOTH and not sticky_directory:
        raise CdiFileUnusable(
            asked, found="everybody may write it", do="take that from others: chmod o-w"
        )
