"""What an image's dynamic loaders look like, and where libraries have to go for them.

A library that lies where the loader searches anyway is found without a cache, without
LD_LIBRARY_PATH, and by whatever the container does to its own cache later. Which directory
that is depends on who built the C library: Debian's searches /usr/lib/x86_64-linux-gnu,
Fedora's /usr/lib64, Arch's and Alpine's /usr/lib. The image itself shows it: the directory
with libc.so.6 in it is searched. Nothing is run, and nothing is believed for its name alone:
a loader is a regular ELF file of the right machine at the path that every program of that
architecture names as its interpreter.

Rules
- Links are followed as the container would follow them, inside the image. The answer is the
  path behind them, so that they need not be followed again.
- A directory that something is mounted over in the container (procfs, a tmpfs, a volume) is no
  place to write into. A candidate that leads to one is passed over.
- Two architectures never share a directory: their files have the same names.
- An image without a loader (static binaries only) still gets a directory. No image, however
  broken, makes :func:`read_layout` raise.
- A rootfs that takes no writes has no room for mount points either, so the directories are
  moved to a tmpfs of the spec: below /run or /dev the runtime can make them.

Source: ld.so(8); glibc's sysdeps/*/shlib-versions and Debian's multiarch patches; musl's
ldso/dynlink.c (its default path is /lib:/usr/local/lib:/usr/lib).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any, Final

from api.values import dataclass
from hooks.errors import RootfsError
from hooks.image.elf import elf_of_fd
from hooks.image.rootfs import Rootfs
from hooks.words import Arch

CACHE: Final = "/etc/ld.so.cache"
_BIND: Final = frozenset({"bind", "rbind"})
_SHARED: Final = frozenset({"shared", "rshared"})
_NOT_SHARED: Final = frozenset(
    {"private", "rprivate", "slave", "rslave", "unbindable", "runbindable"}
)
SCRATCH: Final = "containerd-shim-nvidia"
"""The directory on a tmpfs that holds the libraries of a container with a read-only rootfs."""


class Libc(Enum):
    """Whose dynamic loader an image has for an architecture."""

    GLIBC = "glibc"
    MUSL = "musl"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Loader:
    """The dynamic loader for one architecture, and where it finds libraries."""

    arch: Arch
    libc: Libc  # whose loader it is; NONE if the image has none for this architecture
    directory: str  # where libraries are mounted; absolute, without links, maybe not there yet
    searched: bool = True  # whether the loader searches ``directory`` by default


@dataclass(frozen=True, slots=True)
class Layout:
    """What matters about an image for placing libraries into it."""

    loaders: tuple[Loader, ...]  # one per requested architecture, in that order
    has_cache: bool = False  # whether /etc/ld.so.cache is a regular file (after links)
    writable: bool = True
    # directories and files that something is mounted over in the container
    covered: tuple[str, ...] = ("/proc", "/sys", "/dev")
    # the tmpfs that stands in for a rootfs that takes no writes, if one is needed and there is one
    scratch: str | None = None
    # those of ``covered`` that a writable tmpfs is mounted over
    fresh: frozenset[str] = frozenset()
    # those of ``covered`` from which mounts appear on the host as well: shared volumes
    shared: frozenset[str] = frozenset()

    def loader(self, arch: Arch) -> Loader:
        """The loader for ``arch``, which was among those asked for."""
        return next(loader for loader in self.loaders if loader.arch is arch)

    def library_directory(self, arch: Arch) -> str:
        """Where libraries of ``arch`` are mounted."""
        return self.loader(arch).directory

    def covers(self, path: str) -> bool:
        """Whether something is mounted over ``path``, or over a directory on the way to it."""
        return any(path == over or path.startswith(f"{over}/") for over in self.covered)

    def is_fresh(self, path: str) -> bool:
        """Whether ``path`` is on a tmpfs of the container's own, where a runtime can make it."""
        return self._last_over(path) in self.fresh

    def is_shared(self, path: str) -> bool:
        """Whether what is mounted at ``path`` appears, and stays, on the host."""
        return self._last_over(path) in self.shared

    def _last_over(self, path: str) -> str:
        """The innermost of ``covered`` that ``path`` is in; "" for none."""
        over = (over for over in self.covered if path == over or path.startswith(f"{over}/"))
        return max(over, key=len, default="")


