"""The ways to install NVIDIA's driver, each as a table of directories.

A layout lists the places of files below a root. To the files, the root is "/": absolute links stay
below it. For a driver installed on the host, it is the host's root, wherever the files are (NixOS'
links lead to /nix/store, Debian's through /etc/alternatives). A driver container has its own root
file system.

==================  ==================================================================
distribution        packages, and NVIDIA's own installer; also inside a driver container
google              /usr/local/nvidia and its namesakes: Container-Optimized OS, GKE,
                    the mount of a driver there; it may be read-only
opt                 /opt/nvidia: Flatcar, and drivers that are chosen at boot
nixos               links of the running system into its store
talos               a separate glibc next to the system's musl
bottlerocket        below the system's own root for sysroots, or /usr/lib/nvidia/tesla
prefix              a directory that was configured, with lib and bin in it
loader              wherever the root's ld.so.conf and ld.so.cache say
==================  ==================================================================

In a path, ``{v}`` is the driver's version and ``{directory}`` that of an X module. This module
searches nothing; :mod:`hooks.node.roots` decides which layout a node has.

Source: NVIDIA Container Toolkit, internal/lookup; file lists of Debian's and Fedora's packages;
nvidia-alternative of Debian; Google's cos-gpu-installer; nixpkgs, hardware.graphics; the
extensions of Talos; Bottlerocket's kmod packages.
"""

from __future__ import annotations

from typing import Final

from api.values import dataclass


@dataclass(frozen=True, slots=True)
class DriverLayout:
    """One way to install the driver."""

    name: str  # its name in records and messages
    # directories of libraries, best first; each with its subdirectory "vdpau"
    libraries: tuple[str, ...]
    programs: tuple[str, ...] = ()
    data: tuple[str, ...] = ()  # directories of configuration and data
    firmware: tuple[str, ...] = ()
    xorg: tuple[str, ...] = ()  # directories of the X server's modules
    # directories, one of which exists if a driver has this layout; empty to search in any case
    homes: tuple[str, ...] = ()
    # a directory, next to a program's, with the program as NVIDIA built it
    unpatched: str = ""


# Debian has a directory for each driver installed in parallel.
_DEBIAN: Final = ("current", "tesla", "tesla-535", "tesla-470", "tesla-460", "tesla-450")


def _multiarch(triplet: str) -> tuple[str, ...]:
    home = f"/usr/lib/{triplet}"
    return (home, *(f"{home}/nvidia/{variant}" for variant in _DEBIAN))


_FIRMWARE: Final = (
    "/lib/firmware/updates/nvidia/{v}",
    "/lib/firmware/nvidia/{v}",
    "/usr/lib/firmware/nvidia/{v}",
)
_DATA: Final = ("/etc", "/usr/share", "/usr/local/share")

DISTRIBUTION: Final = DriverLayout(
    name="distribution",
    libraries=(
        *_multiarch("x86_64-linux-gnu"),
        *_multiarch("aarch64-linux-gnu"),
        "/usr/lib64",
        "/usr/lib64/nvidia",
        "/lib64",
        "/lib/x86_64-linux-gnu",
        "/lib/aarch64-linux-gnu",
        "/usr/lib",
        "/usr/lib/nvidia",
        "/lib",
        *_multiarch("i386-linux-gnu"),
        *_multiarch("arm-linux-gnueabihf"),
        "/usr/lib32",
        "/usr/lib32/nvidia",
        "/lib32",
    ),
    programs=(
        "/usr/bin",
        "/usr/sbin",
        "/bin",
        "/sbin",
        "/usr/local/bin",
        "/usr/local/sbin",
        *(f"/usr/lib/nvidia/{variant}" for variant in _DEBIAN),
    ),
    data=_DATA,
    firmware=_FIRMWARE,
    xorg=(
        "/usr/lib/xorg/modules/{directory}",
        "/usr/lib64/xorg/modules/{directory}",
        "/usr/lib/x86_64-linux-gnu/nvidia/xorg",
        "/usr/lib/aarch64-linux-gnu/nvidia/xorg",
        *(f"/usr/lib/nvidia/{variant}" for variant in _DEBIAN),
    ),
)


