"""Find which possible place has this node's driver.

Rules
- If ``driver-root`` is configured, only that is searched: first as the root file system of a
  driver, in any of the layouts of :mod:`hooks.node.driver_layouts`, then as a directory that
  contains the driver, whose links are relative to the host's root.
- Otherwise these are searched, in this order:

  1. the host's own root, in the layout of distributions and NVIDIA's installer: the administrator
     has installed it there on purpose, and it does not disappear with a pod;
  2. /run/nvidia/driver, the root of NVIDIA's driver container;
  3. the other layouts of the host's root, in the order of their table;
  4. wherever the dynamic loader of the host, or of the driver container, finds libcuda.

- The first place with files of the loaded kernel module's version is used, because files of another
  version do not work. So with equal versions "/" wins over a driver container, as with NVIDIA's
  operator.
- A place found by searching, and every directory above it, must be writable only by root, except
  for the host's own system directories: root loads NVML from there, and a home directory with that
  name may belong to anyone. A configured place needs no such check.
- If no module reports its version, the first place with any driver is used, and its newest version.
- The search stops at the chosen place. All its reads are observed, so a driver in a better place,
  or a module of another version, makes the inventory stale.

This module also has the driver's version, its syntax, and the CUDA that each branch supports.

Source: the CUDA toolkit's release notes, table of driver versions.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from typing import Final

from api.values import dataclass, replace
from hooks.config import Config
from hooks.errors import DriverMismatch, DriverNotFound
from hooks.image.ldcache import parse
from hooks.image.rootfs_errors import MalformedCache
from hooks.node.driver_layouts import DISTRIBUTION, LAYOUTS, LOADER, DriverLayout, prefix
from hooks.node.fingerprint import Fingerprint, read_names

_FEWEST_PARTS: Final = 2
_MOST_PARTS: Final = 3


def is_version(text: str) -> bool:
    """Whether a word is a driver version: two or three numbers, the first with three digits.

    The first has had three digits since 2011, so "1.8.1" in a module's banner is not a version.
    """
    parts = text.split(".")
    return (
        _FEWEST_PARTS <= len(parts) <= _MOST_PARTS
        and all(part.isascii() and part.isdecimal() for part in parts)
        and len(parts[0]) >= _MOST_PARTS
    )


def numbers(version: str) -> tuple[int, ...]:
    """Return the parts of a version as numbers, for comparisons."""
    return tuple(int(part) for part in version.split("."))


def module_files(config: Config) -> tuple[str, str]:
    """Return the files that contain the loaded module's version, best first."""
    return f"{config.proc}/driver/nvidia/version", f"{config.sys}/module/nvidia/version"


def module_version(fingerprint: Fingerprint, config: Config) -> str | None:
    """Return the loaded kernel module's version; None if none is loaded."""
    banner, alone = module_files(config)
    for word in (fingerprint.text(banner) or "").partition("\n")[0].split():
        if is_version(word):
            return word
    text = (fingerprint.text(alone) or "").strip()
    return text if is_version(text) else None


# As of December 2025. NVML reports the version itself if it answers.
_CUDA_OF_BRANCH: Final = (
    (590, "13.1"), (580, "13.0"), (575, "12.9"), (570, "12.8"), (565, "12.7"), (560, "12.6"),
    (555, "12.5"), (550, "12.4"), (545, "12.3"), (535, "12.2"), (530, "12.1"), (525, "12.0"),
    (520, "11.8"), (515, "11.7"), (510, "11.6"), (495, "11.5"), (470, "11.4"), (465, "11.3"),
    (460, "11.2"), (455, "11.1"), (450, "11.0"), (440, "10.2"), (418, "10.1"), (410, "10.0"),
    (396, "9.2"), (390, "9.1"), (384, "9.0"),
)  # fmt: skip


def cuda_of_branch(driver: str) -> str:
    """Return the newest CUDA that a driver supports, by its branch.

    Args:
        driver: its version ("535.261.03").

    Returns:
        The version ("12.2"). For a branch newer than the table (:func:`is_new_branch`), that of the
        newest known branch, which it supports at least; "" for a driver older than the table.
    """
    branch = _branch(driver)
    return next((cuda for first, cuda in _CUDA_OF_BRANCH if branch >= first), "")


