"""Generate the files by which dynamic loaders find libraries.

======================================================= =====================================
/etc/ld.so.cache                                        glibc: the image's entries and ours
/etc/ld.so.conf.d/00-compat-containerd-shim-nvidia.conf glibc: directories of the image that a
                                                        later ``ldconfig`` has to search first
/etc/ld.so.conf.d/00-containerd-shim-nvidia.conf        glibc: directories that it has to search
/etc/ld.so.conf                                         glibc: includes the above
/etc/ld-musl-ARCH.path                                  musl: its whole search path
======================================================= =====================================

Rules
- A file is returned only if needed: libraries in a loader's default directory need no drop-in and
  no path file.
- A cache that the image's own loader cannot use (absent, garbage, a FIFO) is replaced with one that
  has only our entries: that loader has found its libraries in its default directories, and still
  does. A cache of absurd size is an error.
- If no directory comes first, the drop-in for that is emptied, because the driver may be newer than
  at an earlier start of the container.
- musl supports no drop-ins: its file replaces the default path, so the previous path stays first.
- The same image and plan give the same bytes, even if the image already has them.

This module writes nothing.

Source: ldconfig(8) for ld.so.conf; musl's manual and ldso/dynlink.c for the path file, whose
entries are separated by newlines or colons.
"""

from __future__ import annotations

import stat
from collections.abc import Iterable
from typing import Final

from hooks.image.layout import CACHE, Layout, Libc, Loader
from hooks.image.ldcache import Cache, parse, serialise
from hooks.image.rootfs import Rootfs
from hooks.image.rootfs_errors import FileTooLarge, MalformedCache, NotARegularFile
from hooks.plan import Plan
from hooks.words import Arch

CONF: Final = "/etc/ld.so.conf"
DROP_IN: Final = "/etc/ld.so.conf.d/00-containerd-shim-nvidia.conf"
FIRST_DROP_IN: Final = "/etc/ld.so.conf.d/00-compat-containerd-shim-nvidia.conf"
DISPENSABLE: Final = frozenset({CONF, DROP_IN, FIRST_DROP_IN})
"""The files that only a later ``ldconfig`` reads; the loader needs only the cache."""
MUSL_PATHS: Final = {
    Arch.X86_64: "/etc/ld-musl-x86_64.path",
    Arch.I386: "/etc/ld-musl-i386.path",
    Arch.AARCH64: "/etc/ld-musl-aarch64.path",
    Arch.ARM: "/etc/ld-musl-armhf.path",
}

# ld.so.conf, musl's path file and LD_LIBRARY_PATH each read one of these as syntax, not as part of
# a directory's name.
NOT_IN_A_DIRECTORY: Final = frozenset("\n\r\t\0:;,=# ")

_GLIBC_SEARCHES: Final = frozenset({"/lib", "/usr/lib", "/lib64", "/usr/lib64"})
_MUSL_SEARCHES: Final = ("/lib", "/usr/local/lib", "/usr/lib")

# The size for a hundred thousand libraries. A longer cache would delay the whole pod.
_LARGEST_CACHE: Final = 8 << 20
_LARGEST_CONF: Final = 64 << 10

# How distributions include all drop-ins.
_INCLUDES: Final = frozenset(
    {"/etc/ld.so.conf.d/*.conf", "ld.so.conf.d/*.conf", "/etc/ld.so.conf.d/*"}
)


def loader_files(rootfs: Rootfs, plan: Plan, layout: Layout) -> dict[str, bytes]:
    """Return the files by which loaders find a plan's libraries: content by path, in order.

    Raises:
        FileTooLarge: a file to merge is too large.
    """
    files: dict[str, bytes] = {}
    if not plan.libraries and not plan.library_directories:
        return files
    glibc = [loader for loader in layout.loaders if loader.libc is Libc.GLIBC]
    if glibc:
        files.update(_glibc_files(rootfs, plan, glibc))
    for loader in layout.loaders:
        if loader.libc is Libc.MUSL:
            path = _musl_path(rootfs, plan, loader)
            if path is not None:
                files[MUSL_PATHS[loader.arch]] = path
    return files