def _below(name: str, *homes: str) -> DriverLayout:
    """Return a layout with the whole driver in these directories, in the usual subdirectories."""

    def each(*places: str) -> tuple[str, ...]:
        return tuple(f"{home}{place}" for home in homes for place in places)

    return DriverLayout(
        name,
        libraries=each(
            "/lib64",
            "/lib",
            "/lib/x86_64-linux-gnu",
            "/lib/aarch64-linux-gnu",
            "/usr/lib64",
            "/usr/lib",
            "/lib32",
        ),
        programs=each("/bin", "/sbin", "/usr/bin"),
        data=(*each("", "/etc", "/share", "/usr/share"), *_DATA),
        firmware=(*each("/firmware/nvidia/{v}", "/lib/firmware/nvidia/{v}"), *_FIRMWARE),
        xorg=each("/lib64/xorg/modules/{directory}", "/lib/xorg/modules/{directory}"),
        homes=tuple(home or "/" for home in homes),
    )


_PREFIX: Final = "prefix "


def prefix(home: str) -> DriverLayout:
    """Return the layout of a driver below one directory, in the usual subdirectories.

    Args:
        home: the directory; "" for the root itself.
    """
    return _below(f"{_PREFIX}{home or '/'}", home)


_TALOS: Final = "/usr/local/glibc"
_SYSROOTS: Final = tuple(
    f"/{arch}-bottlerocket-linux-gnu/sys-root/usr" for arch in ("x86_64", "aarch64")
)

LAYOUTS: Final = (
    DISTRIBUTION,
    _below("google", "/usr/local/nvidia", "/home/kubernetes/bin/nvidia", "/var/lib/nvidia"),
    _below("opt", "/opt/nvidia/current", "/opt/nvidia"),
    DriverLayout(
        name="nixos",
        libraries=("/run/opengl-driver/lib", "/run/opengl-driver-32/lib"),
        programs=("/run/current-system/sw/bin", "/run/opengl-driver/bin"),
        data=("/run/opengl-driver/share", "/run/opengl-driver/etc", *_DATA),
        firmware=(
            "/run/current-system/firmware/nvidia/{v}",
            "/run/booted-system/firmware/nvidia/{v}",
            *_FIRMWARE,
        ),
        xorg=("/run/opengl-driver/lib/xorg/modules/{directory}",),
        homes=("/run/opengl-driver",),
        # NixOS programs need a loader from the store, which no image has.
        unpatched="origBin",
    ),
    DriverLayout(
        name="talos",
        libraries=(f"{_TALOS}/usr/lib", f"{_TALOS}/lib", "/usr/local/lib"),
        programs=("/usr/local/bin", f"{_TALOS}/usr/bin"),
        data=(f"{_TALOS}/usr/share", f"{_TALOS}/etc", *_DATA),
        firmware=_FIRMWARE,
        homes=(_TALOS,),
    ),
    DriverLayout(
        name="bottlerocket",
        libraries=tuple(
            f"{usr}/lib/nvidia{branch}" for usr in (*_SYSROOTS, "/usr") for branch in ("/tesla", "")
        ),
        programs=tuple(
            f"{usr}/{directory}"
            for usr in (*_SYSROOTS, "/usr")
            for directory in ("libexec/nvidia/tesla/bin", "libexec/nvidia/bin", "bin")
        ),
        data=(*(f"{usr}/share" for usr in _SYSROOTS), *_DATA),
        firmware=(*(f"{usr}/lib/firmware/nvidia/{{v}}" for usr in _SYSROOTS), *_FIRMWARE),
        homes=(*_SYSROOTS, "/usr/lib/nvidia"),
    ),
)
"""The possible layouts of a root, in the order of the search."""

LOADER: Final = DriverLayout(
    "loader",
    libraries=(),
    programs=DISTRIBUTION.programs,
    data=DISTRIBUTION.data,
    firmware=DISTRIBUTION.firmware,
    xorg=DISTRIBUTION.xorg,
)
"""Libraries wherever the root's dynamic loader finds them; :mod:`hooks.node.roots` looks there."""


def layout_named(name: str) -> DriverLayout:
    """Return the layout with a name from an inventory.

    Returns:
        The layout; for "loader", without the directories of its libraries.
    """
    if name.startswith(_PREFIX):
        return prefix(name.removeprefix(_PREFIX).rstrip("/"))
    return next((layout for layout in (*LAYOUTS, LOADER) if layout.name == name), DISTRIBUTION)
