"""The driver's files on this node: which version, and where each file is.

Rules
- Where the driver is, and which version of it counts, :mod:`hooks.node.roots` says: that of the
  loaded kernel module. User-space files of another version are not used: NVIDIA's programs
  refuse to run with them.
- Directories are searched in the order of the layout's table (:mod:`hooks.node.driver_layouts`);
  the first file that matches a row of :mod:`hooks.edits.capabilities` for an architecture is the
  one. Which architecture a library is for, and its soname, is read from the file, for a directory's
  name says it on some distributions only (Fedora's /usr/lib holds 32-bit libraries, Arch's
  64-bit ones).
- A file counts if it is a regular file below the driver root after all links were followed
  within the driver root; a mount's source is that file, never a link to it.

Source: NVIDIA Container Toolkit, internal/lookup.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING, Final

from api.values import value
from hooks.edits.capabilities import (
    ConfigFile,
    Firmware,
    Library,
    Program,
    Socket,
    XorgModule,
    every_row,
)
from hooks.edits.plan import Arch
from hooks.errors import DriverNotFound
from hooks.image.elf import elf_of_fd
from hooks.image.rootfs_errors import MalformedElf
from hooks.node.driver_layouts import DISTRIBUTION, layout_named
from hooks.node.driver_version import module_version
from hooks.node.roots import choose, names_in
from hooks.node.witness import Witness

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from hooks.config import Config
    from hooks.edits.capabilities import Row
    from hooks.image.elf import Elf
    from hooks.node.driver_layouts import DriverLayout
    from hooks.node.roots import Root

__all__ = [
    "Driver",
    "DriverFile",
    "LibraryFile",
    "find_driver",
    "find_sockets",
    "places",
    "read_elf",
]

_COMPATIBLE_32: Final = {Arch.X86_64: Arch.I386, Arch.AARCH64: Arch.ARM}
_PREFERENCE: Final = (Arch.X86_64, Arch.AARCH64)


@value
class LibraryFile:
    """A library of the driver.

    Attributes:
        row: the name of its row in :mod:`hooks.edits.capabilities`.
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


@value
class DriverFile:
    """A file of the driver that is no library.

    Attributes:
        row: the name of its row in :mod:`hooks.edits.capabilities`.
        name: its file name.
        source: where it is on the host.
    """

    row: str
    name: str
    source: str


@value
class Driver:
    """The user-space driver.

    Attributes:
        version: the full version ("535.261.03").
        arch: what its programs are built for.
        libraries: its libraries, of every architecture.
        files: its programs, configuration, firmware and X modules.
        library_directories: host directories that were searched for libraries.
        root: the directory that is "/" for its files.
        layout: the name of how they lie below it, of :mod:`hooks.node.driver_layouts`.
        why: why this root was chosen, for people.
    """

    version: str
    arch: Arch
    libraries: tuple[LibraryFile, ...]
    files: tuple[DriverFile, ...]
    library_directories: tuple[str, ...]
    root: str = "/"
    layout: str = DISTRIBUTION.name
    why: str = ""

    @property
    def arch32(self) -> Arch | None:
        """The 32-bit architecture that ``compat32`` means on this node."""
        return _COMPATIBLE_32.get(self.arch)


def find_driver(witness: Witness, config: Config) -> Driver:
    """Finds the driver.

    Args:
        witness: through whom is looked.
        config: which driver root is configured, and where procfs and sysfs are.

    Returns:
        The driver.

    Raises:
        DriverNotFound: neither libcuda nor libnvidia-ml of any version is there.
        DriverMismatch: they are there, but not of the loaded module's version.
    """
    root = choose(witness, config, module_version(witness, config))
    libraries = tuple(_libraries(root.eyes, root.directories, root.version))
    present = {library.arch for library in libraries}
    arch = next((arch for arch in _PREFERENCE if arch in present), None)
    if arch is None:
        raise DriverNotFound(
            f"driver {root.version} below {root.eyes.root}",
            found="its libraries are for another architecture, or no ELF files",
            do="install the driver for this machine, or set driver-root in config.toml",
        )
    return Driver(
        version=root.version,
        arch=arch,
        libraries=libraries,
        files=tuple(_files(root)),
        library_directories=tuple(host for host, _ in root.directories),
        root=root.eyes.root,
        layout=root.layout.name,
        why=root.why,
    )


def find_sockets(root: str) -> dict[str, str]:
    """The sockets of the driver's services that are there at this moment.

    Services come and go without the driver changing, so this is asked each time, and not
    kept in the inventory's cache.

    Args:
        root: the directory that is "/" for the driver's files.

    Returns:
        The host's path by the path in the table of capabilities.
    """
    witness = Witness(root)
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
                elf = read_elf(source) if source is not None else None
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


def read_elf(path: str) -> Elf | None:
    """What an ELF file of the node says of itself; None for anything else.

    Args:
        path: on the host, free of links at its end.
    """
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


def _files(root: Root) -> Iterator[DriverFile]:
    for row in every_row():
        if isinstance(row, Firmware):
            yield from _firmware(root, row)
        if not isinstance(row, Program | ConfigFile | XorgModule):
            continue
        for path in _places(row, root.layout, root.version):
            source = root.eyes.file(path)
            if source is not None:
                if root.layout.unpatched and isinstance(row, Program):
                    source = _unpatched(root, source)
                yield DriverFile(row=row.name, name=path.rpartition("/")[2], source=source)
                break


def _unpatched(root: Root, source: str) -> str:
    """The program as NVIDIA built it, if it lies in a directory beside that of ``source``."""
    directory, _, name = source.rpartition("/")
    home = directory.rpartition("/")[0].removeprefix(root.eyes.root.rstrip("/"))
    return root.eyes.file(f"{home}/{root.layout.unpatched}/{name}") or source


def places(row: Row, driver: Driver) -> Iterator[str]:
    """Where the files of a row are searched, within the driver root, best first.

    Args:
        row: any row but a library, whose directories a :class:`Driver` knows.
        driver: which driver.

    Yields:
        Paths; for firmware with a pattern for a name.
    """
    return _places(row, layout_named(driver.layout), driver.version)


def _places(row: Row, layout: DriverLayout, version: str) -> Iterator[str]:
    match row:
        case Firmware(name):
            yield from (f"{place.format(v=version)}/{name}" for place in layout.firmware)
        case Socket(path):
            yield path
        case Program(name):
            yield from (f"{directory}/{name}" for directory in layout.programs)
        case ConfigFile(name):
            yield from (f"{directory}/{name}" for directory in layout.data)
        case XorgModule(name, directory):
            for place in layout.xorg:
                yield f"{place.format(directory=directory)}/{name.format(v=version)}"


def _firmware(root: Root, row: Firmware) -> Iterator[DriverFile]:
    for place in _places(row, root.layout, root.version):
        inside = place.rpartition("/")[0]
        host = root.eyes.directory(inside)
        names = _matches(row.name, names_in(host)) if host is not None else []
        for name in sorted(names):
            source = root.eyes.file(f"{inside}/{name}")
            if source is not None:
                yield DriverFile(row=row.name, name=name, source=source)
        if names:
            return