def is_new_branch(driver: str) -> bool:
    """Whether a driver's branch is newer than those whose CUDA is known.

    Args:
        driver: its version ("610.43.02").
    """
    return _branch(driver) > _CUDA_OF_BRANCH[0][0]


def _branch(driver: str) -> int:
    branch = driver.partition(".")[0]
    return int(branch) if branch.isascii() and branch.isdecimal() else 0


DRIVER_CONTAINER: Final = "/run/nvidia/driver"

# The libraries whose names contain the driver's version; a directory without them has no driver.
_ANCHORS: Final = ("libcuda.so.", "libnvidia-ml.so.")
_SONAMES: Final = frozenset({b"libcuda.so.1", b"libnvidia-ml.so.1"})

_CACHE: Final = "/etc/ld.so.cache"
_CONF: Final = "/etc/ld.so.conf"
_DROP_INS: Final = "/etc/ld.so.conf.d"
_LARGEST_CACHE: Final = 16 << 20
_LARGEST_CONF: Final = 64 << 10
_FIRST_OF_USERS: Final = 1000


@dataclass(frozen=True, slots=True)
class Root:
    """The chosen place."""

    reader: Fingerprint  # a fingerprint whose root is that of the driver's files
    layout: DriverLayout
    version: str
    # the existing library directories: each one's host path, and the names in it
    directories: tuple[tuple[str, tuple[str, ...]], ...]
    why: str


@dataclass(frozen=True, slots=True)
class Place:
    """A searched place."""

    reader: Fingerprint
    layout: DriverLayout
    versions: tuple[str, ...]  # the versions of its drivers, oldest first
    # the library directories, as in Root
    directories: tuple[tuple[str, tuple[str, ...]], ...]
    untrusted: tuple[str, ...]  # directories that do not count: others than root may write there


def choose(fingerprint: Fingerprint, config: Config, module: str | None) -> Root:
    """Find the driver's root.

    Args:
        module: the version of the loaded kernel module; None if none is loaded.

    Raises:
        DriverNotFound: there is no libcuda and no libnvidia-ml of any version.
        DriverMismatch: they exist, but do not match the loaded module's version.
    """
    others: dict[str, None] = {}
    mismatched = False
    for place in look(fingerprint, config):
        for path in place.untrusted:
            others[f"{path}, which is not root's alone"] = None
        versions = place.versions
        if module in versions or (module is None and versions):
            version = module or versions[-1]
            why = _why(config, module, others)
            return Root(place.reader, place.layout, version, place.directories, why)
        for found in versions:
            others[f"{found} below {place.reader.root} ({place.layout.name})"] = None
            mismatched = True
    if mismatched:
        raise DriverMismatch(
            f"the libraries of driver {module}, whose kernel module is loaded",
            found=f"versions {', '.join(others)}",
            do="restart the node or reload the kernel modules after a driver update",
        )
    where = config.driver_root or f"{config.host_root} or {_in(config, DRIVER_CONTAINER)}"
    raise DriverNotFound(
        "the NVIDIA driver's libraries",
        found="; not looked into: ".join(
            (f"no libcuda.so.* or libnvidia-ml.so.* below {where}", *others)
        ),
        do="install the driver, or set driver-root in config.toml",
    )


def look(fingerprint: Fingerprint, config: Config) -> Iterator[Place]:
    """Search the possible places of a driver, one by one.

    Yields:
        Each place that exists, in the order described above.
    """
    for root, layout in _candidates(config):
        reader = fingerprint.at(root)
        if layout is LOADER:
            layout = replace(layout, libraries=_loader_directories(reader))  # noqa: PLW2901
        if layout.homes and not any(reader.directory(home) for home in layout.homes):
            continue
        directories = _library_directories(reader, layout)
        untrusted: list[str] = []
        if config.driver_root is None and (root, layout) != (config.host_root, DISTRIBUTION):
            untrusted = [path for path, _ in directories if not _is_roots(path, config.host_root)]
            directories = tuple(each for each in directories if each[0] not in untrusted)
        versions = tuple(sorted(_versions(directories), key=numbers))
        yield Place(reader, layout, versions, directories, tuple(untrusted))


