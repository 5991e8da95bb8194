"""The driver's files, nodes and sockets for each capability.

Rules
- A capability names rows. The rows of all granted capabilities are united; :data:`ALWAYS` comes
  with every capability.
- A name is matched only against the driver's own directories, never the image's. ``{v}`` is the
  driver's full version; one ``*`` stands for any text without a slash.
- A row without a match is not an error (drivers differ); ``explain`` lists it.
- A library is mounted under its own name in a directory that the image's dynamic loader searches.
  Its soname comes from the file itself (DT_SONAME) and becomes a link next to it; ``links`` are
  more links. One with a slash is in a subdirectory.
- ``compat32`` has no rows: it also requests the libraries of the other capabilities for the 32-bit
  architecture.
- ``video`` needs all libraries of ``compute``, and ``display`` all of ``graphics``.
- A library of the driver's version that no row names (:data:`OTHERS`) is included only if all
  capabilities are granted. Without ``compat32``, that means all for this machine's architecture.

The table includes new files of the driver branches 550 to 615: the shader compiler
libnvidia-gpucomp, Vulkan SC (libnvidia-vksc-core and its compiler nvidia-pcc), EGL's platforms for
X11 and the second one for Wayland, libnvidia-present, libnvsdm, libnvidia-tileiras, and
libnvcuextend, which libcuda opens on arm64. These libraries of the driver are left out
(:data:`LEFT_OUT`), as in NVIDIA's older tool:

- libnvidia-sandboxutils, which lists for host tools the files that a container needs; inside a
  container it reports on stderr that they are missing;
- libnvidia-gtk2, -gtk3 and -wayland-client, which are parts of nvidia-settings;
- libnvidia-api and the DLLs for Wine, which do not have the driver's version in their names.

The MPS daemon's pipes are mounted writable, since its clients connect to them; a client must also
share the daemon's IPC namespace (``--ipc=host``). If the daemon has another directory
(``CUDA_MPS_PIPE_DIRECTORY``), the component that sets this variable mounts it, as Kubernetes'
device plugin does.

Source: the user-guide's table of driver capabilities; libnvidia-container's and nvcdi's
lists; the installer's manifest (.manifest) of the driver packages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Final, TypeAlias, TypeVar

from api.values import dataclass
from hooks.words import CAPABILITIES, Arch, Capability


@dataclass(frozen=True, slots=True)
class Library:
    """A shared library."""

    name: str  # its file name, with ``{v}`` or ``*``
    links: tuple[str, ...] = ()  # more names for it, besides its soname
    directory: str = ""  # its subdirectory of the library directory


@dataclass(frozen=True, slots=True)
class Program:
    """A program, mounted at /usr/bin."""

    name: str


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A configuration file that the driver or other libraries read."""

    name: str  # its path below one of the driver root's data directories, with ``{v}``
    below: str  # the container's directory for it
    arch: Arch | None = None  # the architecture of its libraries; None for any


@dataclass(frozen=True, slots=True)
class XorgModule:
    """A module of the X server."""

    name: str  # its file name, with ``{v}``
    directory: str  # the directory below the X server's modules
    links: tuple[str, ...] = ()  # more names for it


@dataclass(frozen=True, slots=True)
class Firmware:
    """Firmware that user space reads: ``name`` below /lib/firmware/nvidia/{v}."""

    name: str


@dataclass(frozen=True, slots=True)
class Socket:
    """A host service's socket, or a directory of its pipes, at the same path inside."""

    path: str
    service: str  # of SERVICES
    is_directory: bool = False


Row: TypeAlias = Library | Program | ConfigFile | XorgModule | Firmware | Socket


@dataclass(frozen=True, slots=True)
class ControlNode:
    """A device node that belongs to no single GPU."""

    path: str  # in the container, and below the host's device directory
    drivers: tuple[str, ...]  # the names of its driver in /proc/devices; one must be there
    minor: int | None = None  # its minor number; None for any


FRONTEND: Final = ("nvidia", "nvidia-frontend")
"""The kernel module's names in /proc/devices: today's, and before release 550."""

CONTROL: Final = ControlNode("/dev/nvidiactl", FRONTEND, 255)
MODESET: Final = ControlNode("/dev/nvidia-modeset", FRONTEND, 254)
UVM: Final = ControlNode("/dev/nvidia-uvm", ("nvidia-uvm",), 0)
UVM_TOOLS: Final = ControlNode("/dev/nvidia-uvm-tools", ("nvidia-uvm",), 1)

# The allocator serves CUDA and, as the GBM backend, graphics.
_ALLOCATOR: Final = Library("libnvidia-allocator.so.{v}", links=("libnvidia-allocator.so",))
_GBM_BACKEND: Final = Library("libnvidia-allocator.so.{v}", links=("gbm/nvidia-drm_gbm.so",))
_SHADER_COMPILER: Final = Library("libnvidia-gpucomp.so.{v}")

