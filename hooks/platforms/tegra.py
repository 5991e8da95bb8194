"""NVIDIA's driver on Tegra: Jetson, IGX and other machines with the GPU on the chip.

The system's packages contain the user-space driver, and files (``*.csv``) that list what a
container needs. These lists do not distinguish capabilities: a container with the GPU gets all
listed files, as with NVIDIA's toolkit.

Rules
- The chip's GPU has index 0. If the machine also has discrete GPUs (Thor, IGX), they have the next
  indices, in PCI bus order, and the UUIDs from procfs. If procfs lists several GPUs, the chip's is
  at 0000:01:00.0. A single one is the chip's, unless the chip's driver is nvgpu, which does not
  appear in procfs.
- The chip's GPU comes with the listed nodes, except those of discrete GPUs, and with the nodes
  /dev/nvidiaN of no discrete GPU, since the chip's display has its own.
- A discrete GPU comes with its node, its nodes below /dev/dri, the control nodes, and the listed
  nodes that belong to no GPU.
- ``none`` gets the files but no node. ``all`` does not include a GPU named in exclude-gpus.
- The container gets a listed node under its own name, with the host's numbers. Nodes of memory
  itself (/dev/mem) are left out.
- A listed file that does not exist gets a note, not an error, because machines differ.

The files have lines of the form ``KIND, PATH``; the path is everything after the first comma,
including other commas:

========  ==========================================================================
``dev``   a device node; a path without a slash in front is below /dev
``lib``   a file, with all links followed: nearly always a library
``dir``   a directory
``sym``   a symbolic link, which is created, and its target
========  ==========================================================================

- Blank lines, lines that start with ``#``, and spaces around kind and path are ignored.
- A path may contain the wildcards ``*``, ``?`` and ``[…]``, none of which matches a slash.
- A line of any other form is ignored, with a note; NVIDIA's toolkit ignores it too.
- ``devices.csv``, ``drivers.csv`` and ``l4t.csv`` are for every container. The others are for
  containers with NVIDIA_REQUIRE_JETPACK=csv-mounts=all.

Source: NVIDIA Container Toolkit, pkg/nvcdi (csv mode) and internal/platform-support/tegra; NVIDIA's
documentation of the container runtime on Jetson.
"""

from __future__ import annotations

import os
import posixpath
import stat
from collections.abc import Iterable, Iterator
from typing import Final

from api.values import dataclass
from hooks.config import Config
from hooks.errors import CsvFilesMissing, GpuExcluded, NoGpus, PlatformNodeMissing
from hooks.image.layout import Layout
from hooks.node.capabilities import CONTROL, MODESET, UVM, UVM_TOOLS
from hooks.node.fingerprint import Fingerprint, read_names, read_text
from hooks.node.gpus import Gpu, find_gpus, mark_excluded
from hooks.plan import Bounds, Contribution, Device, device_of, groups_of
from hooks.platforms.detecting import is_integrated, root_of
from hooks.platforms.files import Files, HostTree, named, unchecked, unknown
from hooks.requests.request import Request
from hooks.words import (
    AllDevices,
    DeviceName,
    Devices,
    GpuBusId,
    GpuIndex,
    GpuUuid,
    NamedDevices,
    Node,
    NoDevices,
    Void,
    normal_path,
)

BASE_FILES: Final = frozenset({"devices.csv", "drivers.csv", "l4t.csv"})


class Kind:
    """The words that may start a line."""

    DEVICE: Final = "dev"
    LIBRARY: Final = "lib"
    DIRECTORY: Final = "dir"
    LINK: Final = "sym"


_KINDS: Final = frozenset({Kind.DEVICE, Kind.LIBRARY, Kind.DIRECTORY, Kind.LINK})


@dataclass(frozen=True, slots=True)
class Entry:
    """One line."""

    kind: str
    path: str  # absolute and normalised, maybe with wildcards


def parse(text: str, name: str) -> tuple[list[Entry], list[str]]:
    """Return the entries of a file, and notes on invalid lines."""
    entries, notes = [], []
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        kind, _, path = (part.strip() for part in stripped.partition(","))
        if kind == Kind.DEVICE and path and not path.startswith("/"):
            path = f"/dev/{path}"
        if kind not in _KINDS or not path.startswith("/") or "\0" in path:
            notes.append(f"{name}, line {number}, is left out: it is no KIND, /PATH")
            continue
        entries.append(Entry(kind, normal_path(path)))
    return entries, notes


def read_files(directory: str, *, every: bool) -> Iterator[tuple[str, str]]:
    """Yield the relevant files of a directory.

    Args:
        every: whether to include all files, not only those for every container.

    Yields:
        Names and contents, in order of the names.
    """
    for name in read_names(directory) or ():
        if name.endswith(".csv") and (every or name in BASE_FILES):
            text = read_text(posixpath.join(directory, name))
            if text is not None:
                yield name, text


