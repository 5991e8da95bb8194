"""Find an image's dynamic loaders, and the directories where they search for libraries.

A loader finds a library in its default directories without a cache, without LD_LIBRARY_PATH, and
even if the container later changes its cache. These directories depend on who built the C library:
Debian's searches /usr/lib/x86_64-linux-gnu, Fedora's /usr/lib64, Arch's and Alpine's /usr/lib. The
image itself shows them: the directory with libc.so.6 is searched. Nothing is run, and a name alone
proves nothing: a loader must be a regular ELF file for the right machine, at the interpreter path
of that architecture's programs.

Rules
- Links are followed inside the image, as in the container. Results are paths without links.
- A directory that the container mounts over (procfs, a tmpfs, a volume) is unsuitable, so a
  candidate that leads to one is skipped.
- Two architectures never share a directory, because their files have the same names.
- An image without a loader (with static binaries only) still gets a directory. No image, however
  broken, makes :func:`read_layout` raise.
- A read-only rootfs has no room for mount points, so the directories move to a tmpfs of the spec:
  below /run or /dev, where the runtime can create them, unless something is already mounted there,
  because a runtime would create our mount points in a volume.
- Mounts deeper than all our paths are ignored: they hide nothing of ours, and a volume's path may
  be arbitrarily long.

Source: ld.so(8); glibc's sysdeps/*/shlib-versions and Debian's multiarch patches; musl's
ldso/dynlink.c (its default path is /lib:/usr/local/lib:/usr/lib).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from enum import Enum
from typing import Any, Final, TypeAlias

from api.values import dataclass
from hooks.errors import RootfsError
from hooks.image.elf import elf_of_fd
from hooks.image.rootfs import DEEPEST, Rootfs
from hooks.image.rootfs_errors import RootfsReadOnly
from hooks.words import Arch

CACHE: Final = "/etc/ld.so.cache"
_LDCONFIG: Final = "/sbin/ldconfig"
_BIND: Final = frozenset({"bind", "rbind"})
_SHARED: Final = frozenset({"shared", "rshared"})
_NOT_SHARED: Final = frozenset(
    {"private", "rprivate", "slave", "rslave", "unbindable", "runbindable"}
)
OPTIONS: Final = frozenset({"ro"}) | _BIND | _SHARED | _NOT_SHARED
"""The options of mounts that a layout depends on."""

SCRATCH: Final = "containerd-shim-nvidia"
"""The directory on a tmpfs that holds the libraries of a container with a read-only rootfs."""


class Libc(Enum):
    """The C library of an image's dynamic loader."""

    GLIBC = "glibc"
    MUSL = "musl"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Loader:
    """The dynamic loader for one architecture, and where it finds libraries."""

    arch: Arch
    libc: Libc  # NONE if the image has no loader for this architecture
    directory: str  # where to mount libraries; absolute, without links, may be missing
    searched: bool = True  # whether the loader searches ``directory`` by default


@dataclass(frozen=True, slots=True)
class Layout:
    """The properties of an image that determine where libraries go."""

    loaders: tuple[Loader, ...]  # one per requested architecture, in that order
    has_cache: bool = False  # whether /etc/ld.so.cache is a regular file (after links)
    writable: bool = True
    # directories and files that the container mounts over
    covered: tuple[str, ...] = ("/proc", "/sys", "/dev")
    # the tmpfs to use instead of a read-only rootfs, if needed and available
    scratch: str | None = None
    # those of ``covered`` under a writable tmpfs
    fresh: frozenset[str] = frozenset()
    # those of ``covered`` whose mounts also appear on the host: shared volumes
    shared: frozenset[str] = frozenset()
    has_ldconfig: bool = True  # whether it has /sbin/ldconfig, or is unreadable

    def loader(self, arch: Arch) -> Loader:
        """Return the loader for ``arch``, which must be one of the requested ones."""
        return next(loader for loader in self.loaders if loader.arch is arch)

    def library_directory(self, arch: Arch) -> str:
        """Return the directory for libraries of ``arch``."""
        return self.loader(arch).directory

    def covers(self, path: str) -> bool:
        """Whether a mount covers ``path``, or a directory above it."""
        return any(path == over or path.startswith(f"{over}/") for over in self.covered)

    def is_fresh(self, path: str) -> bool:
        """Whether ``path`` is on the container's own tmpfs, where a runtime can create it."""
        return self._last_over(path) in self.fresh

    def is_shared(self, path: str) -> bool:
        """Whether a mount at ``path`` would appear, and stay, on the host."""
        return self._last_over(path) in self.shared

    def _last_over(self, path: str) -> str:
        """Return the innermost of ``covered`` that contains ``path``; "" for none."""
        over = (over for over in self.covered if path == over or path.startswith(f"{over}/"))
        return max(over, key=len, default="")


