"""The driver's files on this node: which version, and where each file is.

Rules
- The version is what the loaded kernel module says. Only if no module says anything is it
  taken from the names of the files. User-space files of another version than the module's
  are not used: NVIDIA's programs refuse to run with them.
- Directories are searched in the order of the tables below; the first file that matches a
  row of :mod:`hooks.capabilities` for an architecture is the one. Which architecture a library
  is for, and its soname, is read from the file, for a directory's name says it on some
  distributions only (Fedora's /usr/lib holds 32-bit libraries, Arch's 64-bit ones).
- A file counts if it is a regular file below the driver root after all links were followed
  within the driver root.

Source: NVIDIA Container Toolkit, internal/lookup; Debian's nvidia-alternative; the layout of
Google's driver installer (/usr/local/nvidia/{lib64,bin}).
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from hooks.capabilities import (
    ConfigFile,
    Firmware,
    Library,
    Program,
    Socket,
    XorgModule,
    every_row,
)
from hooks.elf import elf_of_fd
from hooks.errors import DriverMismatch, DriverNotFound
from hooks.plan import Arch
from hooks.rootfs_errors import MalformedElf
from hooks.witness import Witness

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from hooks.capabilities import Row
    from hooks.config import Config
    from hooks.elf import Elf

__all__ = ["Driver", "DriverFile", "LibraryFile", "find_driver", "find_sockets", "places"]

# Within a multiarch directory: the packages' own, and where Debian's alternatives keep a driver.
_LIBRARY_DIRECTORIES: Final = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu/nvidia/current",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu/nvidia/current",
    "/usr/lib64",
    "/usr/lib64/nvidia",
    "/lib64",
    "/lib/x86_64-linux-gnu",
    "/lib/aarch64-linux-gnu",
    "/usr/lib",
    "/usr/lib/nvidia",
    "/lib",
    "/usr/local/nvidia/lib64",
    "/usr/local/nvidia/lib",
    "/usr/lib/i386-linux-gnu",
    "/usr/lib/i386-linux-gnu/nvidia/current",
    "/usr/lib/arm-linux-gnueabihf",
    "/usr/lib/arm-linux-gnueabihf/nvidia/current",
    "/usr/lib32",
    "/usr/lib32/nvidia",
    "/lib32",
)
_PROGRAM_DIRECTORIES: Final = (
    "/usr/bin",
    "/usr/sbin",
    "/bin",
    "/sbin",
    "/usr/local/bin",
    "/usr/local/sbin",
    "/usr/local/nvidia/bin",
    "/usr/lib/nvidia/current",
)
_DATA_DIRECTORIES: Final = ("/etc", "/usr/share", "/usr/local/share", "/usr/local/nvidia")
_FIRMWARE_DIRECTORIES: Final = (
    "/lib/firmware/updates/nvidia/{v}",
    "/lib/firmware/nvidia/{v}",
    "/usr/lib/firmware/nvidia/{v}",
    "/usr/local/nvidia/firmware/nvidia/{v}",
)
_XORG_DIRECTORIES: Final = (
    "/usr/lib/xorg/modules/{directory}",
    "/usr/lib64/xorg/modules/{directory}",
    "/usr/lib/x86_64-linux-gnu/nvidia/xorg",
    "/usr/lib/aarch64-linux-gnu/nvidia/xorg",
    "/usr/lib/nvidia/current",
)

# The libraries whose names tell a driver's version; a driver without either is none.
_ANCHORS: Final = ("libcuda.so.", "libnvidia-ml.so.")

_COMPATIBLE_32: Final = {Arch.X86_64: Arch.I386, Arch.AARCH64: Arch.ARM}
_PREFERENCE: Final = (Arch.X86_64, Arch.AARCH64)


@dataclass(frozen=True, slots=True)
class LibraryFile:
    """A library of the driver.

    Attributes:
        row: the name of its row in :mod:`hooks.capabilities`.
        name: its file name.
        source: where it is on the host.
        arch: what it is built for.
        soname: DT_SONAME; None if it has none.
    """

    row: str
    name: str
    source: str
    arch: Arch
    soname: str | None


@dataclass(frozen=True, slots=True)
class DriverFile:
    """A file of the driver that is no library.

    Attributes:
        row: the name of its row in :mod:`hooks.capabilities`.
        name: its file name.
        source: where it is on the host.
    """

    row: str
    name: str
    source: str


@dataclass(frozen=True, slots=True)
class Driver:
    """The user-space driver.

    Attributes:
        version: the full version ("535.261.03").
        arch: what its programs are built for.
        libraries: its libraries, of every architecture.
        files: its programs, configuration, firmware and X modules.
        library_directories: host directories that were searched for libraries.
    """

    version: str
    arch: Arch
    libraries: tuple[LibraryFile, ...]
    files: tuple[DriverFile, ...]
    library_directories: tuple[str, ...]

    @property
    def arch32(self) -> Arch | None:
        """The 32-bit architecture that ``compat32`` means on this node."""
        return _COMPATIBLE_32.get(self.arch)


def find_driver(witness: Witness, config: Config) -> Driver:
    """Finds the driver below the driver root.

    Args:
        witness: whose root is the driver root.
        config: where procfs and sysfs are.

    Returns:
        The driver.

    Raises:
        DriverNotFound: neither libcuda nor libnvidia-ml of any version is there.
        DriverMismatch: they are there, but not of the loaded module's version.
    """
    directories = _library_directories(witness)
    version = _choose_version(witness, config, directories)
    libraries = tuple(_libraries(witness, directories, version))
    present = {library.arch for library in libraries}
    arch = next((arch for arch in _PREFERENCE if arch in present), None)
    if arch is None:
        raise DriverNotFound(
            f"driver {version} below {witness.root}",
            found="its libraries are for another architecture, or no ELF files",
            do="install the driver for this machine, or set driver-root in config.toml",
        )
    return Driver(
        version=version,
        arch=arch,
        libraries=libraries,
        files=tuple(_files(witness, version)),
        library_directories=tuple(host for host, _ in directories),
    )


def module_version(witness: Witness, config: Config) -> str | None:
    """The version that the loaded kernel module has; None if none is loaded."""
    banner = witness.text(f"{config.proc}/driver/nvidia/version")
    for word in (banner or "").partition("\n")[0].split():
        if _is_version(word):
            return word
    alone = (witness.text(f"{config.sys}/module/nvidia/version") or "").strip()
    return alone if _is_version(alone) else None


def find_sockets(config: Config) -> dict[str, str]:
    """The sockets of the driver's services that are there at this moment.

    Services come and go without the driver changing, so this is asked each time, and not
    kept in the inventory's cache.

    Args:
        config: whose driver root is searched.

    Returns:
        The host's path by the path in the table of capabilities.
    """
    witness = Witness(config.driver_root)
    found = {}
    for row in every_row():
        if isinstance(row, Socket):
            host = witness.resolve(row.path)
            if host is not None and _is_trusted(host, row):
                found[row.path] = host
    return found


def _is_trusted(host: str, row: Socket) -> bool:
    try:
        seen = os.lstat(host)
    except OSError:
        return False
    if not row.is_directory:
        return stat.S_ISSOCK(seen.st_mode)
    # The directory's parent may be writable by all (/tmp): only what root made there stays
    # what it is until it is mounted.
    return stat.S_ISDIR(seen.st_mode) and seen.st_uid == 0


def _library_directories(witness: Witness) -> list[tuple[str, tuple[str, ...]]]:
    """Each directory that exists, once: its path on the host and the names in it."""
    found: dict[str, tuple[str, ...]] = {}
    for path in _LIBRARY_DIRECTORIES:
        for inside in (path, f"{path}/vdpau"):
            host = witness.directory(inside)
            if host is not None and host not in found:
                found[host] = tuple(sorted(_list(host)))
    return list(found.items())


def _list(host: str) -> list[str]:
    try:
        return os.listdir(host)
    except OSError:
        return []


def _choose_version(
    witness: Witness, config: Config, directories: Iterable[tuple[str, tuple[str, ...]]]
) -> str:
    present = {
        name.removeprefix(anchor)
        for _, names in directories
        for name in names
        for anchor in _ANCHORS
        if name.startswith(anchor) and _is_version(name.removeprefix(anchor))
    }
    module = module_version(witness, config)
    if not present:
        raise DriverNotFound(
            "the NVIDIA driver's libraries",
            found=f"no libcuda.so.* or libnvidia-ml.so.* below {witness.root}",
            do="install the driver, or set driver-root in config.toml",
        )
    if module is None:
        return max(present, key=_numbers)
    if module not in present:
        raise DriverMismatch(
            f"the libraries of driver {module}, whose kernel module is loaded",
            found=f"versions {', '.join(sorted(present, key=_numbers))} below {witness.root}",
            do="restart the node or reload the kernel modules after a driver update",
        )
    return module


def _libraries(
    witness: Witness, directories: Iterable[tuple[str, tuple[str, ...]]], version: str
) -> Iterator[LibraryFile]:
    rows = [row for row in every_row() if isinstance(row, Library)]
    patterns = {row.name: row.name.format(v=version) for row in rows}
    taken: set[tuple[str, Arch]] = set()
    prefix = "" if witness.root == "/" else witness.root
    for host, names in directories:
        inside = host.removeprefix(prefix)
        candidates = [name for name in names if ".so." in name]
        for row, pattern in patterns.items():
            for name in _matches(pattern, candidates):
                source = witness.file(f"{inside}/{name}")
                elf = _read_elf(source) if source is not None else None
                if source is None or elf is None or elf.arch is None or (row, elf.arch) in taken:
                    continue
                taken.add((row, elf.arch))
                yield LibraryFile(row, name, source, elf.arch, elf.soname)


def _matches(pattern: str, names: Iterable[str]) -> list[str]:
    """The names that a pattern matches, the longest first.

    Beside ``libnvidia-egl-gbm.so.1.1.0`` there may be links to it with shorter names.
    """
    head, star, tail = pattern.partition("*")
    if not star:
        return [name for name in names if name == pattern]
    return sorted(
        (name for name in names if name.startswith(head) and name.endswith(tail)),
        key=lambda name: (-len(name), name),
    )


def _read_elf(path: str) -> Elf | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return elf_of_fd(fd)
    except MalformedElf:
        return None
    finally:
        os.close(fd)


def _files(witness: Witness, version: str) -> Iterator[DriverFile]:
    for row in every_row():
        if isinstance(row, Firmware):
            yield from _firmware(witness, row, version)
        if not isinstance(row, Program | ConfigFile | XorgModule):
            continue
        for path in places(row, version):
            source = witness.file(path)
            if source is not None:
                yield DriverFile(row=row.name, name=path.rpartition("/")[2], source=source)
                break


def places(row: Row, version: str) -> Iterator[str]:
    """Where the files of a row are searched, within the driver root, best first.

    Args:
        row: any row but a library, whose directories a :class:`Driver` knows.
        version: the driver's version.

    Yields:
        Paths; for firmware with a pattern for a name.
    """
    match row:
        case Firmware(name):
            yield from (f"{place.format(v=version)}/{name}" for place in _FIRMWARE_DIRECTORIES)
        case Socket(path):
            yield path
        case Program(name):
            yield from (f"{directory}/{name}" for directory in _PROGRAM_DIRECTORIES)
        case ConfigFile(name):
            yield from (f"{directory}/{name}" for directory in _DATA_DIRECTORIES)
        case XorgModule(name, directory):
            for place in _XORG_DIRECTORIES:
                yield f"{place.format(directory=directory)}/{name.format(v=version)}"


def _firmware(witness: Witness, row: Firmware, version: str) -> Iterator[DriverFile]:
    for place in places(row, version):
        inside = place.rpartition("/")[0]
        host = witness.directory(inside)
        names = _matches(row.name, _list(host)) if host is not None else []
        for name in sorted(names):
            source = witness.file(f"{inside}/{name}")
            if source is not None:
                yield DriverFile(row=row.name, name=name, source=source)
        if names:
            return


_FEWEST_PARTS: Final = 2
_MOST_PARTS: Final = 3


def _is_version(text: str) -> bool:
    """Whether a word is a driver's version: two or three numbers, the first of three digits.

    The first has three digits since 2011; so "1.8.1" in a module's banner is none.
    """
    parts = text.split(".")
    return (
        _FEWEST_PARTS <= len(parts) <= _MOST_PARTS
        and all(part.isascii() and part.isdecimal() for part in parts)
        and len(parts[0]) >= _MOST_PARTS
    )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))
