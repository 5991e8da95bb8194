"""Mounts from the container's staging directory, in addition to the image or instead of it.

Small files, directories of links, and content for files of procfs are in a directory on the host
that only this container uses; :func:`stage` creates them there. Everything that is mounted from
there is read-only inside. Files of procfs are covered when the container has a procfs
(:mod:`shim.rootfs.proc_cover`).

An image that is not writable gets everything from there. A runtime has to create a mount point for
every mount, and on a read-only file system it cannot. But nearly every container has a tmpfs on
/run or /dev, which :mod:`hooks.image.layout` has chosen for the libraries. So the directory of
libraries is created in the staging directory instead, with an empty file for every library and a
link for every soname. It is mounted on the tmpfs, and the plan's libraries are mounted on the files
in it. Programs and manifests for which the image has no room have directories there as well, and
variables name these (:data:`_SUBSTITUTES`):

====================================  ===========================================================
PATH                                  has the programs' directory last
OCL_ICD_VENDORS                       the directory, with links to the image's own manifests
VK_ADD_DRIVER_FILES                   the manifests; the loader also reads those of the image
VK_ADD_IMPLICIT_LAYER_PATH            the manifests, the same; loaders before 1.3.296 ignore it
__EGL_VENDOR_LIBRARY_DIRS             the directory, and those that are searched by default
__EGL_EXTERNAL_PLATFORM_CONFIG_DIRS   the same; NVIDIA's libEGL_nvidia reads it
====================================  ===========================================================

An image that is not mounted yet, and so cannot be read, gets its libraries in the same way.
Everything else is mounted at its usual place, on mount points that the runtime creates.

Rules
- The image's ld.so.cache (or musl's path file) is covered with a merged one, if it exists. If not,
  LD_LIBRARY_PATH is the last resort.
- A file or directory of links is mounted over the one that the image has, or on the container's own
  tmpfs, where the runtime creates the mount point.
- If the container itself sets one of the variables other than PATH, its value stays, and the
  manifests are not found. The same happens if it sets a variable that makes the loader ignore ours
  (:attr:`_Substitute.hidden_by`).
- A mount of the plan that has no mount point in the image, and a link that is not in the image, are
  omitted. A container cannot start without its libraries: if there is no tmpfs for them, that is an
  error, and so is an omitted mount that is required.
- The staging directory is private to us (0700), but everything mounted from it is readable by all.

Source: ocl-icd(7), OCL_ICD_VENDORS; Vulkan-Loader, docs/LoaderDriverInterface.md,
docs/LoaderLayerInterface.md; libglvnd, src/EGL/icd_enumeration.md; for external platforms of EGL,
names in libEGL_nvidia and what it opened with them (driver 535).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from api.values import dataclass, replace
from hooks.errors import RootfsError
from hooks.image.journal import Journal
from hooks.image.layout import CACHE, SCRATCH, Layout, Libc, Loader, coverable
from hooks.image.loader_files import MUSL_PATHS, loader_files
from hooks.image.rootfs import Rootfs
from hooks.image.rootfs_errors import RootfsReadOnly, RootfsUnavailable
from hooks.plan import File, Link, LinkDirectory, Mount, Plan

# With a number each, and in no directory of its own: to make and remove one costs more than a file.
_FILE: Final = "/file-"
_PROC_FILE: Final = "/proc-file-"
_DEFAULTS: Final = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
_VENDORS: Final = "/etc/OpenCL/vendors"
_MOST_VENDORS: Final = 64


@dataclass(frozen=True, slots=True)
class _Substitute:
    """A directory on the tmpfs for files that have no room in the image."""

    name: str  # in staging, and on the tmpfs
    directories: frozenset[str]  # where the files would be
    variable: str  # tells programs where they are
    # variables with which a loader does not read that one, even if they are empty
    hidden_by: frozenset[str] = frozenset()


_PATH: Final = _Substitute("bin", frozenset({"/usr/bin", "/usr/sbin", "/bin", "/sbin"}), "PATH")
_OPENCL: Final = _Substitute("opencl", frozenset({_VENDORS}), "OCL_ICD_VENDORS")
_VULKAN: Final = _Substitute(
    "vulkan",
    frozenset({"/etc/vulkan/icd.d"}),
    "VK_ADD_DRIVER_FILES",
    frozenset({"VK_DRIVER_FILES", "VK_ICD_FILENAMES"}),
)
_LAYERS: Final = _Substitute(
    "vulkan-layers",
    frozenset({"/etc/vulkan/implicit_layer.d"}),
    "VK_ADD_IMPLICIT_LAYER_PATH",
    frozenset({"VK_IMPLICIT_LAYER_PATH"}),
)
_EGL: Final = _Substitute(
    "egl",
    frozenset({"/usr/share/glvnd/egl_vendor.d"}),
    "__EGL_VENDOR_LIBRARY_DIRS",
    frozenset({"__EGL_VENDOR_LIBRARY_FILENAMES"}),
)
_PLATFORMS: Final = _Substitute(
    "egl-platforms",
    frozenset({"/usr/share/egl/egl_external_platform.d"}),
    "__EGL_EXTERNAL_PLATFORM_CONFIG_DIRS",
    frozenset({"__EGL_EXTERNAL_PLATFORM_CONFIG_FILENAMES"}),
)
_SUBSTITUTES: Final = (_PATH, _OPENCL, _VULKAN, _LAYERS, _EGL, _PLATFORMS)
# What is searched without the variable, which replaces it.
_SEARCHED: Final = {
    _EGL: ("/etc/glvnd/egl_vendor.d", "/usr/share/glvnd/egl_vendor.d"),
    _PLATFORMS: ("/etc/egl/egl_external_platform.d", "/usr/share/egl/egl_external_platform.d"),
}

_LIBRARIES: Final = "driver libraries"
_INDEX: Final = "finds driver libraries"


@dataclass(frozen=True, slots=True)
class Placed:
    """What was done for a plan's files, and what is left for the spec."""

    mounts: tuple[Mount, ...] = ()  # mounts that have to come before those of the plan
    # variables for every process of the container, with their whole values
    environment: tuple[tuple[str, str], ...] = ()
    written: tuple[str, ...] = ()  # paths in the image that were made or replaced, in order
    # destinations of the plan's mounts, and paths of its links and files, for which this image has
    # no room. Such a mount has to be left out of the spec.
    omitted: tuple[str, ...] = ()
    # of these, the files that are at another path, which a variable names or a link leads to
    substitutes: tuple[tuple[str, str], ...] = ()
    # what is mounted from staging, by where
    staged: tuple[tuple[str, File | LinkDirectory], ...] = ()
    # for the plan's files of procfs, the path of each one's content on the host, by its path in the
    # container
    proc_files: tuple[tuple[str, str], ...] = ()
    # mounts of the plan whose files are in the layer, and which the spec does not need
    layered: tuple[Mount, ...] = ()

    def at(self, plan: Plan, staging_dir: str) -> Placed:
        """With the mounts of what is staged, and the files of procfs; nothing is written."""
        mounts = [
            Mount(f"{staging_dir}{_FILE}{number}", where, reason=edit.reason)
            for number, (where, edit) in enumerate(self.staged)
        ]
        proc_files = [
            (file.path, f"{staging_dir}{_PROC_FILE}{number}")
            for number, file in enumerate(plan.proc_files)
        ]
        return replace(self, mounts=(*self.mounts, *mounts), proc_files=tuple(proc_files))

    @property
    def additions(self) -> tuple[object, ...]:
        """What :meth:`added_to` adds to a plan and leaves out of it."""
        return self.mounts, self.environment, self.omitted, self.layered

    def added_to(self, plan: Plan) -> Plan:
        """Return the plan, updated with what was added and left out when its files were placed."""
        omitted = frozenset(self.omitted)
        unmounted = omitted.union(mount.destination for mount in self.layered)
        return replace(
            plan,
            mounts=(*self.mounts, *(m for m in plan.mounts if m.destination not in unmounted)),
            environment=(*plan.environment, *self.environment),
            links=tuple(link for link in plan.links if link.path not in omitted),
            files=tuple(file for file in plan.files if file.path not in omitted),
            link_directories=tuple(d for d in plan.link_directories if d.path not in omitted),
        )