@dataclass(frozen=True, slots=True)
class _Abi:
    """An architecture's interpreter paths, set by its ABI, and the directories of distributions."""

    glibc: str  # the interpreter of programs built for glibc
    musl: str  # the interpreter of programs built for musl
    # directories of glibc's own libraries, without "/usr", most likely first; each also stands for
    # the same directory below /usr
    homes: tuple[str, ...]
    home: str  # the directory to create if no loader shows one


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
"""Holds the libraries if /usr cannot: it is a file, links to itself, or leads below /proc."""


def read_layout(
    rootfs: Rootfs, arches: Iterable[Arch], spec_mounts: Iterable[Mapping[str, Any]] = ()
) -> Layout:
    """Return the layout of an image, whose content is never an error.

    Args:
        spec_mounts: ``mounts`` of the OCI spec, which will cover parts of the image.
    """
    mounts = _near(spec_mounts)
    known: dict[str, str | None] = {}
    covered = dict.fromkeys(("/proc", "/sys", "/dev"))
    linked = set()  # the mounts' real places, after the image's links
    for mount in mounts:
        place = _place_of(mount)
        landing = _landing(rootfs, mount["destination"], known) or "/proc"
        covered[place] = covered[landing] = None
        if landing != place:
            linked.add(landing)
    covered.pop("/", None)
    writable = rootfs.is_writable()
    fresh = frozenset(each for each in _fresh(mounts) if linked.isdisjoint(_way_to(each)))
    shared = _shared(mounts)
    # A link would lead the tmpfs elsewhere.
    places = (place for place in ("/run", "/dev") if _landing(rootfs, place) == place)
    scratch = None if writable else _scratch(places, fresh, covered)
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
        fresh=fresh,
        shared=shared.union(filter(None, (_landing(rootfs, each, known) for each in shared))),
        has_ldconfig=_kind(rootfs, _LDCONFIG) == stat.S_IFREG,
    )


def unseen_layout(arches: Iterable[Arch]) -> Layout:
    """Return the layout for an unreadable image: that of an image without a loader."""
    return Layout(tuple(Loader(arch, Libc.NONE, f"/usr{_ABIS[arch].home}") for arch in arches))


def staged_layout(arches: Iterable[Arch], spec_mounts: Iterable[Mapping[str, Any]]) -> Layout:
    """Return the layout for an image that is not mounted yet: libraries go to a tmpfs of the spec.

    Args:
        spec_mounts: ``mounts`` of the OCI spec.

    Raises:
        RootfsReadOnly: it has no writable tmpfs on /dev or /run.
    """
    mounts = _near(spec_mounts)
    fresh = _fresh(mounts)
    covered = dict.fromkeys(("/proc", "/sys", "/dev", *map(_place_of, mounts)))
    scratch = _scratch(("/dev", "/run"), fresh, covered)
    if scratch is None:
        raise RootfsReadOnly(
            "to give the container the driver's libraries",
            found="a rootfs that is not mounted yet, and no writable tmpfs on /dev or /run",
            do="mount nothing there, or name the shim's RuntimeClass",
        )
    places = ((arch, f"{scratch}/{SCRATCH}/{arch.value}") for arch in arches)
    return Layout(
        tuple(Loader(arch, Libc.NONE, place, searched=False) for arch, place in places),
        writable=False,
        covered=tuple(covered),
        scratch=scratch,
        fresh=fresh,
        shared=_shared(mounts),
    )