def _glibc_files(rootfs: Rootfs, plan: Plan, loaders: list[Loader]) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    if plan.first_directories or _is_there(rootfs, FIRST_DROP_IN):
        files[FIRST_DROP_IN] = _lines(plan.first_directories)
    directories = _beyond(loaders, plan)
    if directories:
        files[DROP_IN] = _lines(directories)
    conf = _conf(rootfs, files) if files else None
    if conf is not None:
        files[CONF] = conf
    cache = _cache(rootfs, plan, {loader.arch for loader in loaders})
    if cache is not None:
        files[CACHE] = cache
    return files


def _beyond(loaders: list[Loader], plan: Plan) -> tuple[str, ...]:
    """Return the directories with libraries that glibc's ldconfig does not search by default."""
    searched = _GLIBC_SEARCHES | {loader.directory for loader in loaders if loader.searched}
    unsearched = [loader.directory for loader in loaders if not loader.searched]
    wanted = dict.fromkeys([*unsearched, *plan.library_directories])
    return tuple(directory for directory in wanted if directory not in searched)


def _lines(directories: Iterable[str]) -> bytes:
    return "".join(f"{directory}\n" for directory in directories).encode()


def _is_there(rootfs: Rootfs, path: str) -> bool:
    found = rootfs.stat(path, follow=False)
    return found is not None and stat.S_ISREG(found.st_mode) and found.st_size > 0


def _conf(rootfs: Rootfs, drop_ins: Iterable[str]) -> bytes | None:
    """Return ld.so.conf with our drop-ins included; None if they already are, or cannot be."""
    try:
        text = rootfs.read_file(CONF, _LARGEST_CONF) or b""
    except (NotARegularFile, FileTooLarge):
        return None  # ldconfig would fail too
    missing = dict.fromkeys(drop_ins)
    for line in text.decode("utf-8", "surrogateescape").splitlines():
        words = line.partition("#")[0].split()
        if words[:1] == ["include"]:
            if not _INCLUDES.isdisjoint(words[1:]):
                return None
            missing = {path: None for path in missing if path not in words[1:]}
    if not missing:
        return None
    return "".join(f"include {path}\n" for path in missing).encode() + text


def _cache(rootfs: Rootfs, plan: Plan, arches: set[Arch]) -> bytes | None:
    """Return ld.so.cache with our libraries; None if none are for glibc."""
    libraries = [library for library in plan.libraries if library.arch in arches]
    if not libraries:
        return None
    try:
        before = parse(rootfs.read_file(CACHE, _LARGEST_CACHE) or b"")
    except (NotARegularFile, MalformedCache):
        before = Cache()
    return serialise(before.merge(libraries))


def musl_directories(rootfs: Rootfs, arch: Arch) -> tuple[str, ...]:
    """Return the directories that an image's musl searches, in order.

    Raises:
        FileTooLarge: the file that names them is too large.
    """
    text = _musl_text(rootfs, arch)
    return _MUSL_SEARCHES if text is None else _named_in(text)


def _musl_text(rootfs: Rootfs, arch: Arch) -> bytes | None:
    try:
        return rootfs.read_file(MUSL_PATHS[arch], _LARGEST_CONF)
    except NotARegularFile:
        return None


def _named_in(text: bytes) -> tuple[str, ...]:
    return tuple(text.decode("utf-8", "surrogateescape").replace(":", "\n").split("\n"))


def _musl_path(rootfs: Rootfs, plan: Plan, loader: Loader) -> bytes | None:
    """Return musl's search path with our directories; None if it already has them."""
    text = _musl_text(rootfs, loader.arch)
    known: tuple[str, ...] = _MUSL_SEARCHES
    if text is None:
        wanted = dict.fromkeys(() if loader.searched else (loader.directory,))
    else:
        known = _named_in(text)
        wanted = dict.fromkeys((loader.directory,))
    wanted.update(dict.fromkeys(plan.library_directories))
    first = [directory for directory in plan.first_directories if directory not in known]
    missing = [directory for directory in wanted if directory not in known]
    if not first and not missing:
        return None
    path = "\n".join([*first, *filter(None, known), *missing]) + "\n"
    return path.encode("utf-8", "surrogateescape")