@contextmanager
def open_staging(staging_dir: str) -> Iterator[Journal]:
    """Yield the staging directory, created if needed; a failure removes what was put into it.

    Raises:
        RootfsUnavailable: it cannot be created or opened.
    """
    try:
        for path in (os.path.dirname(staging_dir), staging_dir):
            os.makedirs(path, mode=0o700, exist_ok=True)
    except OSError as error:
        raise RootfsUnavailable(
            f"the staging directory {staging_dir}", found=str(error.strerror)
        ) from error
    with Rootfs.open(staging_dir) as staging, Journal(staging) as journal:
        yield journal


def stage(placed: Placed, plan: Plan, staging_dir: str) -> None:
    """Create the files in staging that are mounted from there (:meth:`Placed.at`).

    Raises:
        RootfsError: it cannot be written; everything was undone.
    """
    if placed.staged or plan.proc_files:
        with open_staging(staging_dir) as staging:
            _fill(staging, placed, plan)


def _fill(staging: Journal, placed: Placed, plan: Plan) -> None:
    for number, (_, edit) in enumerate(placed.staged):
        inside = f"{_FILE}{number}"
        if isinstance(edit, File):
            staging.file(inside, edit.content, edit.mode)
        else:
            staging.directory(inside)
            for name, target in edit.links:
                staging.link(f"{inside}/{name}", target)
    for number, file in enumerate(plan.proc_files):
        staging.file(f"{_PROC_FILE}{number}", file.content, 0o444)


