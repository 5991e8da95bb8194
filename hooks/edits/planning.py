"""Turn a grant into a plan: the edits that implement it.

Rules
- A library is mounted read-only at ``LIBRARY DIRECTORY/FILE NAME``. The image's own dynamic loader
  searches the directory for that architecture (the layout knows it). Next to the library come links
  for its soname and the names of its row. Each of these names also becomes an entry of the loader's
  cache that leads to the file, so loaders find libraries even where links cannot be written.
- 32-bit libraries are included only with ``compat32``.
- The control node is always included, and others by capability. Nodes below /dev/dri are included
  with graphics and display, for GPUs, and for MIG devices whose profile has a graphics engine.
  They come with a /dev/dri/by-path that maps only these nodes to their GPUs.
- Graphics and display include an application profile that shows only these GPUs to EGL and Vulkan.
  Without it, they try every GPU that procfs lists, even without a node in the container, and fail
  or take seconds. Its setting is a mask of GPU minor numbers. A container with a GPU beyond the
  mask gets no profile, because that would hide a granted GPU.
- No process may create nodes (:mod:`hooks.node.host_setup`).
- If not everyone may open a node, its group is added as a supplementary group.
- If a manifest names one of the container's libraries by its host path, the container gets a copy
  with only the library's name. If it has libraries of two architectures, a manifest for one of them
  has the library's path in the container, so that the other loader ignores it.
- Files of the table that the node lacks are listed in ``missing``, without an error. The grant has
  already checked the devices requested by name.

NVIDIA_VISIBLE_DEVICES keeps the user's value. NVIDIA's own runtime sets it to ``void``, so that a
second runtime does not inject again, but applications that read it then cannot tell which GPUs they
got. Here a second pass is harmless: :func:`hooks.edits.mutation.apply` adds nothing that is already
there.

Source: libnvidia-container's nvc_mount.c for the files of each capability; nvcdi for destinations
and options; the driver's README, "Application Profiles", EGLVisibleDGPUDevices.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterable
from typing import Final

from hooks.edits.grant import Grant
from hooks.image.layout import Layout
from hooks.node.capabilities import (
    OTHERS,
    ConfigFile,
    Firmware,
    Library,
    Program,
    Socket,
    XorgModule,
    nodes_of,
    rows_of,
    wants_drm,
)
from hooks.node.driver import DriverFile, LibraryFile, places
from hooks.node.gpus import Gpu
from hooks.node.host_setup import without_node_making
from hooks.node.inventory import Inventory
from hooks.node.manifests import library_paths, rename_libraries
from hooks.plan import (
    CachedLibrary,
    Device,
    File,
    Link,
    LinkDirectory,
    Missing,
    Mount,
    Plan,
    device_of,
    groups_of,
)
from hooks.words import Arch, Capability

LIBCUDA_DIRECTORY: Final = "NVIDIA_CTK_LIBCUDA_DIR"
"""The directory of libcuda, for programs that search for it; NVIDIA's runtime sets it too."""

TRITON_DIRECTORY: Final = "TRITON_LIBCUDA_PATH"
"""The same for Triton, which would otherwise run /sbin/ldconfig to find it, and fail without."""

_PROGRAMS: Final = "/usr/bin"
_FIRMWARE: Final = "/lib/firmware/nvidia"
_SOCKET_OPTIONS: Final = ("nosuid", "nodev", "rbind", "rprivate", "noexec")

_BY_PATH: Final = "/dev/dri/by-path"
_CONTROL_REASON: Final = "control device"


def arches_of(grant: Grant | None, inventory: Inventory | None) -> tuple[Arch, ...]:
    """Return the architectures for which the container gets libraries.

    Returns:
        The driver's own, and its 32-bit companion with ``compat32``. Without a request for the
        driver, this machine's, if supported.
    """
    if grant is None or inventory is None:
        return tuple(arch for arch in Arch if arch.value == os.uname().machine)
    native, narrow = inventory.driver.arch, inventory.driver.arch32
    wanted = narrow is not None and Capability.COMPAT32 in grant.capabilities
    return (native, narrow) if wanted and narrow is not None else (native,)


def make_plan(grant: Grant, inventory: Inventory, layout: Layout) -> Plan:
    """Return the edits of a grant; all their sources are files of the inventory."""
    work = _Work(grant, inventory, layout)
    work.add_devices()
    for row in rows_of(grant.capabilities):
        match row:
            case Library():
                work.add_library(row)
            case Program(name):
                work.add_file(row, f"{_PROGRAMS}/{name}", "program")
            case ConfigFile():
                work.add_configuration(row)
            case XorgModule():
                work.add_xorg_module(row)
            case Firmware():
                work.add_firmware(row)
            case Socket():
                work.add_socket(row)
    return work.plan()