PLATFORM: Final = "NVIDIA Tegra"

_RELEASE: Final = "/etc/nv_tegra_release"
_EVERY_FILE: Final = "NVIDIA_REQUIRE_JETPACK=csv-mounts=all"
_MEMORY_MAJOR: Final = 1
_MOST_LINKS: Final = 40
_CONTROL: Final = (CONTROL.path, UVM.path, UVM_TOOLS.path, MODESET.path)


def wants_every_file(environment: Iterable[object]) -> bool:
    """Whether a container's environment requests all lists.

    Args:
        environment: the process's entries, ``NAME=value``.
    """
    name = _EVERY_FILE.partition("=")[0] + "="
    entries = [entry for entry in environment if isinstance(entry, str) and entry.startswith(name)]
    return entries[-1:] == [_EVERY_FILE]


def contribute(
    request: Request, config: Config, layout: Layout, *, every_file: bool
) -> Contribution:
    """Return the edits for the machine's driver.

    Args:
        every_file: whether to use all lists, not only those for every container.

    Raises:
        UnknownDevice: the machine does not have a named GPU.
        MigUnsupported: a MIG device is named.
        GpuExcluded: a named GPU is excluded by the configuration.
        NoGpus: all GPUs are requested, and all are excluded.
        CsvFilesMissing: no file lists anything.
        PlatformNodeMissing: a GPU is requested, but the machine has no usable node.
    """
    gpus = _gpus(config)
    chosen = _chosen(request.devices, gpus)
    if isinstance(request.devices, AllDevices) and not chosen:
        raise NoGpus(
            f"GPUs of this Tegra machine ({request.source})",
            found="exclude-gpus excludes every one of them",
        )
    directory = root_of(config).rstrip("/") + config.csv_directory
    entries: list[Entry] = []
    notes: list[str] = []
    for name, text in read_files(directory, every=every_file):
        more, wrong = parse(text, name)
        entries += more
        notes += wrong
    if not entries:
        raise CsvFilesMissing(
            f"GPUs of this Tegra machine ({request.source})",
            found=f"no file in {directory} lists anything",
            do="install nvidia-l4t-init, or set csv-directory or platform in config.toml",
        )
    tree = HostTree(root_of(config), config.dev)
    files = Files(layout)
    _add_files(entries, tree, files)
    wanted = _nodes(entries, tree, gpus, chosen)
    devices = _devices(wanted, tree, files)
    if chosen and not devices:
        raise PlatformNodeMissing(
            f"GPUs of this Tegra machine ({request.source})",
            found=f"none of the listed nodes is in {config.dev}",
            do="load the driver's kernel modules",
        )
    return Contribution(
        files.plan(devices, groups_of(devices)),
        Bounds(frozenset(device.major for device in devices), (root_of(config), config.dev)),
        vendor=PLATFORM,
        granted=tuple(f"GPU {index}" for index in sorted(chosen)),
        notes=(*notes, *unchecked(request)),
    )


@dataclass(frozen=True, slots=True)
class _Gpus:
    """The machine's GPUs."""

    chip: Gpu | None  # the chip's own, if procfs lists it
    discrete: tuple[Gpu, ...]  # the others, in PCI bus order, from index 1

    def index_of(self, name: DeviceName) -> int | None:
        """Return the index of the GPU with this name; None if none or several match."""
        every = enumerate((self.chip, *self.discrete))
        match name:
            case GpuIndex(index):
                return index if index <= len(self.discrete) else None
            case GpuUuid(uuid):
                found = [n for n, gpu in every if gpu is not None and gpu.uuid.startswith(uuid)]
            case GpuBusId(bus_id):
                found = [n for n, gpu in every if gpu is not None and gpu.bus_id == bus_id]
            case _:  # names of MIG devices were refused
                found = []
        return found[0] if len(found) == 1 else None

    def __str__(self) -> str:
        every = (self.chip, *self.discrete)
        return ", ".join(
            f"{n} ({gpu.uuid or gpu.bus_id})" if gpu is not None else f"{n}"
            for n, gpu in enumerate(every)
        )


def _gpus(config: Config) -> _Gpus:
    found = find_gpus(Fingerprint(root_of(config)), config, None).gpus
    listed, _ = mark_excluded(found, config.excluded_gpus)
    has_nvgpu = os.path.exists(f"{config.sys}/module/nvgpu")
    if len(listed) == 1 and not has_nvgpu:
        return _Gpus(listed[0], ())
    chip = next((gpu for gpu in listed if is_integrated(gpu.bus_id)), None)
    return _Gpus(chip, tuple(gpu for gpu in listed if gpu is not chip))