def is_on_directory(mount: Mount) -> bool:
    """Whether a mount goes on a directory, and not on a file."""
    return mount.kind != "bind" or os.path.isdir(mount.source)


def place_beside(
    rootfs: Rootfs | None,
    plan: Plan,
    layout: Layout,
    staging_dir: str,
    variables: Mapping[str, str],
) -> Placed:
    """Create in the staging directory the files that cannot be created in the image.

    Args:
        rootfs: the image; None if it is not mounted yet.
        plan: a plan whose libraries are in the directories of ``layout``.
        variables: the container's variables; LD_LIBRARY_PATH and PATH may have to grow, and others
            may be set.

    Raises:
        RootfsReadOnly: there is no room for the libraries anywhere.
        RootfsError: the staging directory cannot be written; nothing is left in it.
    """
    if plan.libraries and layout.scratch is None:
        raise RootfsReadOnly(
            "to give the container the driver's libraries",
            found="a read-only rootfs, and no writable tmpfs on /run or /dev",
            do="use a writable snapshot, or mount a tmpfs on /run",
        )
    variables = {**variables, **dict(plan.environment)}
    directories = _StagedDirectories(layout, variables)
    staged = tuple((_room(rootfs, layout, edit), edit) for edit in plan.small)
    with open_staging(staging_dir) as journal:
        omitted = _fill_homes(rootfs, journal, plan, layout, directories)
        mounts = [
            Mount(staging_dir + directories.home(loader), loader.directory, reason=_LIBRARIES)
            for loader in directories.used()
        ]
        for where, edit in staged:
            if where is None and isinstance(edit, File):
                directories.add_file(edit, journal)
        mounts += directories.substitute_mounts(staging_dir)
        indices = _cover_indices(rootfs, journal, plan, layout)
        mounts += [Mount(staging_dir + path, over, reason=_INDEX) for path, over in indices.items()]
        unindexed = [each for each in directories.used() if _index(each) not in indices]
        placed = Placed(
            mounts=tuple(mounts),
            environment=(
                *_extended(variables, "LD_LIBRARY_PATH", _search(plan, unindexed)),
                *directories.variables(rootfs, journal),
            ),
            omitted=(*omitted, *(edit.path for where, edit in staged if where is None)),
            substitutes=directories.substitutes(),
            staged=tuple((where, edit) for where, edit in staged if where is not None),
        )
        _fill(journal, placed, plan)
    return placed.at(plan, staging_dir)


def _cover_indices(
    rootfs: Rootfs | None, journal: Journal, plan: Plan, layout: Layout
) -> dict[str, str]:
    """Make the files by which loaders find libraries; return what each covers, by its path."""
    covered: dict[str, str] = {}
    if rootfs is None:
        return covered
    for path, content in loader_files(rootfs, plan, layout).items():
        over = coverable(rootfs, layout, path)
        if over is not None and (path == CACHE or path in MUSL_PATHS.values()):
            journal.file(path, content)
            covered[path] = over
    return covered


