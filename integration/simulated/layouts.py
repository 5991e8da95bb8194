"""Move a driver from the installer's layout to where other systems put it.

==============  ==========================================================================
``FEDORA``      the distribution's packages: libraries in /usr/lib64
``SUSE``        the same, with a manifest for 32-bit libraries
``CONTAINER``   the root of a driver container at /run/nvidia/driver, links within it
``GOOGLE``      all of it below /usr/local/nvidia, like Google's installer
``NIXOS``       /run/opengl-driver and the system's profile, full of links into a store
``TALOS``       below the glibc that Talos has in addition to its own C library
``BOTTLEROCKET``  below the system's own root for sysroots
``LOADER``      in an unusual directory that ld.so.conf names
==============  ==========================================================================

The node's root is then that of the whole host, and the driver has to be found in it. The packages
of Fedora, SUSE and NixOS write the paths of libraries into manifests.

Source: Google's cos-gpu-installer; nixpkgs (hardware.graphics, nvidia-x11/builder.sh); the
extensions of Talos; Bottlerocket's packages; NVIDIA's driver container; negativo17's
nvidia-driver.spec; openSUSE's nvidia-open-driver-G07.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from enum import Enum
from typing import Final


class Layout(Enum):
    """A layout of the driver's files below the driver root or the host's root."""

    INSTALLER = "installer"
    DEBIAN = "debian"
    FEDORA = "fedora"
    SUSE = "suse"
    CONTAINER = "container"
    GOOGLE = "google"
    NIXOS = "nixos"
    TALOS = "talos"
    BOTTLEROCKET = "bottlerocket"
    LOADER = "loader"

    @property
    def is_hosts(self) -> bool:
        """Whether the root is the host's, with the driver somewhere in it."""
        return self not in {Layout.INSTALLER, Layout.DEBIAN}


LIBRARIES: Final = "{lib}"
_SYSROOT: Final = "x86_64-bottlerocket-linux-gnu/sys-root/usr"
_STORE: Final = "nix/store/vk5n0xq7-nvidia-x11-{version}"

# Directories of the installer's layout, and where they move; in this order.
_LIB64: Final = {LIBRARIES: "usr/lib64", "usr/lib/xorg": "usr/lib64/xorg"}
_MOVES: Final[Mapping[Layout, Mapping[str, str]]] = {
    Layout.FEDORA: _LIB64,
    Layout.SUSE: _LIB64,
    Layout.CONTAINER: {
        "usr": "run/nvidia/driver/usr",
        "etc": "run/nvidia/driver/etc",
        "lib": "run/nvidia/driver/lib",
    },
    Layout.GOOGLE: {
        LIBRARIES: "usr/local/nvidia/lib64",
        "usr/bin": "usr/local/nvidia/bin",
        "usr/share": "usr/local/nvidia/share",
        "lib/firmware": "usr/local/nvidia/firmware",
    },
    Layout.NIXOS: {
        LIBRARIES: f"{_STORE}/lib",
        "usr/share": f"{_STORE}/share",
        "usr/bin": f"{_STORE}-bin/origBin",
        "etc/OpenCL": f"{_STORE}/etc/OpenCL",
    },
    Layout.TALOS: {LIBRARIES: "usr/local/glibc/usr/lib", "usr/bin": "usr/local/bin"},
    Layout.BOTTLEROCKET: {
        LIBRARIES: f"{_SYSROOT}/lib/nvidia/tesla",
        "usr/bin": f"{_SYSROOT}/libexec/nvidia/tesla/bin",
    },
    Layout.LOADER: {LIBRARIES: "srv/vendor/nvidia/lib", "usr/bin": "usr/local/sbin"},
}