def _chosen(devices: Devices, gpus: _Gpus) -> frozenset[int]:
    """Return the indices of the requested GPUs."""
    if isinstance(devices, NoDevices | Void):
        return frozenset()
    if not isinstance(devices, NamedDevices):
        every = enumerate((gpus.chip, *gpus.discrete))
        return frozenset(n for n, gpu in every if gpu is None or not gpu.excluded)
    found = set()
    for name in named(devices, PLATFORM):
        index = gpus.index_of(name)
        if index is None:
            raise unknown(name, f"this machine has {gpus}")
        gpu = (gpus.chip, *gpus.discrete)[index]
        if gpu is not None and gpu.excluded:
            raise GpuExcluded(
                f"GPU {name}", found="exclude-gpus excludes it", do="name another GPU"
            )
        found.add(index)
    return frozenset(found)


def _nodes(
    entries: Iterable[Entry], tree: HostTree, gpus: _Gpus, chosen: frozenset[int]
) -> dict[str, str]:
    """Return the paths of the container's nodes, each with its reason."""
    if not chosen:
        return {}
    with_chip = 0 in chosen
    foreign = {gpu.path for gpu in gpus.discrete}
    foreign |= {path for gpu in gpus.discrete for path in gpu.drm_paths}
    listed = [
        path for entry in entries if entry.kind == Kind.DEVICE for path in tree.matches(entry.path)
    ]
    if with_chip and gpus.discrete:
        listed += filter(_is_gpu, tree.matches("/dev/nvidia*"))
    wanted: dict[str, str] = {}
    for path in listed:
        if path not in foreign and (with_chip or not _is_gpu(path)):
            wanted.setdefault(path, "listed for containers")
    for index, gpu in enumerate(gpus.discrete, 1):
        if index in chosen:
            for path in (gpu.path, *gpu.drm_paths):
                wanted[path] = f"GPU {index}"
            for path in _CONTROL:
                wanted.setdefault(path, "control device")
    return wanted


def _is_gpu(path: str) -> bool:
    return path.removeprefix("/dev/nvidia").isdecimal()


def _devices(wanted: dict[str, str], tree: HostTree, files: Files) -> list[Device]:
    devices = []
    for path, reason in wanted.items():
        where = tree.really(path)
        try:
            seen = os.lstat(where[0]) if where is not None else None
        except OSError:
            seen = None
        if seen is None or not stat.S_ISCHR(seen.st_mode):
            files.miss(path, "no character device is there")
        elif os.major(seen.st_rdev) == _MEMORY_MAJOR:
            files.miss(path, "no container gets the machine's memory")
        else:
            numbers = (os.major(seen.st_rdev), os.minor(seen.st_rdev))
            node = Node(path, *numbers, stat.S_IMODE(seen.st_mode), seen.st_uid, seen.st_gid)
            devices.append(device_of(node, reason))
    return devices


def _add_files(entries: Iterable[Entry], tree: HostTree, files: Files) -> None:
    for kind, reason in (
        (Kind.DIRECTORY, "directory of the driver"),
        (Kind.LIBRARY, "file of the driver"),
        (Kind.LINK, "what a link of the driver leads to"),
    ):
        for entry in entries:
            if entry.kind != kind:
                continue
            paths = tree.matches(entry.path)
            if not paths:
                files.miss(entry.path, entry.path)
            for path in paths:
                _add(kind, path, tree, files, reason)
    release = tree.really(_RELEASE)
    if release is not None and os.path.isfile(release[0]):
        files.add((release[0], _RELEASE), "release of the system")


def _add(kind: str, path: str, tree: HostTree, files: Files, reason: str) -> None:
    found = tree.really(path)
    if found is None or not _fits(found[0], kind):
        files.miss(path, path)
    elif kind == Kind.DIRECTORY:
        files.add((found[0], path), reason)
    else:
        there = files.add(found, reason)
        if there == found[1]:
            _add_links(path, found[1], tree, files)


def _fits(host: str, kind: str) -> bool:
    if kind == Kind.DIRECTORY:
        return os.path.isdir(host)
    return os.path.isfile(host) or (kind == Kind.LINK and os.path.isdir(host))


def _add_links(path: str, target: str, tree: HostTree, files: Files) -> None:
    """Add the links between a host path and its real path."""
    for _ in range(_MOST_LINKS):
        says = tree.link_at(path)
        if says is None:
            return
        directory = tree.really(posixpath.dirname(path))
        if directory is None:
            return
        following = posixpath.normpath(posixpath.join(directory[1], says))
        if tree.link_at(following) is None:
            following = target
        is_sibling = posixpath.dirname(following) == posixpath.dirname(path)
        files.link(path, posixpath.basename(following) if is_sibling else following, "link")
        path = following