_COMPUTE_LIBRARIES: Final = (
    Library("libcuda.so.{v}", links=("libcuda.so",)),
    Library("libcudadebugger.so.{v}"),
    Library("libnvidia-opencl.so.{v}"),
    Library("libnvidia-ptxjitcompiler.so.{v}", links=("libnvidia-ptxjitcompiler.so",)),
    Library("libnvidia-fatbinaryloader.so.{v}"),
    Library("libnvidia-compiler.so.{v}"),
    Library("libnvidia-pkcs11.so.{v}"),
    Library("libnvidia-pkcs11-openssl3.so.{v}"),
    Library("libnvidia-nvvm.so.{v}", links=("libnvidia-nvvm.so",)),
    Library("libnvidia-nvvm70.so.*"),
    Library("libnvidia-tileiras.so.{v}"),
    Library("libnvcuextend.so.{v}"),
    _ALLOCATOR,
    _SHADER_COMPILER,
)

_GRAPHICS_LIBRARIES: Final = (
    Library("libnvidia-eglcore.so.{v}"),
    Library("libnvidia-glcore.so.{v}"),
    Library("libnvidia-tls.so.{v}"),
    Library("libnvidia-glsi.so.{v}"),
    Library("libnvidia-fbc.so.{v}", links=("libnvidia-fbc.so",)),
    Library("libnvidia-ifr.so.{v}", links=("libnvidia-ifr.so",)),
    Library("libnvidia-rtcore.so.{v}"),
    Library("libnvoptix.so.{v}"),
    Library("libGLX_nvidia.so.{v}", links=("libGLX_indirect.so.0",)),
    Library("libEGL_nvidia.so.{v}"),
    Library("libGLESv2_nvidia.so.{v}"),
    Library("libGLESv1_CM_nvidia.so.{v}"),
    Library("libnvidia-glvkspirv.so.{v}"),
    Library("libnvidia-cbl.so.{v}"),
    Library("libnvidia-vulkan-producer.so.{v}", links=("libnvidia-vulkan-producer.so",)),
    Library("libnvidia-vksc-core.so.{v}"),
    Library("libnvidia-present.so.{v}"),
    Library("libnvidia-egl-gbm.so.1.*"),
    Library("libnvidia-egl-wayland.so.1.*"),
    Library("libnvidia-egl-wayland2.so.1.*"),
    Library("libnvidia-egl-xcb.so.1.*"),
    Library("libnvidia-egl-xlib.so.1.*"),
    _ALLOCATOR,
    _GBM_BACKEND,
    _SHADER_COMPILER,
)

_GRAPHICS_FILES: Final = (
    ConfigFile("glvnd/egl_vendor.d/10_nvidia.json", "/usr/share"),
    ConfigFile("egl/egl_external_platform.d/15_nvidia_gbm.json", "/usr/share"),
    ConfigFile("egl/egl_external_platform.d/10_nvidia_wayland.json", "/usr/share"),
    ConfigFile("egl/egl_external_platform.d/09_nvidia_wayland2.json", "/usr/share"),
    ConfigFile("egl/egl_external_platform.d/20_nvidia_xcb.json", "/usr/share"),
    ConfigFile("egl/egl_external_platform.d/20_nvidia_xlib.json", "/usr/share"),
    ConfigFile("nvidia/nvoptix.bin", "/usr/share"),
    ConfigFile("vulkan/icd.d/nvidia_icd.json", "/etc"),
    ConfigFile("vulkan/icd.d/nvidia_icd.x86_64.json", "/etc", Arch.X86_64),
    ConfigFile("vulkan/icd.d/nvidia_icd.aarch64.json", "/etc", Arch.AARCH64),
    ConfigFile("vulkan/icd.d/nvidia_icd.i686.json", "/etc", Arch.I386),
    ConfigFile("vulkan/implicit_layer.d/nvidia_layers.json", "/etc"),
    ConfigFile("vulkansc/icd.d/nvidia_icd.json", "/etc"),
    ConfigFile("vulkansc/icd.d/nvidia_icd_vksc.json", "/etc"),
    ConfigFile("vulkansc/icd.d/nvidia_icd.x86_64.json", "/etc", Arch.X86_64),
    ConfigFile("vulkansc/icd.d/nvidia_icd.aarch64.json", "/etc", Arch.AARCH64),
)

_PIPELINE_COMPILER: Final = Program("nvidia-pcc")