_ICD: Final = "share/vulkan/icd.d/nvidia_icd.json"
_OF_MACHINE: Final = f"share/vulkan/icd.d/nvidia_icd.{platform.machine()}.json"
_OF_NIXOS: Final = {
    _ICD: _OF_MACHINE,
    **{
        path: path
        for path in (
            "etc/OpenCL/vendors/nvidia.icd",
            "share/vulkan/implicit_layer.d/nvidia_layers.json",
            "share/glvnd/egl_vendor.d/10_nvidia.json",
            "share/egl/egl_external_platform.d/10_nvidia_wayland.json",
            "share/egl/egl_external_platform.d/15_nvidia_gbm.json",
        )
    },
}
# Manifests that packages change: their path before, after, and the directory of their library.
_MANIFESTS: Final[Mapping[Layout, tuple[tuple[str, str, str], ...]]] = {
    Layout.FEDORA: ((f"usr/{_ICD}", f"usr/{_OF_MACHINE}", "/usr/lib64"),),
    Layout.SUSE: (
        (f"usr/{_ICD}", f"usr/{_OF_MACHINE}", "/usr/lib64"),
        (f"usr/{_ICD}", "usr/share/vulkan/icd.d/nvidia_icd.i686.json", "/usr/lib"),
    ),
    Layout.NIXOS: tuple(
        (f"{_STORE}/{before}", f"{_STORE}/{after}", f"/{_STORE}/lib")
        for before, after in _OF_NIXOS.items()
    ),
}

# NixOS profiles: each is a directory of links to the contents of a store directory.
_PROFILES: Final = {
    "run/opengl-driver/lib": f"{_STORE}/lib",
    "run/opengl-driver/share": f"{_STORE}/share",
    "run/opengl-driver/etc": f"{_STORE}/etc",
    "run/current-system/sw/bin": f"{_STORE}-bin/bin",
}


def rearrange(root: str, layout: Layout, *, libraries: str, version: str, late: str) -> str:
    """Move a driver from the installer's layout.

    Args:
        root: the directory with the driver.
        libraries: the directory of its libraries, relative to ``root``.
        late: the path in ``libraries`` of a file that is added later, below ``root``.

    Returns:
        The path in ``root`` for that file.
    """
    for old, new in _MOVES.get(layout, {}).items():
        source = old.replace(LIBRARIES, libraries)
        target = new.format(version=version)
        os.makedirs(os.path.join(root, os.path.dirname(target)), exist_ok=True)
        os.rename(os.path.join(root, source), os.path.join(root, target))
        if late.startswith(f"{source}/"):
            late = target + late.removeprefix(source)
    _change_manifests(root, layout, version)
    if layout is Layout.NIXOS:
        _fill_profiles(root, version, late)
    if layout is Layout.LOADER:
        conf = os.path.join(root, "etc/ld.so.conf.d")
        os.makedirs(conf, exist_ok=True)
        with open(os.path.join(conf, "nvidia.conf"), "w", encoding="ascii") as file:
            file.write(f"/{_MOVES[layout][LIBRARIES]}\n")
    return late


def _change_manifests(root: str, layout: Layout, version: str) -> None:
    """Write the directories of libraries into manifests, as packages do."""
    changed = {}
    gone = []
    for each in _MANIFESTS.get(layout, ()):
        before, after, directory = (part.format(version=version) for part in each)
        gone.append(os.path.join(root, before))
        with open(gone[-1], encoding="ascii") as file:
            text = re.sub(r"lib\w+[\w-]*\.so", rf"{directory}/\g<0>", file.read())
        changed[os.path.join(root, after)] = text
    # They are links to the packages' files, which stay as they are.
    for path in dict.fromkeys(gone):
        os.unlink(path)
    for path, text in changed.items():
        with open(path, "x", encoding="ascii") as file:
            file.write(text)


def _fill_profiles(root: str, version: str, late: str) -> None:
    # NixOS' builders belong to a group that may add to the store.
    os.chown(os.path.join(root, "nix/store"), 0, 30000)
    os.chmod(os.path.join(root, "nix/store"), 0o1775)  # noqa: S103 - like NixOS
    store = _STORE.format(version=version)
    original, patched = (os.path.join(root, f"{store}-bin/{name}") for name in ("origBin", "bin"))
    os.mkdir(patched)
    for name in os.listdir(original):
        # The real ones need a loader in the store; these must not run either.
        with open(os.path.join(patched, name), "w", encoding="ascii") as file:
            file.write("#!/nix/store/none/bin/sh\n")
        os.chmod(os.path.join(patched, name), 0o755)  # noqa: S103 - like every program of NixOS
    for profile, place in _PROFILES.items():
        target = place.format(version=version)
        names = set(os.listdir(os.path.join(root, target)))
        if os.path.dirname(late) == target:
            names.add(os.path.basename(late))
        os.makedirs(os.path.join(root, profile))
        for name in names:
            os.symlink(f"/{target}/{name}", os.path.join(root, profile, name))