def _candidates(config: Config) -> Iterator[tuple[str, DriverLayout]]:
    host, configured = config.host_root, config.driver_root
    if configured is not None:
        yield from ((configured, layout) for layout in LAYOUTS)
        yield configured, prefix("")
        inside = configured.removeprefix(host.rstrip("/"))
        if configured != host and inside.startswith("/"):
            yield host, prefix(inside)
        yield configured, LOADER
        return
    container = _in(config, DRIVER_CONTAINER)
    yield host, DISTRIBUTION
    yield container, DISTRIBUTION
    yield from ((host, layout) for layout in LAYOUTS if layout is not DISTRIBUTION)
    yield host, LOADER
    yield container, LOADER


def _in(config: Config, path: str) -> str:
    return config.host_root.rstrip("/") + path


def _why(config: Config, module: str | None, others: Iterable[str]) -> str:
    how = "it is configured" if config.driver_root is not None else "found by looking"
    fits = f"of the loaded kernel module's version, {module}" if module else "the first found"
    rest = "".join(f"; not {other}" for other in others)
    return f"{how}: {fits}{rest}"


def _library_directories(
    reader: Fingerprint, layout: DriverLayout
) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return each directory that exists, once."""
    found: dict[str, tuple[str, ...]] = {}
    for path in layout.libraries:
        for inside in (path, f"{path}/vdpau"):
            host = reader.directory(inside)
            if host is not None and host not in found:
                found[host] = tuple(read_names(host) or ())
    return tuple(found.items())


def _is_roots(path: str, host_root: str) -> bool:
    """Whether only root (or we) can change a host directory."""
    sticky = 0
    while path not in {host_root.rstrip("/"), ""}:
        try:
            seen = os.lstat(path)
        except OSError:
            return False
        # System groups like Debian's "staff", which may own /usr/local, are trusted like root.
        untrusted = stat.S_IWOTH | (stat.S_IWGRP if seen.st_gid >= _FIRST_OF_USERS else 0)
        if seen.st_uid not in {0, os.geteuid()}:
            return False
        if seen.st_mode & untrusted and not seen.st_mode & sticky:
            return False
        # Higher up, users who may add names (as in a store) cannot replace those of others.
        sticky = stat.S_ISVTX
        path = path.rpartition("/")[0]
    return True


def _versions(directories: Iterable[tuple[str, tuple[str, ...]]]) -> set[str]:
    return {
        name.removeprefix(anchor)
        for _, names in directories
        for name in names
        for anchor in _ANCHORS
        if name.startswith(anchor) and is_version(name.removeprefix(anchor))
    }


def _loader_directories(reader: Fingerprint) -> tuple[str, ...]:
    """Return where a root's dynamic loader finds the driver, and where else it searches."""
    found: dict[str, None] = {}
    try:
        entries = parse(_read(reader, _CACHE, _LARGEST_CACHE)).entries
    except MalformedCache:
        entries = ()
    for entry in entries:
        if entry.soname in _SONAMES:
            found[os.path.dirname(os.fsdecode(entry.path))] = None
    drop_ins = reader.directory(_DROP_INS)
    names = (read_names(drop_ins) or []) if drop_ins is not None else []
    for conf in (_CONF, *(f"{_DROP_INS}/{name}" for name in names if name.endswith(".conf"))):
        for line in os.fsdecode(_read(reader, conf, _LARGEST_CONF)).splitlines():
            directory = line.partition("#")[0].strip()
            if directory.startswith("/") and "\0" not in directory:
                found[directory] = None
    return tuple(found)


def _read(reader: Fingerprint, path: str, limit: int) -> bytes:
    """Read a file of the root, observing its identity; return "" if it is missing or too large."""
    host = reader.file(path)
    if host is None:
        return b""
    try:
        with open(host, "rb") as file:
            content = file.read(limit + 1)
    except OSError:
        return b""
    return content if len(content) <= limit else b""
