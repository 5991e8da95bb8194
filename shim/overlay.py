"""The overlay that containerd asks for as a container's rootfs, and one layer more in it.

Only what is plain is understood: one mount, of the layers of an image and a fresh upper directory
in which no container has written yet. Of everything else :func:`read_overlay` says None, and
whoever asks does without a layer:

- other options than the layers and ``index=off``: a user namespace (``userxattr``), SELinux
  (``context``), and whatever else changes what the layers mean;
- an upper directory with something in it: what was written there may hide what is below, and was
  written with other layers below it. The kernel defines what that means only if neither metadata
  alone are copied up nor renamed directories are redirected, so neither may be the default;
- extended attributes of the upper directory (default ACLs, labels), which what is made in it
  inherits;
- options that do not fit a page with one layer more (mount(2)).

Source: Documentation/filesystems/overlayfs.rst of the kernel, "Changes to underlying filesystems";
containerd, snapshots/overlay.
"""

from __future__ import annotations

import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Final

    from shim.mounts import Mount

_LAYERS: Final = "lowerdir="
_UPPER: Final = "upperdir="
_WORK: Final = "workdir="
_NO_INDEX: Final = "index=off"

# What has to be off by default for layers to be changed below an upper directory.
_FEATURES: Final = ("metacopy", "redirect_dir")
_PARAMETERS: Final = "/sys/module/overlay/parameters"

# What the kernel leaves in the upper directory of any overlay that was ever mounted.
_HARMLESS: Final = frozenset({"trusted.overlay.uuid"})

# What would end a directory's name in the options, or is already an escape of it.
_SPECIAL: Final = frozenset(":,\\")


class Overlay:
    """An overlay that can have one layer more.

    Attributes:
        layers: its lower directories, the uppermost first.
        upper: the status of its upper directory, which is empty.
    """

    __slots__ = ("_mount", "layers", "upper")

    def __init__(self, mount: Mount, layers: list[str], upper: os.stat_result) -> None:
        self._mount = mount
        self.layers = layers
        self.upper = upper

    def identity(self) -> list[tuple[str, int, int, int]] | None:
        """What tells its layers from all others.

        A snapshot that is committed does not change; another of the same path is another
        directory, made at another time.

        Returns:
            The identity of each; None if one is on another file system than the upper directory.
            That may be one for each layer, as lazy snapshotters mount them: their numbers of
            devices and inodes come again, and their times are what a server says.

        Raises:
            OSError: one is not there.
        """
        found = []
        for layer in self.layers:
            seen = os.stat(layer)
            if seen.st_dev != self.upper.st_dev:
                return None
            found.append((layer, seen.st_dev, seen.st_ino, seen.st_ctime_ns))
        return found

    def options(self, layer: str, upper: str = "", work: str = "") -> list[str]:
        """Its mount options with one layer more, or with another upper directory.

        Args:
            layer: goes on top of the others; "" for none.
            upper: the upper directory in place of its own; "" for its own.
            work: the working directory that belongs to it.
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
        """The mount with a layer on top of its others; None if there is no room for one.

        Args:
            layer: a directory.
        """
        kind, source, target, _ = self._mount
        options = self.options(layer)
        if not _SPECIAL.isdisjoint(layer):
            return None
        fits = len(os.fsencode(",".join(options))) < os.sysconf("SC_PAGE_SIZE")
        return (kind, source, target, options) if fits else None


def read_overlay(mounts: Sequence[Mount]) -> Overlay | None:
    """The overlay that a rootfs is, if it can have one layer more.

    Args:
        mounts: what containerd wants mounted.

    Returns:
        The overlay; None if it is something else, or not one of those of this module's head.
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
            is_fresh = next(entries, None) is None
    except OSError:
        return None  # mounting it will say why
    return Overlay(mounts[0], layers, seen) if is_fresh else None


def _is_on(feature: str) -> bool:
    """Whether overlays have a feature unless they are told not to; a kernel may not know it."""
    try:
        with open(f"{_PARAMETERS}/{feature}", encoding="ascii") as file:
            return file.read().strip() not in ("N", "n", "0")
    except FileNotFoundError:
        return False