def _search(plan: Plan, loaders: Iterable[Loader]) -> list[str]:
    """Return the directories for LD_LIBRARY_PATH, for loaders that cannot find them otherwise."""
    search: dict[str, None] = {}
    for loader in loaders:
        below = f"{loader.directory}/"
        search |= dict.fromkeys(plan.first_directories)
        search[loader.directory] = None
        search |= dict.fromkeys(d for d in plan.library_directories if d.startswith(below))
    return list(search)


def _room(rootfs: Rootfs | None, layout: Layout, edit: File | LinkDirectory) -> str | None:
    """Return where a file or directory of links is mounted; None if there is no room for it."""
    if layout.is_fresh(edit.path):
        return edit.path
    if rootfs is None:  # a link of the image may lead into a shared volume, see _takes
        return None if layout.shared or layout.covers(edit.path) else edit.path
    kind = stat.S_IFREG if isinstance(edit, File) else stat.S_IFDIR
    return coverable(rootfs, layout, edit.path, kind)


def _extended(
    variables: Mapping[str, str], name: str, directories: list[str]
) -> tuple[tuple[str, str], ...]:
    """Return a variable with ``directories`` appended to its value in the spec."""
    before = variables.get(name) or _DEFAULTS.get(name, "")
    known = [part for part in before.split(":") if part]
    missing = [part for part in directories if part not in known]
    return ((name, ":".join([*known, *missing])),) if missing else ()


def _fill_homes(
    rootfs: Rootfs | None,
    journal: Journal,
    plan: Plan,
    layout: Layout,
    directories: _StagedDirectories,
) -> list[str]:
    """Make mount points and links in staging; return the paths without room."""
    omitted = []
    taken: list[Mount] = []
    for mount in plan.mounts:
        inside = directories.staged(mount.destination)
        if inside is None:
            if _takes(rootfs, layout, mount) or _is_in_one(mount, taken):
                taken.append(mount)
            elif mount.required:
                raise RootfsReadOnly(
                    f"a mount at {mount.destination} for {mount.reason}",
                    found="a read-only rootfs that has nothing there to mount over",
                    do="use a writable snapshot, or an image that has it",
                )
            else:
                omitted.append(mount.destination)
                directories.add_mount(mount, journal)
        elif is_on_directory(mount):
            journal.directory(inside)
        else:
            journal.mount_point(inside)
    for link in plan.links:
        inside = directories.staged(link.path)
        if inside is not None:
            journal.link(inside, link.target)
        elif rootfs is None or not _has(rootfs, link):
            omitted.append(link.path)
    return omitted


