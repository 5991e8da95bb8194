"""The overlay that containerd mounts as a container's rootfs, with an additional layer.

:func:`read_overlay` supports only the plain case: a single mount, of the layers of an image and a
fresh upper directory in which no container has written yet. For anything else it returns None, and
the container gets no prepared layer. This includes:

- options other than the layers and ``index=off``: a user namespace (``userxattr``), SELinux
  (``context``), and others that change the meaning of the layers;
- an upper directory that is not empty: its content may hide what is below, and was written above
  other layers. The kernel defines the result only if it never copies up metadata alone and never
  redirects renamed directories, so both must be off by default;
- extended attributes of the upper directory (default ACLs, labels), because new files in it inherit
  them;
- options that do not fit into a page with an additional layer (mount(2)).

Source: Documentation/filesystems/overlayfs.rst of the kernel, "Changes to underlying filesystems";
containerd, snapshots/overlay.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from typing import Final

from shim.rootfs.mounts import Mount

_LAYERS: Final = "lowerdir="
_UPPER: Final = "upperdir="
_WORK: Final = "workdir="
_NO_INDEX: Final = "index=off"

# Features that must be off by default for layers below an upper directory to change.
_FEATURES: Final = ("metacopy", "redirect_dir")
_PARAMETERS: Final = "/sys/module/overlay/parameters"

# The attribute that the kernel leaves on any overlay's upper directory.
_HARMLESS: Final = frozenset({"trusted.overlay.uuid"})

# Characters that end a directory's name in the options, or escape such a character.
_SPECIAL: Final = frozenset(":,\\")


class Overlay:
    """An overlay that can have an additional layer.

    Attributes:
        layers: its lower directories, topmost first.
        upper: the status of its upper directory.
    """

    __slots__ = ("_mount", "layers", "upper")

    def __init__(self, mount: Mount, layers: list[str], upper: os.stat_result) -> None:
        self._mount = mount
        self.layers = layers
        self.upper = upper

    def identity(self) -> list[tuple[str, int, int, int]] | None:
        """Return values that distinguish its layers from all others.

        A committed snapshot does not change; a later one at the same path is a new directory with a
        new time.

        Returns:
            The path, device, inode and ctime (ns) of each layer. None if a layer is not on the
            upper directory's file system: lazy snapshotters mount a file system for each layer,
            which reuses device and inode numbers, and has a server's times.

        Raises:
            OSError: a layer is missing.
        """
        found = []
        for layer in self.layers:
            seen = os.stat(layer)
            if seen.st_dev != self.upper.st_dev:
                return None
            found.append((layer, seen.st_dev, seen.st_ino, seen.st_ctime_ns))
        return found

    def options(self, layer: str, upper: str = "", work: str = "") -> list[str]:
        """Return its mount options with an additional layer, or with another upper directory.

        Args:
            layer: the layer on top of the others; "" for none.
            upper: another upper directory; "" for its own.
            work: its work directory.
        """
        wanted = []
        for option in self._mount[3]:
            if option.startswith(_LAYERS) and layer:
                wanted.append(f"{_LAYERS}{layer}:{option.removeprefix(_LAYERS)}")
            elif option.startswith(_UPPER) and upper:
                wanted.append(_UPPER + upper)
            elif option.startswith(_WORK) and work:
                wanted.append(_WORK + work)
            else:
                wanted.append(option)
        return wanted

    def with_layer(self, layer: str) -> Mount | None:
        """Return the mount with a directory as its topmost layer; None if it does not fit."""
        kind, source, target, _ = self._mount
        options = self.options(layer)
        if not _SPECIAL.isdisjoint(layer):
            return None
        fits = len(os.fsencode(",".join(options))) < os.sysconf("SC_PAGE_SIZE")
        return (kind, source, target, options) if fits else None


def read_overlay(mounts: Sequence[Mount], *, fresh: bool = True) -> Overlay | None:
    """Return a rootfs' overlay, if it can have an additional layer.

    Args:
        mounts: containerd's mounts for it.
        fresh: whether its upper directory must be empty. It need not be if its content was written
            above the same layer.

    Returns:
        The overlay; None for anything but the plain case described above.
    """
    if len(mounts) != 1 or mounts[0][0] != "overlay" or mounts[0][2].strip("/"):
        return None
    named: dict[str, str] = {}
    for option in mounts[0][3]:
        name, equals, value = option.partition("=")
        if f"{name}{equals}" in (_LAYERS, _UPPER, _WORK) and name not in named:
            named[name] = value
        elif option != _NO_INDEX:
            return None
    if len(named) != len((_LAYERS, _UPPER, _WORK)) or _NO_INDEX not in mounts[0][3]:
        return None
    layers, upper = named["lowerdir"].split(":"), named["upperdir"]
    plain = all(path.startswith("/") for path in (*layers, upper)) and "\\" not in "".join(layers)
    if not plain or any(_is_on(feature) for feature in _FEATURES):
        return None
    try:
        seen = os.stat(upper, follow_symlinks=False)
        if not stat.S_ISDIR(seen.st_mode) or not _HARMLESS.issuperset(os.listxattr(upper)):
            return None
        with os.scandir(upper) as entries:
            is_usable = not fresh or next(entries, None) is None
    except OSError:
        return None  # mounting it will report the reason
    return Overlay(mounts[0], layers, seen) if is_usable else None


def _is_on(feature: str) -> bool:
    """Whether a feature of overlays is on by default; kernels may lack it."""
    try:
        with open(f"{_PARAMETERS}/{feature}", encoding="ascii") as file:
            return file.read().strip() not in ("N", "n", "0")
    except FileNotFoundError:
        return False
