"""Read the node, and record what was read.

An inventory is valid as long as all its sources are unchanged. So everything is read through a
:class:`Fingerprint`, which records each observation; :func:`first_change` repeats the observations
and compares. There is no separate list of dependencies, so none can be missing.

Observations, by kind (each is about one path of the host):

==========  ====================================================================
``stat``    of what is there, without following links: device, inode, mode,
            size, modification time, and for a file with one name the time of its last
            change, which cannot be set back; or that nothing is there. One name
            more or less is not a change, because the layers of containers link
            the driver's files (shim.work.driver_files)
``link``    where a symbolic link leads
``number``  of the device node that is there, as [major, minor]; or that none is
``text``    the content of a small file of procfs or sysfs
``names``   the names in a directory of procfs or sysfs (their times mean nothing)
``fields``  some ``Name: value`` lines of a file of procfs, because others of its
            lines change with every use of the device
==========  ====================================================================

The driver root may be a container's root file system, in which absolute links are relative to that
root. :meth:`Fingerprint.resolve` follows links like a process whose "/" is the driver root. (The
operator controls the driver root; for images see :mod:`hooks.image.rootfs`.)
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

# The relevant procfs and sysfs files are far smaller; mig-minors of a large node is the largest.
_MOST_BYTES: Final = 1 << 20
# Most are smaller; a buffer for the largest would take longer than the reading.
_FEW_BYTES: Final = 1 << 14
# The kernel's own limit for one path (path_resolution(7)).
_MOST_LINKS: Final = 40


class Fingerprint:
    """Reads the node, and records each read as an observation.

    Args:
        root: the driver root, an absolute path; links in it are not resolved.
        observations: where to record; None for a new list.

    Attributes:
        observations: the observations, by kind and path; the values are JSON values.
    """

    def __init__(self, root: str, observations: dict[tuple[str, str], Any] | None = None) -> None:
        self.root = root
        self.observations: dict[tuple[str, str], Any] = {} if observations is None else observations
        self._resolved: dict[str, str | None] = {}
        self._prefix = root.rstrip("/")

    def at(self, root: str) -> Fingerprint:
        """Return a fingerprint with another root that records into the same list."""
        return self if root == self.root else Fingerprint(root, self.observations)

    def text(self, path: str) -> str | None:
        """Return the content of a small host file; None if it does not exist."""
        seen: str | None = self.observe("text", path)
        return seen

    def names(self, path: str) -> tuple[str, ...]:
        """Return the sorted names in a host directory; empty if it does not exist."""
        return tuple(self.observe("names", path) or ())

    def fields(self, path: str, wanted: Iterable[str]) -> dict[str, str]:
        """Return some of the ``Name: value`` lines of a file; "" where the line is missing."""
        seen: dict[str, str] = read_fields(path, wanted)
        self.observations["fields", path] = seen
        return seen

    def resolve(self, path: str) -> str | None:
        """Return the real path of a path in the driver root.

        Args:
            path: an absolute path within the driver root.

        Returns:
            The host path, below the driver root and without links (except in the driver root's own
            path); None if it leads nowhere.
        """
        inside = self._walk(path)
        return None if inside is None else self._prefix + inside

    def file(self, path: str) -> str | None:
        """Like :meth:`resolve`, but only for a regular file.

        This observes its identity, to notice a replaced file.
        """
        return self._of_type(path, stat.S_IFREG)

    def directory(self, path: str) -> str | None:
        """Like :meth:`resolve`, but only for a directory.

        This observes its identity, to notice added or removed files.
        """
        return self._of_type(path, stat.S_IFDIR)

    def files(self) -> dict[str, Any]:
        """Return the observations of files, by path."""
        return {path: seen for (kind, path), seen in self.observations.items() if kind == "stat"}

    def _of_type(self, path: str, wanted: int) -> str | None:
        host = self.resolve(path)
        if host is None:
            return None
        seen = self.observe("stat", host)
        return host if seen is not None and stat.S_IFMT(seen[2]) == wanted else None

    def observe(self, kind: str, path: str) -> Any:
        """Return an observation of a host path as JSON; its kind is from the table above.

        Args:
            kind: any kind except "fields".
            path: a host path; links on the way are followed as on the host.
        """
        key = (kind, path)
        if key not in self.observations:
            self.observations[key] = _LOOKS[kind](path)
        return self.observations[key]

    def _walk(self, path: str) -> str | None:
        """Return the path within the root after following every link."""
        if path in self._resolved:
            return self._resolved[path]
        followed = 0
        here = ""
        ahead = _components(path)
        while ahead:
            name = ahead.pop()
            if name == "..":
                here = here.rpartition("/")[0]
                continue
            there = f"{here}/{name}"
            target = self._link(there)
            if target is None:
                return self._remember(path, None)
            if not target:
                here = there
                continue
            followed += 1
            if followed > _MOST_LINKS:
                return self._remember(path, None)
            if target.startswith("/"):
                here = ""
            ahead += _components(target)
        return self._remember(path, here or "/")

    def _link(self, inside: str) -> str | None:
        """Return a link's target; "" for something other than a link; None if nothing is there."""
        known = self._resolved.get(inside)
        if known == inside:
            return ""
        host = self._prefix + inside
        try:
            is_link = stat.S_ISLNK(os.lstat(host).st_mode)
        except OSError:
            self.observe("stat", host)
            return None
        if is_link:
            target: str | None = self.observe("link", host)
            return target
        self._resolved[inside] = inside
        return ""

    def _remember(self, path: str, inside: str | None) -> str | None:
        self._resolved[path] = inside
        return inside


