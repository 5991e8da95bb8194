"""Build the driver root of a simulated node, with NVIDIA's user-space driver.

The files come from Debian's packages of the driver, in one of two layouts:

- ``INSTALLER``: NVIDIA's own installer (the ``.run`` file) and its driver container. Libraries with
  the driver's full version in their name, and links with their sonames, are directly in the
  multiarch directory; programs in /usr/bin; firmware below the version.
- ``DEBIAN``: Debian's packages. Libraries and programs are in directories ``nvidia/current``,
  reached by two steps of absolute links through /etc/alternatives.

The other layouts (:mod:`integration.simulated.layouts`) are the first one, moved.

Files are hard links to the unpacked packages if both are on one file system, otherwise copies. They
are never written to. Files that would be large but are never run (OptiX, NVVM, the ray-tracing
core, firmware), or would need a display server, are replaced by small ones with the right name and
soname.

A scenario may name another version than that of the packages. Names, firmware, procfs and NVML then
all report that version, so a node's driver can be "updated". (The graphics libraries, which load
each other by full name, then do not load; CUDA and NVML do.)

Source: file lists of the packages and of the ``.run`` file's ``.manifest``.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from integration.simulated.archive import (
    machine_sources,
    read_deb822,
    run,
    without_updates,
    write_deb822,
)
from integration.simulated.errors import DriverIncomplete
from integration.simulated.layouts import Layout, rearrange
from integration.simulated.library import build_stand_in
from integration.simulated.packages import default_cache, fetch, in_cache, unpack

PACKAGES: Final = (
    "libcuda1", "libcudadebugger1", "libnvidia-ml1", "libnvidia-cfg1",
    "libnvidia-ptxjitcompiler1", "libnvidia-allocator1", "libnvidia-opticalflow1",
    "libnvidia-encode1", "libnvcuvid1", "libnvidia-fbc1", "libnvidia-ngx1",
    "nvidia-opencl-icd", "nvidia-opencl-common", "libnvidia-pkcs11-openssl3",
    "libnvidia-eglcore", "libnvidia-glcore", "libnvidia-glvkspirv", "libgl1-nvidia-glvnd-glx",
    "libegl-nvidia0", "libglx-nvidia0", "libgles-nvidia1", "libgles-nvidia2",
    "nvidia-egl-common", "nvidia-egl-icd", "nvidia-vulkan-common", "nvidia-vulkan-icd",
    "nvidia-vdpau-driver", "libnvidia-egl-gbm1", "libnvidia-egl-wayland1",
    "nvidia-smi", "nvidia-driver-bin", "nvidia-cuda-mps", "nvidia-persistenced",
    "nvidia-alternative",
)  # fmt: skip

# Packages that only later drivers have; libnvidia-eglcore depends on them.
_LATER_PACKAGES: Final = ("libnvidia-gpucomp",)

# Libraries that also exist for 32-bit programs, without the large ones.
PACKAGES_32: Final = (
    "libcuda1", "libnvidia-ml1", "libnvidia-encode1", "libnvidia-ptxjitcompiler1",
    "libglx-nvidia0", "nvidia-vdpau-driver",
)  # fmt: skip
TRIPLET_32: Final = "i386-linux-gnu"

# The directory that Debian's dynamic loader searches, by the machine's name from uname.
_TRIPLETS: Final = {"x86_64": "x86_64-linux-gnu", "aarch64": "aarch64-linux-gnu"}

# Libraries replaced by stand-ins: name, soname; {v} is the driver's version.
_STAND_INS: Final = (
    ("libnvoptix.so.{v}", "libnvoptix.so.1"),
    ("libnvidia-nvvm.so.{v}", "libnvidia-nvvm.so.4"),
    ("libnvidia-rtcore.so.{v}", "libnvidia-rtcore.so.{v}"),
)
_XORG_STAND_INS: Final = (
    ("usr/lib/xorg/modules/drivers/nvidia_drv.so", "nvidia_drv.so"),
    ("usr/lib/xorg/modules/extensions/libglxserver_nvidia.so.{v}", "libglxserver_nvidia.so"),
)
_DATA_STAND_INS: Final = (
    "lib/firmware/nvidia/{v}/gsp_ga10x.bin",
    "lib/firmware/nvidia/{v}/gsp_tu10x.bin",
    "usr/share/nvidia/nvoptix.bin",
)

# Libraries that are loaded from a directory of their own.
_PLUGINS: Final = {"libvdpau_nvidia": "vdpau/", "nvidia-drm_gbm": "gbm/"}

# Where a package's file goes in the installer's layout: the first rule whose pattern matches.
# {lib} is the multiarch directory. What no rule matches (documentation, units) is left out.
_INSTALLER_RULES: Final = (
    (r"{lib}/nvidia/current/(nvidia/wine/.*)", r"{lib}/\1"),
    *(
        (rf"{{lib}}/nvidia/current/({name}\.so.*)", rf"{{lib}}/{directory}\1")
        for name, directory in _PLUGINS.items()
    ),
    (r"{lib}/(?:nvidia/current/)?([^/]+)", r"{lib}/\1"),
    (r"usr/lib/nvidia/current/(nvidia-[a-z-]+(?:\.sh)?)", r"usr/bin/\1"),
    (r"usr/s?bin/([^/]+)", r"usr/bin/\1"),
    (r"(etc/OpenCL/.*|usr/share/(?:glvnd|egl|vulkan|nvidia)/.*)", r"\1"),
)
_DEBIAN_RULES: Final = (
    (r"({lib}/.*|usr/lib/nvidia/current/nvidia-[a-z-]+(?:\.sh)?|usr/s?bin/[^/]+)", r"\1"),
    (r"(etc/OpenCL/.*|usr/share/(?:glvnd|egl|vulkan|nvidia)/.*)", r"\1"),
)


@dataclass(frozen=True, slots=True)
class DriverFiles:
    """The driver's packages, unpacked."""

    directory: str
    version: str  # the driver's full version, from the name of its CUDA library
    triplet: str  # the multiarch name of the directory with its libraries

    @classmethod
    def fetch(
        cls, cache: str | None = None, *, say: Callable[[str], None] | None = None
    ) -> DriverFiles:
        """Download and unpack the driver's packages, unless they are in the cache.

        Args:
            cache: the cache of packages; :func:`default_cache` if None.
            say: receives a line about each download.

        Raises:
            PackagesError: something is missing and cannot be fetched.
            DriverIncomplete: the packages have no driver for this machine.
        """
        cache = default_cache() if cache is None else cache
        debs = fetch_packages(cache, say)
        directory = os.path.join(cache, "unpacked", "nvidia-driver")
        unpack(debs, directory)
        return cls.at(directory)

    @classmethod
    def at(cls, directory: str, triplet: str = "") -> DriverFiles:
        """Return the driver that is unpacked in ``directory``.

        Args:
            directory: where the packages were unpacked.
            triplet: the multiarch name of its libraries; this machine's if empty.

        Raises:
            DriverIncomplete: it contains no driver for this machine.
        """
        triplet = triplet or _TRIPLETS.get(platform.machine(), f"{platform.machine()}-linux-gnu")
        libraries = os.path.join(directory, "usr/lib", triplet, "nvidia/current")
        with contextlib.suppress(FileNotFoundError):
            for name in sorted(os.listdir(libraries)):
                if match := re.fullmatch(r"libcuda\.so\.(\d+\.\d+(?:\.\d+)?)", name):
                    return cls(directory, match[1], triplet)
        raise DriverIncomplete(
            f"to use the driver's files in {directory}",
            found=f"no libcuda.so.VERSION in {libraries}",
            do="remove that directory; the next run unpacks it again",
        )

    @property
    def nvml(self) -> str:
        """Path of the driver's own NVML library."""
        current = os.path.join(self.directory, "usr/lib", self.triplet, "nvidia/current")
        return os.path.join(current, f"libnvidia-ml.so.{self.version}")