class _StagedDirectories:
    """Directories on the tmpfs, and what stands for them in staging."""

    def __init__(self, layout: Layout, variables: Mapping[str, str]) -> None:
        self._loaders = layout.loaders if layout.scratch is not None else ()
        self._used: dict[Loader, None] = {}
        self._home = f"{layout.scratch}/{SCRATCH}" if layout.scratch is not None else ""
        self._variables = variables
        # What a substitute has: the paths of files in the container, by the places they stand for.
        self._files: dict[_Substitute, dict[str, str]] = {}
        self._mounts: list[Mount] = []

    def home(self, loader: Loader) -> str:
        """Return the path in staging of what is mounted at ``loader.directory``."""
        return f"/libraries/{loader.arch.value}"

    def staged(self, path: str) -> str | None:
        """Return the path in staging of what is at ``path`` in the container, if staging has it."""
        for loader in self._loaders:
            if path.startswith(f"{loader.directory}/"):
                self._used[loader] = None
                return self.home(loader) + path[len(loader.directory) :]
        return None

    def used(self) -> tuple[Loader, ...]:
        """Return the loaders whose directories are not empty."""
        return tuple(self._used)

    def add_mount(self, mount: Mount, staging: Journal) -> None:
        """Put a program or a manifest next to the libraries, if there is a directory for it."""
        inside = None if is_on_directory(mount) else self._add(mount.destination)
        if inside is not None:
            staging.mount_point(inside)
            self._mounts.append(replace(mount, destination=f"{self._home}{inside}"))

    def add_file(self, file: File, staging: Journal) -> None:
        """The same for a file that is written."""
        inside = self._add(file.path)
        if inside is not None:
            staging.file(inside, file.content, file.mode)

    def _add(self, path: str) -> str | None:
        """Return the path of a file in staging; None if there is no place for it."""
        directory, _, name = path.rpartition("/")
        for each in _SUBSTITUTES if self._home else ():
            # A loader that the container tells where to look does not look here.
            is_free = each is _PATH or self._variables.keys().isdisjoint(
                {each.variable, *each.hidden_by}
            )
            if directory in each.directories and is_free:
                inside = f"/{each.name}/{name}"
                self._files.setdefault(each, {})[path] = f"{self._home}{inside}"
                return inside
        return None

    def substitutes(self) -> tuple[tuple[str, str], ...]:
        """Return the files that are elsewhere: the place of each, and its path."""
        return tuple(each for files in self._files.values() for each in files.items())

    def substitute_mounts(self, staging_dir: str) -> list[Mount]:
        """Return the mounts of the directories, and of what is in them."""
        directories = [
            Mount(
                f"{staging_dir}/{each.name}",
                f"{self._home}/{each.name}",
                reason=f"named by {each.variable}",
            )
            for each in self._files
        ]
        return [*directories, *self._mounts]

    def variables(self, rootfs: Rootfs | None, staging: Journal) -> Iterator[tuple[str, str]]:
        """Yield the variables that name the files."""
        for each, files in self._files.items():
            directory = f"{self._home}/{each.name}"
            if each is _PATH:
                yield from _extended(self._variables, each.variable, [directory])
            elif each in {_VULKAN, _LAYERS}:
                yield each.variable, ":".join(files.values())
            elif each in _SEARCHED:
                yield each.variable, ":".join((directory, *_SEARCHED[each]))
            else:
                for name in _vendors(rootfs) if rootfs is not None else ():
                    if f"{_VENDORS}/{name}" not in files:
                        staging.link(f"/{each.name}/{name}", f"{_VENDORS}/{name}")
                yield each.variable, directory


def _vendors(rootfs: Rootfs) -> list[str]:
    """Return the names of the image's own manifests of OpenCL."""
    try:
        names = rootfs.names(_VENDORS, _MOST_VENDORS) or ()
    except RootfsError:
        return []
    return [name for name in names if name.endswith(".icd")]


def _index(loader: Loader) -> str | None:
    """Return the file by which a loader finds libraries outside of its default directories."""
    if loader.libc is Libc.GLIBC:
        return CACHE
    return MUSL_PATHS[loader.arch] if loader.libc is Libc.MUSL else None


def _takes(rootfs: Rootfs | None, layout: Layout, mount: Mount) -> bool:
    """Whether the image has a mount point for ``mount``, or gets one from another mount."""
    if layout.covers(mount.destination):
        return mount.required or not layout.is_shared(mount.destination)
    if rootfs is None:
        # A runtime follows the image's links, which nobody can look at yet.
        return mount.required or not layout.shared
    try:
        found = rootfs.stat(mount.destination)
        # A runtime follows the image's links, which may lead into a volume.
        place = rootfs.real_path(mount.destination) if layout.shared else None
    except RootfsError:
        return False
    is_shared = bool(layout.shared) and (place is None or layout.is_shared(place))
    if is_shared and not mount.required:
        return False
    return found is not None and stat.S_ISDIR(found.st_mode) == is_on_directory(mount)


def _is_in_one(mount: Mount, others: Iterable[Mount]) -> bool:
    """Whether the mount point of ``mount`` is in another mount, or can be made there."""
    for other in others:
        if mount.destination.startswith(f"{other.destination}/"):
            below = mount.destination.removeprefix(other.destination)
            return other.kind != "bind" or os.path.lexists(other.source + below)
    return False


def _has(rootfs: Rootfs, link: Link) -> bool:
    try:
        return rootfs.read_link(link.path) == link.target
    except RootfsError:
        return False
