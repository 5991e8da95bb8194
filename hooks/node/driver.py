"""Find the driver's files on this node: their version, and the place of each.

Rules
- :mod:`hooks.node.roots` finds the driver in the loaded kernel module's version. Files of another
  version are not used: NVIDIA's programs refuse to run with them.
- Directories are searched in the order of the layout's table (:mod:`hooks.node.driver_layouts`).
  The first file that matches a row of :mod:`hooks.node.capabilities` for an architecture is used.
  A library's architecture and soname are read from the file, because directory names are ambiguous
  (Fedora's /usr/lib has 32-bit libraries, Arch's has 64-bit ones).
- A library of the driver's version that no row names, and that is not excluded by name, counts as
  one of :data:`hooks.node.capabilities.OTHERS`.
- A file counts if it is a regular file below the driver root after following all links within the
  driver root. The source of a mount is that file, never a link to it.

Source: NVIDIA Container Toolkit, internal/lookup.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterable, Iterator
from typing import Final

from api.values import dataclass
from hooks.config import Config
from hooks.errors import DriverNotFound
from hooks.image.elf import Elf, elf_of_fd
from hooks.image.rootfs_errors import MalformedElf
from hooks.node.capabilities import (
    LEFT_OUT,
    OTHERS,
    ConfigFile,
    Firmware,
    Library,
    Program,
    Row,
    Socket,
    XorgModule,
    every_row,
)
from hooks.node.driver_layouts import DISTRIBUTION, DriverLayout, layout_named
from hooks.node.fingerprint import Fingerprint, read_names
from hooks.node.manifests import is_manifest, library_paths, read_manifest
from hooks.node.roots import Root, choose, module_version
from hooks.words import SERVICES, Arch

_COMPATIBLE_32: Final = {Arch.X86_64: Arch.I386, Arch.AARCH64: Arch.ARM}
_PREFERENCE: Final = (Arch.X86_64, Arch.AARCH64)


@dataclass(frozen=True, slots=True)
class LibraryFile:
    """A library of the driver."""

    row: str  # the name of its row in hooks.node.capabilities
    name: str
    source: str
    arch: Arch
    soname: str | None  # DT_SONAME; None if it has none


@dataclass(frozen=True, slots=True)
class DriverFile:
    """A driver file other than a library."""

    row: str  # the name of its row in hooks.node.capabilities
    name: str
    source: str
    # the text of a manifest that names a library by a path; otherwise ""
    manifest: str = ""


@dataclass(frozen=True, slots=True)
class Driver:
    """The user-space driver."""

    version: str  # the full version ("535.261.03")
    arch: Arch
    libraries: tuple[LibraryFile, ...]
    files: tuple[DriverFile, ...]  # its programs, configuration, firmware and X modules
    library_directories: tuple[str, ...]  # host directories that were searched for libraries
    root: str = "/"  # the directory that is "/" for its files
    # the name of its layout, of hooks.node.driver_layouts
    layout: str = DISTRIBUTION.name
    why: str = ""

    @property
    def arch32(self) -> Arch | None:
        """The 32-bit architecture of ``compat32`` on this node."""
        return _COMPATIBLE_32.get(self.arch)

    @property
    def others(self) -> tuple[str, ...]:
        """The names of its libraries that belong to no known capability."""
        names = (file.name for file in self.libraries if file.row == OTHERS.name)
        return tuple(dict.fromkeys(names))

    @property
    def notes(self) -> tuple[str, ...]:
        """Unusual facts about its files, for display."""
        if not self.others:
            return ()
        names = ", ".join(self.others)
        return (f"{names}: of no capability that this version knows, so it comes with `all` only",)


def find_driver(fingerprint: Fingerprint, config: Config) -> Driver:
    """Find the driver.

    Raises:
        DriverNotFound: there is no libcuda and no libnvidia-ml of any version.
        DriverMismatch: they exist, but do not match the loaded module's version.
    """
    root = choose(fingerprint, config, module_version(fingerprint, config))
    libraries = tuple(_libraries(root.reader, root.directories, root.version))
    present = {library.arch for library in libraries}
    arch = next((arch for arch in _PREFERENCE if arch in present), None)
    if arch is None:
        raise DriverNotFound(
            f"driver {root.version} below {root.reader.root}",
            found="its libraries are for another architecture, or no ELF files",
            do="install the driver for this machine, or set driver-root in config.toml",
        )
    return Driver(
        version=root.version,
        arch=arch,
        libraries=libraries,
        files=tuple(_files(root)),
        library_directories=tuple(host for host, _ in root.directories),
        root=root.reader.root,
        layout=root.layout.name,
        why=root.why,
    )


def find_sockets(root: str, services: Collection[str] = SERVICES) -> dict[str, str]:
    """Return the existing sockets of the driver's services: host paths by the table's paths.

    Services start and stop without a change of the driver, so the inventory does not cache this.

    Args:
        root: the directory that is "/" for the driver's files.
        services: the services whose sockets containers may get.
    """
    fingerprint = Fingerprint(root)
    found = {}
    for row in every_row():
        if isinstance(row, Socket) and row.service in services:
            host = fingerprint.resolve(row.path)
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
    # The parent directory may be writable by all (/tmp). Only root's entries there cannot be
    # replaced before they are mounted.
    return stat.S_ISDIR(seen.st_mode) and seen.st_uid == 0


def _libraries(
    fingerprint: Fingerprint, directories: Iterable[tuple[str, tuple[str, ...]]], version: str
) -> Iterator[LibraryFile]:
    rows = [row for row in every_row() if isinstance(row, Library)]
    patterns = {row.name: row.name.format(v=version) for row in rows}  # OTHERS comes last
    modules = (row.name for row in every_row() if isinstance(row, XorgModule))
    known = {name.format(v=version) for name in (*LEFT_OUT, *modules)}
    taken: set[tuple[str, Arch]] = set()
    prefix = "" if fingerprint.root == "/" else fingerprint.root
    for host, names in directories:
        inside = host.removeprefix(prefix)
        candidates = [name for name in names if ".so." in name]
        for row, pattern in patterns.items():
            is_other = row == OTHERS.name
            matching = _matches(pattern, candidates)
            if not is_other:
                known.update(matching)
            for name in matching:
                if is_other and name in known:
                    continue
                source = fingerprint.file(f"{inside}/{name}")
                elf = read_elf(source) if source is not None else None
                key = name if is_other else row
                if source is None or elf is None or elf.arch is None or (key, elf.arch) in taken:
                    continue
                taken.add((key, elf.arch))
                yield LibraryFile(row, name, source, elf.arch, elf.soname)


def _matches(pattern: str, names: Iterable[str]) -> list[str]:
    """Return the names that match a pattern, longest first.

    ``libnvidia-egl-gbm.so.1.1.0`` may have links with shorter names.
    """
    head, star, tail = pattern.partition("*")
    if not star:
        return [name for name in names if name == pattern]
    return sorted(
        (name for name in names if name.startswith(head) and name.endswith(tail)),
        key=lambda name: (-len(name), name),
    )


def read_elf(path: str) -> Elf | None:
    """Parse an ELF file of the node; None for any other file.

    Args:
        path: a path on the host whose last component is not a link.
    """
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        fd = os.open(path, flags)
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
            source = root.reader.file(path)
            if source is not None:
                if root.layout.unpatched and isinstance(row, Program):
                    source = _unpatched(root, source)
                name = path.rpartition("/")[2]
                manifest = _manifest_with_paths(name, source) if is_manifest(name) else ""
                yield DriverFile(row.name, name, source, manifest)
                break


def _manifest_with_paths(name: str, source: str) -> str:
    """Return the text of a manifest that names a library by a path; "" for other manifests.

    Args:
        name: the name that loaders open, perhaps a link to a file with another name.
    """
    try:
        text = read_manifest(source)
        return text if library_paths(name, text) else ""
    except (OSError, ValueError):
        return ""  # loaders ignore it; the doctor reports it


def _unpatched(root: Root, source: str) -> str:
    """Return the program as NVIDIA built it, if a directory next to that of ``source`` has it."""
    directory, _, name = source.rpartition("/")
    home = directory.rpartition("/")[0].removeprefix(root.reader.root.rstrip("/"))
    return root.reader.file(f"{home}/{root.layout.unpatched}/{name}") or source


def places(row: Row, driver: Driver) -> Iterator[str]:
    """Yield where to search a row's files within the driver root, best first.

    Yields:
        Paths; for firmware, with a pattern for a name.
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
            yield from (f"{directory}/{name.format(v=version)}" for directory in layout.data)
        case XorgModule(name, directory):
            for place in layout.xorg:
                yield f"{place.format(directory=directory)}/{name.format(v=version)}"


def _firmware(root: Root, row: Firmware) -> Iterator[DriverFile]:
    for place in _places(row, root.layout, root.version):
        inside = place.rpartition("/")[0]
        host = root.reader.directory(inside)
        names = _matches(row.name, read_names(host) or ()) if host is not None else []
        for name in sorted(names):
            source = root.reader.file(f"{inside}/{name}")
            if source is not None:
                yield DriverFile(row=row.name, name=name, source=source)
        if names:
            return