@dataclass(frozen=True, slots=True)
class _Abi:
    """What the ABI of an architecture fixes, and the directories that distributions chose."""

    glibc: str  # the interpreter of programs built for glibc
    musl: str  # the interpreter of programs built for musl
    # directories of glibc's own libraries, without "/usr", the likelier first; each stands for
    # itself and for the same below /usr
    homes: tuple[str, ...]
    home: str  # the one to make if there is no loader to tell


_ABIS: Final = {
    Arch.X86_64: _Abi(
        "/lib64/ld-linux-x86-64.so.2",
        "/lib/ld-musl-x86_64.so.1",
        ("/lib/x86_64-linux-gnu", "/lib64", "/lib"),
        "/lib64",
    ),
    Arch.AARCH64: _Abi(
        "/lib/ld-linux-aarch64.so.1",
        "/lib/ld-musl-aarch64.so.1",
        ("/lib/aarch64-linux-gnu", "/lib64", "/lib"),
        "/lib64",
    ),
    Arch.I386: _Abi(
        "/lib/ld-linux.so.2",
        "/lib/ld-musl-i386.so.1",
        ("/lib/i386-linux-gnu", "/lib32", "/lib"),
        "/lib32",
    ),
    Arch.ARM: _Abi(
        "/lib/ld-linux-armhf.so.3",
        "/lib/ld-musl-armhf.so.1",
        ("/lib/arm-linux-gnueabihf", "/lib32", "/lib"),
        "/lib32",
    ),
}

_LAST_RESORT: Final = "/.containerd-shim-nvidia"
"""Holds the libraries if /usr itself is a link that leads nowhere."""


def read_layout(
    rootfs: Rootfs, arches: Iterable[Arch], spec_mounts: Iterable[Mapping[str, Any]] = ()
) -> Layout:
    """The layout of an image; what an image holds is never an error.

    Args:
        spec_mounts: ``mounts`` of the OCI spec, which will cover parts of the image.
    """
    mounts = [mount for mount in spec_mounts if isinstance(mount.get("destination"), str)]
    known: dict[str, str | None] = {}
    covered = dict.fromkeys(("/proc", "/sys", "/dev"))
    for mount in mounts:
        covered[_place_of(mount)] = None
        covered[_landing(rootfs, mount["destination"], known) or "/proc"] = None
    covered.pop("/", None)
    writable = rootfs.is_writable()
    scratch = None if writable else _scratch(rootfs, mounts)
    shared = _shared(mounts)
    look = _Look(rootfs, tuple(covered))
    loaders = []
    for arch in arches:
        loader = look.loader(arch)
        if scratch is not None:
            directory = f"{scratch}/{SCRATCH}/{arch.value}"
            loader = Loader(arch, loader.libc, directory, searched=False)
        loaders.append(loader)
    return Layout(
        loaders=tuple(loaders),
        has_cache=_kind(rootfs, CACHE) == stat.S_IFREG,
        writable=writable,
        covered=tuple(covered),
        scratch=scratch,
        fresh=_fresh(mounts),
        shared=shared.union(filter(None, (_landing(rootfs, each, known) for each in shared))),
    )


def unseen_layout(arches: Iterable[Arch]) -> Layout:
    """The layout of an image that cannot be read: as of one without a loader."""
    return Layout(tuple(Loader(arch, Libc.NONE, f"/usr{_ABIS[arch].home}") for arch in arches))


class _Look:
    """The search of one image; each result narrows the rest of the search."""

    def __init__(self, rootfs: Rootfs, covered: tuple[str, ...]) -> None:
        self._rootfs = rootfs
        self._hidden = Layout((), covered=covered)
        self._taken: set[str] = set()

    def loader(self, arch: Arch) -> Loader:
        """The loader of ``arch``, and a directory that no other architecture has got."""
        abi = _ABIS[arch]
        home = self._home_of_glibc(arch, abi)
        if home is not None:
            libc = Libc.GLIBC
        elif self._is_elf(abi.musl, arch):
            libc, home = Libc.MUSL, "/lib"
        else:
            libc = Libc.GLIBC if self._is_elf(abi.glibc, arch) else Libc.NONE
        known = self._place(home) if home is not None else None
        directory = known or self._other_place(abi)
        self._taken.add(directory)
        return Loader(arch, libc, directory, searched=known is not None)

    def _home_of_glibc(self, arch: Arch, abi: _Abi) -> str | None:
        """The directory with the C library of ``arch``, without "/usr"."""
        if not self._is_elf(abi.glibc, arch):
            return None
        for home in abi.homes:
            for directory in (f"/usr{home}", home):
                if self._is_elf(f"{directory}/libc.so.6", arch):
                    return home
        return None

    def _other_place(self, abi: _Abi) -> str:
        """Where libraries go if nothing tells: a directory that is there, or one to make."""
        there = [home for home in abi.homes if home != "/lib" and self._is_there(home)]
        places = (self._place(home) for home in (*there, abi.home))
        return next(filter(None, places), f"{_LAST_RESORT}{abi.home}")

    def _is_there(self, home: str) -> bool:
        return _kind(self._rootfs, f"/usr{home}") == stat.S_IFDIR

    def _place(self, home: str) -> str | None:
        """Where /usr + ``home`` really is, unless it is hidden, taken or out of reach."""
        place = _landing(self._rootfs, f"/usr{home}")
        if place is None or place == "/" or place in self._taken or self._hidden.covers(place):
            return None
        return place if _kind(self._rootfs, place) in {None, stat.S_IFDIR} else None

    def _is_elf(self, path: str, arch: Arch) -> bool:
        """Whether a regular ELF file for ``arch`` is at ``path``."""
        try:
            fd = self._rootfs.open_file(path)
            if fd is None:
                return False
            try:
                return elf_of_fd(fd).arch is arch
            finally:
                os.close(fd)
        except RootfsError:
            return False