def fetch_packages(cache: str, say: Callable[[str], None] | None = None) -> list[str]:
    """Fetch the driver's packages, and those that only newer drivers have.

    Args:
        cache: the cache of packages.
        say: receives a line about each download.

    Raises:
        PackagesError: something is missing and cannot be fetched.
    """
    wanted = [*PACKAGES, *(name for name in _LATER_PACKAGES if in_cache(name, cache))]
    debs = fetch(wanted, cache, say=say)
    needed = _dependencies(debs[wanted.index("libnvidia-eglcore")])
    more = [name for name in _LATER_PACKAGES if name in needed and name not in wanted]
    return fetch([*wanted, *more], cache, say=say) if more else debs


@functools.cache
def _dependencies(deb: str) -> str:
    """Return the packages that a package needs. A file of the cache never changes."""
    return run(["dpkg-deb", "-f", deb, "Depends"]).stdout


def add_companion(
    root: str, *, version: str, cache: str | None = None, say: Callable[[str], None] | None = None
) -> None:
    """Add the 32-bit libraries to a driver root.

    Args:
        version: the version for file names; the packages may have another.
        cache: the cache of packages; :func:`default_cache` if None.
        say: receives a line about each download.

    Raises:
        PackagesError: something is missing and cannot be fetched.
        DriverIncomplete: the packages contain no driver.
    """
    cache = default_cache() if cache is None else cache
    # None of them is executed, so any release will do. A mirror may lack updates for i386.
    sources = write_deb822(without_updates(read_deb822(machine_sources())), ())
    debs = fetch(
        PACKAGES_32, os.path.join(cache, "i386"), architecture="i386", sources=sources, say=say
    )
    directory = os.path.join(cache, "unpacked", "nvidia-driver-i386")
    unpack(debs, directory)
    files = DriverFiles.at(directory, TRIPLET_32)
    lib = f"usr/lib/{TRIPLET_32}"
    for path, destination, target in _moves(files, version, _INSTALLER_RULES):
        if not target and destination.startswith(lib):
            _place(os.path.join(directory, path), os.path.join(root, destination))