FILES: Final[dict[str, tuple[Row, ...]]] = {
    Capability.UTILITY: (
        Library("libnvidia-ml.so.{v}", links=("libnvidia-ml.so",)),
        Library("libnvidia-cfg.so.{v}", links=("libnvidia-cfg.so",)),
        Library("libnvidia-nscq.so.{v}"),
        Library("libnvsdm.so.{v}"),
        Program("nvidia-smi"),
        Program("nvidia-debugdump"),
        Program("nvidia-persistenced"),
        Program("nv-fabricmanager"),
        Program("nvidia-imex"),
        Program("nvidia-imex-ctl"),
        Socket("/run/nvidia-persistenced/socket", "persistenced"),
        Socket("/run/nvidia-fabricmanager/socket", "fabricmanager"),
    ),
    Capability.COMPUTE: (
        *_COMPUTE_LIBRARIES,
        Program("nvidia-cuda-mps-control"),
        Program("nvidia-cuda-mps-server"),
        ConfigFile("OpenCL/vendors/nvidia.icd", "/etc"),
        ConfigFile("nvidia/nvidia-application-profiles-{v}-rc", "/usr/share"),
        Socket("/tmp/nvidia-mps", "mps", is_directory=True),  # noqa: S108 - MPS' default
    ),
    Capability.VIDEO: (
        *_COMPUTE_LIBRARIES,
        Library("libvdpau_nvidia.so.{v}", links=("libvdpau_nvidia.so",), directory="vdpau"),
        Library("libnvidia-encode.so.{v}", links=("libnvidia-encode.so",)),
        Library("libnvidia-opticalflow.so.{v}", links=("libnvidia-opticalflow.so",)),
        Library("libnvcuvid.so.{v}", links=("libnvcuvid.so",)),
    ),
    Capability.GRAPHICS: (*_GRAPHICS_LIBRARIES, *_GRAPHICS_FILES, _PIPELINE_COMPILER),
    Capability.DISPLAY: (
        *_GRAPHICS_LIBRARIES,
        *_GRAPHICS_FILES,
        _PIPELINE_COMPILER,
        ConfigFile("X11/xorg.conf.d/10-nvidia.conf", "/usr/share"),
        ConfigFile("X11/xorg.conf.d/nvidia-drm-outputclass.conf", "/usr/share"),
        XorgModule("nvidia_drv.so", "drivers"),
        XorgModule("libglxserver_nvidia.so.{v}", "extensions", links=("libglxserver_nvidia.so",)),
        Program("nvidia-xconfig"),
    ),
    Capability.NGX: (Library("libnvidia-ngx.so.{v}", links=("libnvidia-ngx.so",)),),
    Capability.COMPAT32: (),
}

ALWAYS: Final[tuple[Row, ...]] = (Firmware("gsp*.bin"),)

OTHERS: Final = Library("*.so.{v}")
"""Libraries of the driver that belong to no capability, as later drivers may have."""

LEFT_OUT: Final = (
    "libnvidia-sandboxutils.so.{v}",
    "libnvidia-gtk2.so.{v}",
    "libnvidia-gtk3.so.{v}",
    "libnvidia-wayland-client.so.{v}",
)
"""The driver's libraries that no container gets."""

_EVERY: Final = CAPABILITIES - {Capability.COMPAT32}

NODES: Final[dict[str, tuple[ControlNode, ...]]] = {
    Capability.UTILITY: (),
    Capability.COMPUTE: (UVM, UVM_TOOLS),
    Capability.VIDEO: (UVM, UVM_TOOLS),
    Capability.GRAPHICS: (MODESET,),
    Capability.DISPLAY: (MODESET,),
    Capability.NGX: (),
    Capability.COMPAT32: (),
}
"""Control nodes besides :data:`CONTROL`, which every container with a driver has."""

_DRM: Final = frozenset({Capability.GRAPHICS, Capability.DISPLAY})


_Item = TypeVar("_Item")


def rows_of(capabilities: Iterable[str]) -> tuple[Row, ...]:
    """Return the rows of capabilities and :data:`ALWAYS`, each once, in the table's order.

    Args:
        capabilities: some of :data:`hooks.words.CAPABILITIES`.
    """
    granted = frozenset(capabilities)
    return _united(FILES, granted, (*ALWAYS, OTHERS) if granted >= _EVERY else ALWAYS)


def nodes_of(capabilities: Iterable[str]) -> tuple[ControlNode, ...]:
    """Return the control nodes of capabilities, :data:`CONTROL` first."""
    return (CONTROL, *_united(NODES, capabilities, ()))


def wants_drm(capabilities: Iterable[str]) -> bool:
    """Whether a capability includes the GPUs' nodes below /dev/dri."""
    return not _DRM.isdisjoint(capabilities)


@cache
def every_row() -> tuple[Row, ...]:
    """Return all rows of the table, to search a driver for."""
    return rows_of(CAPABILITIES)


def _united(
    table: dict[str, tuple[_Item, ...]], capabilities: Iterable[str], more: tuple[_Item, ...]
) -> tuple[_Item, ...]:
    granted = frozenset(capabilities)

    def items() -> Iterator[_Item]:
        for capability, rows in table.items():
            if capability in granted:
                yield from rows
        yield from more

    return tuple(dict.fromkeys(items()))