class _Look:
    """The search of one image; each result narrows the next."""

    def __init__(self, rootfs: Rootfs, covered: tuple[str, ...]) -> None:
        self._rootfs = rootfs
        self._hidden = Layout((), covered=covered)
        self._taken: set[str] = set()

    def loader(self, arch: Arch) -> Loader:
        """Return the loader of ``arch``, with a directory that no other architecture uses."""
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
        """Return the directory with the C library of ``arch``, without "/usr"."""
        if not self._is_elf(abi.glibc, arch):
            return None
        for home in abi.homes:
            for directory in (f"/usr{home}", home):
                if self._is_elf(f"{directory}/libc.so.6", arch):
                    return home
        return None

    def _other_place(self, abi: _Abi) -> str:
        """Return the default library directory: an existing one, or one to create."""
        there = [home for home in abi.homes if home != "/lib" and self._is_there(home)]
        places = (self._place(home) for home in (*there, abi.home))
        return next(filter(None, places), f"{_LAST_RESORT}{abi.home}")

    def _is_there(self, home: str) -> bool:
        return _kind(self._rootfs, f"/usr{home}") == stat.S_IFDIR

    def _place(self, home: str) -> str | None:
        """Return the real path of /usr + ``home``, unless it is hidden, taken or unreachable."""
        place = _landing(self._rootfs, f"/usr{home}")
        if place is None or place == "/" or place in self._taken or self._hidden.covers(place):
            return None
        return place if _kind(self._rootfs, place) in {None, stat.S_IFDIR} else None

    def _is_elf(self, path: str, arch: Arch) -> bool:
        """Whether ``path`` is a regular ELF file for ``arch``."""
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
    """Return the file type at the end of ``path``; None if missing or unknown."""
    try:
        found = rootfs.stat(path)
    except RootfsError:
        return None
    return None if found is None else stat.S_IFMT(found.st_mode)


def _fresh(mounts: list[Mapping[str, Any]]) -> frozenset[str]:
    """Return where a writable tmpfs is mounted and no later mount covers it."""
    known: dict[str, _Numbered] = {}  # by place, whether it is a writable tmpfs
    for number, mount in enumerate(mounts):
        is_fresh = mount.get("type") == "tmpfs" and not _is_read_only(mount)
        known[_place_of(mount)] = number, is_fresh
    return _seen(known)


def _shared(mounts: list[Mapping[str, Any]]) -> frozenset[str]:
    """Return where mounts also appear on the host: in shared volumes, and in mounts within them.

    Source: mount_namespaces(7): a mount within a shared mount is shared, unless it is made private
        or a slave.
    """
    known: dict[str, _Numbered] = {}  # by place, whether it is shared
    for number, mount in enumerate(mounts):
        place, options = _place_of(mount), options_of(mount)
        is_shared = not (options.isdisjoint(_SHARED) or options.isdisjoint(_BIND))
        is_shared |= _last(known, place)[1] and options.isdisjoint(_NOT_SHARED)
        known[place] = number, is_shared
    return _seen(known)


_Numbered: TypeAlias = tuple[int, bool]  # a mount's number, and whether it satisfies the condition


def _seen(known: Mapping[str, _Numbered]) -> frozenset[str]:
    """Return the places whose last mount satisfies a condition."""
    return frozenset(
        place for place, mount in known.items() if mount[1] and mount == _last(known, place)
    )


def _last(known: Mapping[str, _Numbered], place: str) -> _Numbered:
    """Return the last mount at or above a place, without a search through possibly thousands."""
    return max((known[over] for over in _way_to(place) if over in known), default=(0, False))


def _way_to(place: str) -> Iterator[str]:
    """Yield a path and the directories above it, without the root."""
    yield place
    while (place := os.path.dirname(place)) != "/":
        yield place


def _place_of(mount: Mapping[str, Any]) -> str:
    destination: str = mount["destination"]
    return os.path.normpath("/" + destination.lstrip("/"))


def options_of(mount: Mapping[str, Any]) -> frozenset[str]:
    """Return the options of a mount of the spec, without malformed ones."""
    options = mount.get("options")
    return frozenset(filter(_is_text, options)) if isinstance(options, list) else frozenset()


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_read_only(mount: Mapping[str, Any]) -> bool:
    return "ro" in options_of(mount)


def _near(spec_mounts: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the mounts that can hide one of our files."""
    mounts = (mount for mount in spec_mounts if isinstance(mount.get("destination"), str))
    return [mount for mount in mounts if _place_of(mount).count("/") <= DEEPEST]


def _scratch(places: Iterable[str], fresh: Collection[str], covered: Collection[str]) -> str | None:
    """Return the first tmpfs on which the runtime can create our directory."""
    for place in places:
        home = f"{place}/{SCRATCH}"
        if place in fresh and not any(f"{over}/".startswith(f"{home}/") for over in covered):
            return place
    return None


def coverable(rootfs: Rootfs, layout: Layout, path: str, kind: int = stat.S_IFREG) -> str | None:
    """Return the real path of a file; None if it cannot be mounted over."""
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