def lay_out(root: str, files: DriverFiles, *, version: str, layout: Layout) -> str:
    """Build a driver root.

    Args:
        root: an empty directory.
        version: the version for file names.

    Returns:
        The path in ``root`` for the NVML library, which the caller adds; links to it exist.

    Raises:
        LibraryNotBuilt: there is no compiler for the stand-ins.
    """
    lib = f"usr/lib/{files.triplet}"
    current = f"{lib}/nvidia/current"
    own = current if layout is Layout.DEBIAN else lib
    nvml = f"{own}/libnvidia-ml.so.{version}"
    rules = _DEBIAN_RULES if layout is Layout.DEBIAN else _INSTALLER_RULES
    for path, destination, target in _moves(files, version, rules):
        if target:
            _link(root, destination, target)
        elif destination != nvml:
            _place(os.path.join(files.directory, path), os.path.join(root, destination))
    _stand_ins(root, files, version, own)
    if layout is Layout.DEBIAN:
        _alternatives(root, lib, files.triplet)
    nvml = rearrange(root, layout, libraries=lib, version=version, late=nvml)
    return os.path.join(root, nvml)


def write_loader_cache(root: str, triplet: str) -> None:
    """Write ``etc/ld.so.cache`` in a driver root, as the driver's installer does."""
    os.makedirs(os.path.join(root, "etc"), exist_ok=True)
    conf = os.path.join(root, "etc/ld.so.conf")
    with open(conf, "w", encoding="ascii") as file:
        file.write("include /etc/ld.so.conf.d/*.conf\n")
        file.write(f"/usr/local/lib/{triplet}\n/lib/{triplet}\n/usr/lib/{triplet}\n")
    # ldconfig enters the root with chroot(2), so absolute links resolve inside it. The soname links
    # exist already; -X keeps ldconfig from adding those of the packages' version.
    subprocess.run(["/sbin/ldconfig", "-X", "-r", root], check=True, capture_output=True)