def first_change(observations: Iterable[tuple[str, str, Any]]) -> str | None:
    """Return the path of the first observation that has changed; None if none has.

    Args:
        observations: kind, path and value, as read from JSON; anything else counts as changed.
    """
    for kind, path, seen in observations:
        if kind == "fields":
            if not isinstance(seen, dict) or read_fields(path, seen) != seen:
                return path
        elif kind not in _LOOKS or not _is_same(kind, _LOOKS[kind](path), seen):
            return path
    return None


def _is_same(kind: str, now: Any, seen: Any) -> bool:
    if now == seen:
        return True
    if kind != "stat" or not now or not isinstance(seen, list) or len(seen) != len(now):
        return False
    # The change time of a file that has or had several names is meaningless.
    return bool(now[:-1] == seen[:-1]) and 0 in (now[-1], seen[-1]) and stat.S_ISREG(now[2])


def read_text(path: str) -> str | None:
    """Return the content of a small file; None if it cannot be read.

    Invalid UTF-8 is replaced; the files that we read have none.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        content = os.read(fd, _FEW_BYTES)
        more = content
        while more and len(content) < _MOST_BYTES:
            more = os.read(fd, _FEW_BYTES)
            content += more
    except OSError:
        return None
    finally:
        os.close(fd)
    return content.decode(errors="replace")


def read_line(path: str) -> str:
    """Return a small file's content without surrounding white space; "" if unreadable."""
    return (read_text(path) or "").strip()


def read_names(path: str) -> list[str] | None:
    """Return the sorted names in a directory; None if it cannot be read."""
    try:
        return sorted(os.listdir(path))
    except OSError:
        return None


def read_fields(path: str, wanted: Iterable[str]) -> dict[str, str]:
    """Return some of a file's ``Name: value`` lines; "" where the line is missing."""
    lines = (line.partition(":") for line in (read_text(path) or "").splitlines())
    values: Mapping[str, str] = {name.strip(): value.strip() for name, _, value in lines}
    return {name: values.get(name, "") for name in wanted}


def is_observed(found: os.stat_result, seen: Any) -> bool:
    """Whether an open file is that of an observation of kind ``stat``."""
    return _is_same("stat", _observed(found), seen)


def _look_stat(path: str) -> list[int] | None:
    try:
        return _observed(os.lstat(path))
    except OSError:
        return None


def _observed(seen: os.stat_result) -> list[int]:
    # Each new name also sets a file's change time. So a store that links equal files, or a backup,
    # would make everything stale.
    alone = stat.S_ISREG(seen.st_mode) and seen.st_nlink == 1
    changed = seen.st_ctime_ns if alone else 0
    return [seen.st_dev, seen.st_ino, seen.st_mode, seen.st_size, seen.st_mtime_ns, changed]


def _look_link(path: str) -> str | None:
    try:
        return os.readlink(path)
    except OSError:
        return None


def _look_number(path: str) -> list[int] | None:
    try:
        seen = os.lstat(path)
    except OSError:
        return None
    if not stat.S_ISCHR(seen.st_mode) and not stat.S_ISBLK(seen.st_mode):
        return None
    return [os.major(seen.st_rdev), os.minor(seen.st_rdev)]


_LOOKS: Final[dict[str, Callable[[str], Any]]] = {
    "stat": _look_stat,
    "link": _look_link,
    "text": read_text,
    "names": read_names,
    "number": _look_number,
}


def _components(path: str) -> list[str]:
    """Return the names in a path, last first, so that the next one can be popped."""
    return [name for name in reversed(path.split("/")) if name not in {"", "."}]