def _landing(rootfs: Rootfs, path: str, known: dict[str, str | None] | None = None) -> str | None:
    try:
        return rootfs.landing(path, known)
    except RootfsError:
        return None


def _kind(rootfs: Rootfs, path: str) -> int | None:
    """The type of what ``path`` leads to; None for nothing and for what cannot be told."""
    try:
        found = rootfs.stat(path)
    except RootfsError:
        return None
    return None if found is None else stat.S_IFMT(found.st_mode)


def _fresh(mounts: list[Mapping[str, Any]]) -> frozenset[str]:
    """Where a writable tmpfs is mounted, and nothing after it there or above."""
    fresh: set[str] = set()
    for mount in mounts:
        place = _place_of(mount)
        fresh = {over for over in fresh if over != place and not over.startswith(f"{place}/")}
        if mount.get("type") == "tmpfs" and not _is_read_only(mount):
            fresh.add(place)
    return frozenset(fresh)


def _shared(mounts: list[Mapping[str, Any]]) -> frozenset[str]:
    """Where what is mounted appears on the host: in shared volumes, and in what is mounted there.

    Source: mount_namespaces(7): what is mounted in a shared mount is shared, unless it is made
    private or a slave.
    """
    known: dict[str, bool] = {}
    for mount in mounts:
        place, options = _place_of(mount), _options_of(mount)
        around = max(
            (over for over in known if f"{place}/".startswith(f"{over}/")), key=len, default=""
        )
        is_shared = not (options.isdisjoint(_SHARED) or options.isdisjoint(_BIND))
        is_shared |= known.get(around, False) and options.isdisjoint(_NOT_SHARED)
        known = {over: is_so for over, is_so in known.items() if not over.startswith(f"{place}/")}
        known[place] = is_shared
    return frozenset(over for over, is_so in known.items() if is_so)


def _place_of(mount: Mapping[str, Any]) -> str:
    destination: str = mount["destination"]
    return os.path.normpath("/" + destination.lstrip("/"))


def _options_of(mount: Mapping[str, Any]) -> frozenset[str]:
    options = mount.get("options")
    return frozenset(filter(_is_text, options)) if isinstance(options, list) else frozenset()


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_read_only(mount: Mapping[str, Any]) -> bool:
    return "ro" in _options_of(mount)


def _scratch(rootfs: Rootfs, mounts: list[Mapping[str, Any]]) -> str | None:
    """A tmpfs of the spec that the runtime can make directories on."""
    for place in ("/run", "/dev"):
        over = [mount for mount in mounts if os.path.normpath(mount["destination"]) == place]
        if not over or over[-1].get("type") != "tmpfs" or _is_read_only(over[-1]):
            continue
        # Behind a link the tmpfs would be mounted somewhere else.
        if _landing(rootfs, place) == place:
            return place
    return None


def coverable(rootfs: Rootfs, layout: Layout, path: str, kind: int = stat.S_IFREG) -> str | None:
    """Where the file at a path really is; None if nothing of its kind can be mounted over it."""
    if layout.covers(path):
        return None
    try:
        found = rootfs.stat(path)
        place = rootfs.real_path(path)
    except RootfsError:
        return None
    if found is None or place is None or layout.covers(place):
        return None
    return place if stat.S_IFMT(found.st_mode) == kind else None