def plan_devices(grant: Grant, inventory: Inventory) -> tuple[Device, ...]:
    """Return only the devices of :func:`make_plan`'s result."""
    work = _Work(grant, inventory, Layout(()))
    work.add_devices()
    return work.devices


class _Work:
    """A plan under construction."""

    def __init__(self, grant: Grant, inventory: Inventory, layout: Layout) -> None:
        self._grant = grant
        self._inventory = inventory
        self._layout = layout
        self._devices: dict[str, Device] = {}
        self._shown: dict[int, Gpu] = {}
        driver = inventory.driver
        self._libraries: dict[tuple[str, Arch], list[LibraryFile]] = {}
        for library in driver.libraries:
            self._libraries.setdefault((library.row, library.arch), []).append(library)
        there = {library.arch for library in driver.libraries}
        self._arches = tuple(arch for arch in arches_of(grant, inventory) if arch in there)
        self._found: dict[str, list[DriverFile]] = {}
        for file in driver.files:
            self._found.setdefault(file.row, []).append(file)
        # Keyed by destination and by path: rows may share a library.
        self._mounts: dict[str, Mount] = {}
        self._links: dict[str, Link] = {}
        self._cached: dict[tuple[str, Arch], CachedLibrary] = {}
        self._directories: dict[str, None] = {}
        self._environment: dict[str, str] = {}
        self._changed: list[File] = []
        self._missing = [
            Missing(f"all libraries for {arch.value}", driver.library_directories)
            for arch in arches_of(grant, inventory)
            if arch not in there
        ]

    @property
    def devices(self) -> tuple[Device, ...]:
        return tuple(self._devices.values())

    def plan(self) -> Plan:
        return Plan(
            devices=self.devices,
            mounts=tuple(self._mounts.values()),
            environment=tuple(self._environment.items()),
            additional_gids=groups_of(self._devices.values()),
            links=tuple(self._links.values()),
            libraries=tuple(self._cached.values()),
            library_directories=tuple(self._directories),
            missing=tuple(self._missing),
            files=(*self._changed, *self._profile()),
            link_directories=self._link_directories(),
            proc_files=tuple(filter(None, [without_node_making(self._inventory.parameters)])),
        )

    def _profile(self) -> tuple[File, ...]:
        if not wants_drm(self._grant.capabilities):
            return ()
        profile = application_profile(gpu.minor for gpu in self._shown.values())
        return (profile,) if profile is not None else ()

    def _link_directories(self) -> tuple[LinkDirectory, ...]:
        links = tuple(
            (f"pci-{gpu.bus_id}-{kind}", f"../{name}")
            for gpu in self._shown.values()
            for name in gpu.drm
            if f"/dev/dri/{name}" in self._devices
            for kind in ("render" if name.startswith("render") else "card",)
        )
        return (LinkDirectory(_BY_PATH, links, "DRM nodes by GPU"),) if links else ()

    def add_devices(self) -> None:
        grant, gpus = self._grant, self._inventory.gpus
        for control in nodes_of(grant.capabilities):
            self._add_node(control.path, _CONTROL_REASON)
        with_drm = wants_drm(grant.capabilities)
        for gpu in grant.gpus:
            self._shown[gpu.minor] = gpu
            for path in (gpu.path, *(gpu.drm_paths if with_drm else ())):
                self._add_node(path, str(gpu))
        for device in grant.mig_devices:
            gpu = gpus[device.gpu]
            self._shown[gpu.minor] = gpu
            drm = gpu.drm_paths if with_drm and device.has_graphics else ()
            for path in (gpu.path, *device.paths, *drm):
                self._add_node(path, str(device))

    def _add_node(self, path: str, reason: str) -> None:
        node = self._inventory.nodes.usable.get(path)
        if node is None:
            self._missing.append(Missing(path, (self._inventory.nodes.faults.get(path, path),)))
        else:
            self._devices.setdefault(path, device_of(node, reason))

    def add_library(self, row: Library) -> None:
        driver = self._inventory.driver
        for arch in self._arches:
            files = self._libraries.get((row.name, arch), ())
            for file in files:
                self._add_library_file(row, file)
            if not files and row != OTHERS:
                what = row.name.format(v=driver.version)
                self._missing.append(Missing(f"{what} ({arch.value})", driver.library_directories))

    def _add_library_file(self, row: Library, file: LibraryFile) -> None:
        searched = self._layout.library_directory(file.arch)
        directory = f"{searched}/{row.directory}" if row.directory else searched
        path = f"{directory}/{file.name}"
        self._directories[directory] = None
        kind = " of no known capability" if row == OTHERS else ""
        self._add_mount(file.source, path, f"{file.arch.value} library{kind}")
        soname = file.soname or file.name
        self._add_link(f"{directory}/{soname}", file.name, "soname")
        for link in row.links:
            # In a subdirectory, a bare file name would not reach the target.
            deeper = "/" in link
            self._add_link(f"{directory}/{link}", path if deeper else soname, "development link")
        names = (soname, *(link for link in row.links if "/" not in link))
        for name in names:
            self._cached[name, file.arch] = CachedLibrary(name, path, file.arch)
        if soname == "libcuda.so.1" and file.arch is self._inventory.driver.arch:
            self._environment[LIBCUDA_DIRECTORY] = directory
            if not self._layout.has_ldconfig and Capability.COMPUTE in self._grant.capabilities:
                self._environment[TRITON_DIRECTORY] = directory

    def add_configuration(self, row: ConfigFile) -> None:
        if row.arch is not None and row.arch not in self._arches:
            return
        path = f"{row.below}/{row.name.format(v=self._inventory.driver.version)}"
        for file in self._files(row):
            names = self._names_for(row, file)
            if names:
                content = rename_libraries(file.name, file.manifest, names).encode()
                told = ", ".join(f"{new} in place of {old}" for old, new in names.items())
                self._changed.append(
                    File(path, content, reason=f"names {told}", source=file.source)
                )
            else:
                self._add_mount(file.source, path, "configuration")

    def _names_for(self, row: ConfigFile, file: DriverFile) -> dict[str, str]:
        """Return what replaces the host path of each of the container's libraries in manifests."""
        arch = row.arch or self._inventory.driver.arch
        names = {}
        for path in library_paths(file.name, file.manifest) if file.manifest else ():
            name = posixpath.basename(path)
            library = self._cached.get((name, arch))
            if library is not None:
                names[path] = library.path if row.arch and len(self._arches) > 1 else name
        return names

    def add_xorg_module(self, row: XorgModule) -> None:
        # The X server searches below its distribution's library directory.
        home = self._layout.library_directory(self._inventory.driver.arch)
        below = "/usr/lib64" if posixpath.basename(home) == "lib64" else "/usr/lib"
        directory = f"{below}/xorg/modules/{row.directory}"
        name = row.name.format(v=self._inventory.driver.version)
        if self.add_file(row, f"{directory}/{name}", "X module"):
            for link in row.links:
                self._add_link(f"{directory}/{link}", name, "X module")

    def add_firmware(self, row: Firmware) -> None:
        version = self._inventory.driver.version
        for file in self._files(row):
            self._add_mount(file.source, f"{_FIRMWARE}/{version}/{file.name}", "firmware")

    def add_socket(self, row: Socket) -> None:
        source = self._inventory.sockets.get(row.path)
        if source is None:
            self._missing.append(Missing(row.path, (row.path,)))
        else:
            self._add_mount(source, row.path, "socket of a service", _SOCKET_OPTIONS)

    def add_file(self, row: Program | XorgModule, destination: str, reason: str) -> bool:
        """Add the file of a row; return whether the node has it."""
        files = self._files(row)
        for file in files:
            self._add_mount(file.source, destination, reason)
        return bool(files)

    def _files(self, row: Program | ConfigFile | XorgModule | Firmware) -> list[DriverFile]:
        found = self._found.get(row.name, [])
        if not found:
            version = self._inventory.driver.version
            what = row.name.format(v=version)
            self._missing.append(Missing(what, tuple(places(row, self._inventory.driver))))
        return found

    def _add_mount(
        self, source: str, destination: str, reason: str, options: tuple[str, ...] | None = None
    ) -> None:
        mount = Mount(source, destination, reason=reason)
        if options is not None:
            mount = Mount(source, destination, options, reason)
        self._mounts.setdefault(destination, mount)

    def _add_link(self, path: str, target: str, reason: str) -> None:
        if path.rpartition("/")[2] != target:
            self._links.setdefault(path, Link(path, target, reason))


PATH: Final = "/etc/nvidia/nvidia-application-profiles-rc.d/10-container.conf"
_BITS: Final = 64

_CONTENT: Final = """\
{{"profiles": [{{"name": "_container_", "settings": ["EGLVisibleDGPUDevices", {mask:#x}]}}],
 "rules": [{{"pattern": [], "profile": "_container_"}}]}}
"""


def application_profile(minors: Iterable[int]) -> File | None:
    """Return the application profile for a container with GPUs.

    Returns:
        The file; None if there is no GPU, or one beyond the mask.
    """
    shown = frozenset(minors)
    if not shown or max(shown) >= _BITS:
        return None
    mask = sum(1 << minor for minor in shown)
    return File(PATH, _CONTENT.format(mask=mask).encode(), reason="shows EGL the granted GPUs")
