"""Open an operator's spec file safely.

A spec file is applied as root, and may mount any file of the host into a container. So a file is
used only if root alone can write it.

Rules
- The directory and the file belong to root, or to our own user, and others may not write them. A
  directory that others may write must be sticky, so that they can only add their own files. The
  operator may grant the group write access.
- A link in a directory belongs to root or to us as well. Otherwise its owner could turn any of
  root's files into a spec, for example one in an image.
- The file is a regular file of at most 4 MiB. A file whose opening blocks or has effects is never
  opened for reading. The path may be a link; the rule applies to its target.
- A file whose text starts with a brace is JSON, whatever its name. Most YAML files that programs
  write are JSON, and PyYAML need not be loaded for them.

A spec that was read from YAML is cached as JSON in
``STATE/cdi/DEVICE-INODE-SIZE-MTIME-CTIME.json``, because loading PyYAML takes longer than planning
a container. Only root can write a spec file, and ctime cannot be set back, so a file with the same
identity has the same content.

- A file that was changed in the last few seconds is not cached, because it may change again within
  the resolution of the clock.
- A cached file is opened and checked like any other; if it is invalid, it is ignored.
- Cache failures are not errors: the file is read again.
- Only a handful of files are cached. Anything else in the directory is removed, oldest first.
"""

from __future__ import annotations

import json
import os
import stat
import time
from typing import Any, Final, NamedTuple

from hooks.cdi import schema
from hooks.cdi.errors import CdiFileUnusable, CdiSpecInvalid
from hooks.cdi.spec import SpecFile
from hooks.cdi.tree import BadTree, of_json, of_yaml

SUFFIXES: Final = (".json", ".yaml")
LARGEST: Final = 4 << 20
MOST_NAMES: Final = 4096


class Content(NamedTuple):
    """The content of a file."""

    data: bytes
    # numbers that change with the file, and with its content
    identity: tuple[int, ...] = ()
    changed: float = 0.0  # its last change, in seconds since the epoch


def open_directory(path: str) -> int | None:
    """Open a directory of spec files; return a descriptor to close, or None if it is missing.

    Raises:
        CdiFileUnusable: it cannot be read, or anyone may put files there.
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
    """Return the names of the spec files in an open directory, in order.

    Raises:
        CdiFileUnusable: it cannot be read.
    """
    try:
        names = sorted(os.listdir(fd))
    except FileNotFoundError:
        return []  # removed meanwhile
    except OSError as error:
        raise CdiFileUnusable(f"the CDI specs in {path}", found=str(error.strerror)) from error
    return [name for name in names if name.endswith(SUFFIXES)][:MOST_NAMES]


def read(path: str, *, dir_fd: int | None = None, name: str | None = None) -> Content | None:
    """Return the content of a spec file; None if it no longer exists, or is a directory.

    Args:
        path: the path on the host; if the next two are passed, only for messages.

    Raises:
        CdiFileUnusable: it cannot be read, is not a regular file, is too long, or a user other than
            root may have written it.
    """
    asked = f"the CDI spec {path}"
    content = bytearray()
    try:
        # Opening a device may have effects, and opening a FIFO may block. O_PATH avoids both.
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
    """Whether a file's text starts like a JSON object."""
    return data.lstrip()[:1] == b"{"


def tree_of(data: bytes, path: str) -> Any:
    """Parse a spec file to a tree of dicts, lists, strings, numbers, booleans and None.

    Raises:
        CdiSpecInvalid: it is not valid JSON or YAML.
    """
    try:
        text = data.decode()
        return of_json(text) if is_json(data) else of_yaml(text)
    except (UnicodeDecodeError, BadTree) as error:
        raise CdiSpecInvalid(
            f"the CDI spec {path}", found=str(error), do="write it again with the vendor's program"
        ) from error


def _check_link(asked: str, seen: os.stat_result) -> None:
    # The owner of the name may have replaced the file since the link was followed.
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


KEPT: Final = "cdi"
"""The cache's directory, below the state directory."""
_SETTLED: Final = 2.0
_MOST: Final = 32


def load_kept(state: str, content: Content, path: str) -> SpecFile | None:
    """Return the cached spec of a file; None if there is none, or it is unusable."""
    try:
        kept = read(_place(state, content))
        return None if kept is None else schema.parse(json.loads(kept.data), path)
    except (CdiFileUnusable, CdiSpecInvalid, ValueError, RecursionError):
        return None


def store_kept(state: str, content: Content, spec: SpecFile) -> None:
    """Cache a file's spec.

    Args:
        state: the state directory, which is created if missing.
    """
    if not 0 <= content.changed <= time.time() - _SETTLED:
        return
    directory = os.path.join(state, KEPT)
    aside = f"{directory}/.{os.getpid()}-{os.urandom(6).hex()}"
    try:
        os.makedirs(directory, mode=0o700, exist_ok=True)
        fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            json.dump(schema.to_tree(spec), file, separators=(",", ":"))
        os.rename(aside, _place(state, content))
        _prune(directory)
    except OSError:
        return


def _place(state: str, content: Content) -> str:
    return os.path.join(state, KEPT, "-".join(map(str, content.identity)) + ".json")


def _prune(directory: str) -> None:
    with os.scandir(directory) as entries:
        aged = sorted((entry.stat(follow_symlinks=False).st_mtime, entry.path) for entry in entries)
    for _, path in aged[:-_MOST]:
        os.unlink(path)
