"""Driver files with the same paths in the container as on the host.

On Tegra and WSL2, libraries and programs load libraries by the host's paths. So they are mounted at
these paths, with links of their sonames next to them, and added to the loader's cache.

Rules
- A file's path in the container is its host path with all links followed, within the driver root.
- If several libraries in a directory have the same soname, ldconfig's choice gets it: the last in
  the loader's order of names.
- If the image is not writable, nothing can be created at the host's paths. All libraries are then
  in the layout's directory, and are found only by name.
- Nothing is mounted below /proc or /sys, over the root or over all of /dev.

Source: NVIDIA Container Toolkit, internal/discover (mounts; ``.so`` links of the driver).
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Final

from hooks.errors import MigUnsupported, UnknownDevice
from hooks.image.layout import Layout
from hooks.image.ldcache import name_rank
from hooks.node.driver import read_elf
from hooks.node.fingerprint import Fingerprint
from hooks.plan import CachedLibrary, Device, Link, Missing, Mount, Plan
from hooks.requests.request import Request
from hooks.words import (
    KERNELS,
    Arch,
    DeviceName,
    Devices,
    MigIndex,
    MigInstance,
    MigUuid,
    NamedDevices,
    is_below,
)


def named(devices: Devices, platform: str) -> Iterator[DeviceName]:
    """Return the GPU names in a request, if any.

    Raises:
        MigUnsupported: one of them names a MIG device.
    """
    if isinstance(devices, NamedDevices):
        for name in devices.devices:
            if isinstance(name, MigIndex | MigUuid | MigInstance):
                raise MigUnsupported(
                    f"MIG device {name}",
                    found=f"{platform} has no MIG devices",
                    do="name a GPU by its index",
                )
            yield name


def unchecked(request: Request) -> tuple[str, ...]:
    """Return notes on an image's requirements, for drivers that report no version."""
    return tuple(
        f"{variable}={expression} is not checked: the driver tells no version"
        for variable, expression in request.requirements
    )


def unknown(name: DeviceName, found: str) -> UnknownDevice:
    """Return the error for a GPU that does not exist."""
    found = f"does not exist; {found}"
    return UnknownDevice(f"GPU {name}", found=found, do="name it by its index, or all")


_TOO_MUCH: Final = ("/", "/dev")

# Names that programs open but no library has as its soname, by the soname of the library meant.
_EXTRA_NAMES: Final = {
    "libcuda.so.1": "libcuda.so",
    "libGLX_nvidia.so.0": "libGLX_indirect.so.0",
    "libnvidia-opticalflow.so.1": "libnvidia-opticalflow.so",
}

LocatedFile = tuple[str, str]
"""A real path: on the host, and in the container."""


class HostTree:
    """The driver root with the node's devices at /dev; links are followed inside.

    Args:
        root: the driver root.
        dev: the directory of the device nodes.
    """

    def __init__(self, root: str, dev: str) -> None:
        self._root = Fingerprint(root)
        self._dev = Fingerprint(dev)

    def really(self, path: str) -> LocatedFile | None:
        """Return the real path of a path; None if it leads nowhere."""
        reader, at, inside = self._reader(path)
        host = reader.resolve(inside)
        if host is None:
            return None
        return host, at + host.removeprefix(reader.root.rstrip("/"))

    def link_at(self, path: str) -> str | None:
        """Return the target of the link at a path; None if there is no link."""
        directory = self.really(posixpath.dirname(path))
        if directory is None:
            return None
        try:
            return os.readlink(posixpath.join(directory[0], posixpath.basename(path)))
        except OSError:
            return None

    def matches(self, pattern: str) -> list[str]:
        """Return the sorted matches of a path with wildcards; without any, the path itself."""
        if not _is_pattern(pattern):
            return [pattern]
        found = [""]
        for name in pattern.strip("/").split("/"):
            if not _is_pattern(name):
                found = [f"{path}/{name}" for path in found]
                continue
            found = [
                f"{path}/{entry}"
                for path in found
                for entry in self._names(path or "/")
                if fnmatchcase(entry, name)
            ]
        return [path for path in found if self.really(path) is not None]

    def _names(self, path: str) -> list[str]:
        where = self.really(path)
        try:
            return sorted(os.listdir(where[0])) if where is not None else []
        except OSError:
            return []

    def _reader(self, path: str) -> tuple[Fingerprint, str, str]:
        """Return the fingerprint for a path, the prefix that it omits, and the rest."""
        if path == "/dev" or path.startswith("/dev/"):
            return self._dev, "/dev", path.removeprefix("/dev") or "/"
        return self._root, "", path


def _is_pattern(text: str) -> bool:
    return not set("*?[").isdisjoint(text)


class Files:
    """Collects the mounts, links and libraries of a plan.

    Args:
        layout: the layout of the image.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._arches = {loader.arch for loader in layout.loaders}
        self._mounts: dict[str, Mount] = {}
        self._links: dict[str, Link] = {}
        self._sonames: dict[tuple[str, str, Arch], str] = {}
        self._missing: list[Missing] = []

    def add(self, found: LocatedFile, reason: str, *, beside_libraries: bool = False) -> str:
        """Add a file or a directory; return where the container sees it.

        Args:
            beside_libraries: whether it must be in the libraries' directory.
        """
        host, path = found
        if path in _TOO_MUCH or is_below(path, KERNELS):
            self.miss(path, "it is the kernel's or the runtime's, and is not mounted over")
            return path
        is_library = ".so" in posixpath.basename(path) and os.path.isfile(host)
        elf = read_elf(host) if is_library else None
        arch = elf.arch if elf is not None and elf.arch in self._arches else None
        if not self._layout.writable and (arch is not None or beside_libraries):
            loader = self._layout.loader(arch) if arch else self._layout.loaders[0]
            path = posixpath.join(loader.directory, posixpath.basename(path))
        if elf is not None and arch is not None:
            directory, name = posixpath.split(path)
            key = (directory, elf.soname or name, arch)
            names = (self._sonames.get(key, name), name)
            self._sonames[key] = max(names, key=lambda each: name_rank(each.encode()))
            reason = f"{arch.value} library"
        self._mounts.setdefault(path, Mount(host, path, reason=reason))
        return path

    def link(self, path: str, target: str, reason: str) -> None:
        """Add a link; the first at its path stays."""
        self._links.setdefault(path, Link(path, target, reason))

    def miss(self, what: str, *sought: str) -> None:
        """Record a file that the node lacks."""
        self._missing.append(Missing(what, sought))

    def plan(self, devices: Iterable[Device], groups: tuple[int, ...]) -> Plan:
        """Return the plan.

        Args:
            groups: supplementary groups.
        """
        cached = []
        directories: dict[str, None] = {}
        for (directory, soname, arch), name in self._sonames.items():
            directories[directory] = None
            cached.append(CachedLibrary(soname, f"{directory}/{name}", arch))
            if soname != name:
                self.link(f"{directory}/{soname}", name, "soname")
            extra = _EXTRA_NAMES.get(soname)
            if extra is not None:
                self.link(f"{directory}/{extra}", soname, "development link")
                cached.append(CachedLibrary(extra, f"{directory}/{name}", arch))
        return Plan(
            devices=tuple(devices),
            mounts=tuple(self._mounts.values()),
            additional_gids=groups,
            links=tuple(link for link in self._links.values() if link.path not in self._mounts),
            libraries=tuple(dict.fromkeys(cached)),
            library_directories=tuple(directories),
            missing=tuple(self._missing),
        )