@functools.cache
def _moves(
    files: DriverFiles, version: str, rules: tuple[tuple[str, str], ...]
) -> Sequence[tuple[str, str, str]]:
    """Return where each file of the packages goes, in order; files without a place are left out.

    A process computes it once: the unpacked packages never change.

    Returns:
        Of each file its path in the packages, its path below the driver root, and a link's target.
    """
    lib = f"usr/lib/{files.triplet}"
    compiled = [(re.compile(p.replace("{lib}", lib)), to.replace("{lib}", lib)) for p, to in rules]

    def destination(path: str) -> str | None:
        found = (match.expand(to) for pattern, to in compiled if (match := pattern.fullmatch(path)))
        return next(found, None)

    moves = []
    for path in sorted(_files_below(files.directory)):
        if (place := destination(path)) is None:
            continue
        target = ""
        source = os.path.join(files.directory, path)
        if os.path.islink(source):
            # The library that a link points to may have moved elsewhere.
            beside = os.path.join(os.path.dirname(path), os.readlink(source))
            target = os.path.relpath(destination(beside) or beside, os.path.dirname(place))
        places = (place.replace(files.version, version), target.replace(files.version, version))
        moves.append((path, *places))
    return moves


def _files_below(directory: str) -> Iterator[str]:
    for parent, _, names in os.walk(directory):
        below = os.path.relpath(parent, directory)
        yield from (os.path.normpath(os.path.join(below, name)) for name in names)


def _link(root: str, path: str, target: str) -> None:
    path = os.path.join(root, path)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    os.symlink(target, path)


def _place(source: str, target: str) -> None:
    """Put a file below the driver root, as a hard link if possible."""
    os.makedirs(os.path.dirname(target), exist_ok=True)
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in {errno.EXDEV, errno.EMLINK, errno.EPERM}:
            raise
        shutil.copy2(source, target)


def _stand_ins(root: str, files: DriverFiles, version: str, own: str) -> None:
    made = f"{files.directory}.stand-ins-{version}"
    os.makedirs(made, exist_ok=True)
    libraries = [(f"{own}/{name}", soname) for name, soname in _STAND_INS]
    for pattern, soname_pattern in (*libraries, *_XORG_STAND_INS):
        path, soname = pattern.format(v=version), soname_pattern.format(v=version)
        name = os.path.basename(path)
        kept = os.path.join(made, name)
        if not os.path.exists(kept):
            unfinished = f"{kept}.{os.getpid()}"
            build_stand_in(unfinished, soname)
            # Never replace another process's file: that process may just be creating a link to it,
            # and link(2) fails with ENOENT if the file's last name is removed in the meantime.
            with contextlib.suppress(FileExistsError):
                os.link(unfinished, kept)
            os.unlink(unfinished)
        _place(kept, os.path.join(root, path))
        if soname != name:
            _link(root, os.path.join(os.path.dirname(path), soname), name)
    for pattern in _DATA_STAND_INS:
        target = os.path.join(root, pattern.format(v=version))
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "w", encoding="ascii") as file:
            file.write("A stand-in for a driver file on a simulated node.\n")


def _alternatives(root: str, lib: str, triplet: str) -> None:
    """Yield the links that update-alternatives creates to files in ``nvidia/current``."""
    current = os.path.join(root, lib, "nvidia/current")
    links = [name for name in os.listdir(current) if os.path.islink(os.path.join(current, name))]
    chosen = [
        (
            f"{lib}/{_PLUGINS.get(name.split('.')[0], '')}{name}",
            f"nvidia--{name}-{triplet}",
            f"{lib}/nvidia/current/{name}",
        )
        for name in links
    ]
    chosen += [
        (f"usr/bin/{name}", f"nvidia--{name}", f"usr/lib/nvidia/current/{name}")
        for name in os.listdir(os.path.join(root, "usr/lib/nvidia/current"))
    ]
    for path, alternative, target in sorted(chosen):
        _link(root, path, f"/etc/alternatives/{alternative}")
        _link(root, f"etc/alternatives/{alternative}", f"/{target}")
    _link(root, "etc/alternatives/nvidia", "/usr/lib/nvidia/current")
