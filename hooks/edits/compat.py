"""CUDA forward compatibility: whether an image's own, newer libcuda precedes the driver's.

NVIDIA's images have a newer libcuda in a directory "compat". It works with older kernel modules, so
that a program can use a newer CUDA than the driver's. But it works only on some GPUs and with some
driver branches, and fails on all others, where the driver's own libcuda might have worked. So the
node decides, not the image.

Rules
- The search is in /usr/local/cuda/compat. Only without that directory, it is in that of each
  /usr/local/cuda-VERSION, and uses the newest library that fits. A directory counts if it has
  exactly one libcuda.so.VERSION for the driver's architecture that is a regular file.
- A library may list in its ELF note the driver branches and kinds of GPU that it works with. It is
  then used only if it lists this driver's branch and, on a GeForce or TITAN, that kind. A library
  without a note is not used on a GeForce or TITAN: NVIDIA supports forward compatibility on data
  centre GPUs and a few of the RTX series.
- It is used only if it is newer: the CUDA version in its note must be newer than the driver's or,
  if either is unknown, the branch in its file name must be newer than the driver's.
- The decision only affects an order: the image's directory comes first in the loader's cache and
  configuration. No file of the image is mounted or run. All reads go through the root object, with
  limits on numbers and sizes.
- ``cuda-compat = false`` turns it off. Programs that name the directory in LD_LIBRARY_PATH do not
  depend on it.

The note, whose owner is "NVIDIA Corporation", contains JSON: ``CUDA Version``, a string;
``Driver``, the branches; ``Device``, the brands by NVML's numbers. Boards of NVIDIA's embedded
series have neither list.

Source: NVIDIA's "CUDA Compatibility", Forward Compatibility; nvidia-container-toolkit,
nvidia-cdi-hook enable-cuda-compat; nvml.h, nvmlBrandType_t.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterable
from typing import Any, Final

from api.values import dataclass, replace
from hooks.errors import RootfsError
from hooks.image.elf import elf_of_fd, text_notes_of_fd
from hooks.image.layout import Layout
from hooks.image.loader_files import NOT_IN_A_DIRECTORY
from hooks.image.rootfs import Rootfs
from hooks.image.rootfs_errors import MalformedElf
from hooks.node.gpus import Gpu
from hooks.node.roots import is_version, numbers
from hooks.plan import CachedLibrary, Plan
from hooks.words import Arch

DIRECTORY: Final = "/usr/local/cuda/compat"
_INSTALLED: Final = "/usr/local"
_VERSIONED: Final = re.compile(r"cuda-\d{1,3}(\.\d{1,3}){0,2}")

_LIBCUDA: Final = "libcuda.so"
_SONAME: Final = "libcuda.so.1"
# The names of the driver's own files; other files do not belong in the loader's cache.
_LIBRARY: Final = re.compile(r"lib(cuda|nvidia|nvcuda)[A-Za-z0-9_-]*\.so(\.[A-Za-z0-9]+)*")

_MOST_NAMES: Final = 128
_MOST_INSTALLED: Final = 1024
_MOST_CANDIDATES: Final = 16
_MOST_LIBRARIES: Final = 32

_OWNER: Final = b"NVIDIA Corporation"
_CUDA: Final = re.compile(r"(\d{1,3})\.(\d{1,3})(\.\d{1,6})*")
_MOST_LISTED: Final = 256

# Words in the names of consumer GPUs, and NVML's number for each kind.
_CONSUMER: Final = {"geforce": frozenset({5, 15}), "titan": frozenset({6, 16})}


@dataclass(frozen=True, slots=True)
class Note:
    """The drivers and GPUs that a libcuda works with."""

    cuda: tuple[int, int]  # its CUDA version, (major, minor)
    # the driver branches that it works with; empty for any
    branches: frozenset[int] = frozenset()
    # the kinds of GPU that it works on, by NVML's numbers; empty for any
    brands: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Candidate:
    """A directory of an image with exactly one libcuda."""

    directory: str  # its path in the image, without links
    version: str  # the driver version in the library's name
    note: Note | None = None  # its note about compatibility, if any


@dataclass(frozen=True, slots=True)
class Host:
    """What the node has."""

    driver: str
    # its newest CUDA, (major, minor); None if unknown
    cuda: tuple[int, int] | None = None
    models: tuple[str, ...] = ()  # the names of the container's GPUs
    directory: str = DIRECTORY  # where images keep a newer libcuda


@dataclass(frozen=True, slots=True)
class Compat:
    """The decision."""

    directory: str = ""  # the image's directory that comes first; "" for none
    why: str = ""  # the reason; "" if the image has no libcuda
    version: str = ""
    libraries: tuple[CachedLibrary, ...] = ()  # the libraries in that directory


def find_compat(rootfs: Rootfs, plan: Plan, layout: Layout, host: Host, arch: Arch) -> Compat:
    """Decide for an image, whose content is never an error.

    Args:
        plan: if it does not include the driver's libcuda, the image is not searched.
    """
    ours = {library.soname for library in plan.libraries if library.arch is arch}
    if _SONAME not in ours:
        return Compat()
    try:
        candidates, passed_over = _candidates(rootfs, layout, arch, host.directory)
        if not candidates:
            return Compat(why="; ".join(passed_over))
        chosen, why = choose(candidates, host)
        why = "; ".join((*passed_over, why))
        if chosen is None:
            return Compat(why=why, version=candidates[0].version)
        libraries = _libraries(rootfs, chosen, arch, ours)
    except RootfsError as error:
        return Compat(why=f"the image's directory {host.directory} was left alone: {error.found}")
    return Compat(chosen.directory, why, chosen.version, libraries)


def with_compat(plan: Plan, compat: Compat) -> Plan:
    """Return a plan with the image's libraries before the driver's, if so decided."""
    if not compat.directory:
        return plan
    return replace(
        plan,
        libraries=(*compat.libraries, *plan.libraries),
        first_directories=(compat.directory, *plan.first_directories),
    )


def host_of(driver: str, cuda: str, gpus: Iterable[Gpu]) -> Host:
    """Return the properties of the node that the decision needs.

    Args:
        cuda: the newest CUDA that the node supports ("12.2"); "" if unknown.
    """
    return Host(driver, _cuda(cuda), tuple(gpu.model for gpu in gpus))


def choose(candidates: Iterable[Candidate], host: Host) -> tuple[Candidate | None, str]:
    """Return the newest candidate that fits and the reason; or None, and why each does not fit.

    Args:
        candidates: at least one.
    """
    reasons = []
    for candidate in sorted(candidates, key=lambda each: numbers(each.version), reverse=True):
        fits, why = _decide(candidate, host)
        why = f"libcuda {candidate.version} in {candidate.directory} {why}"
        if fits:
            return candidate, why
        reasons.append(why)
    return None, "; ".join(reasons)


def _decide(candidate: Candidate, host: Host) -> tuple[bool, str]:
    note = candidate.note
    branch = numbers(host.driver)[0]
    if note is not None and note.branches and branch not in note.branches:
        return False, f"is not for drivers of branch {branch}"
    for model in host.models:
        kind = next((word for word in _CONSUMER if word in model.lower()), None)
        if kind is None or (note is not None and not note.brands):
            continue
        if note is None or note.brands.isdisjoint(_CONSUMER[kind]):
            return False, f"is not for a GPU like {model}"
    if note is not None and host.cuda is not None:
        newer = note.cuda > host.cuda
        than = f"CUDA {_dotted(note.cuda)}, and the driver has {_dotted(host.cuda)}"
    else:
        newer = numbers(candidate.version)[0] > branch
        than = f"of branch {numbers(candidate.version)[0]}, and the driver of {branch}"
    return newer, f"is {than}" + ("" if newer else ": it is not newer")


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _candidates(
    rootfs: Rootfs, layout: Layout, arch: Arch, directory: str
) -> tuple[list[Candidate], list[str]]:
    """Return the candidates of an image, and why other directories were rejected."""
    if rootfs.stat(directory) is not None:
        places = [directory]
    elif directory != DIRECTORY:
        places = []
    else:
        names = rootfs.names(_INSTALLED, _MOST_INSTALLED) or ()
        versioned = [name for name in names if _VERSIONED.fullmatch(name)]
        places = [f"{_INSTALLED}/{name}/compat" for name in versioned[:_MOST_CANDIDATES]]
    found: dict[str, Candidate] = {}
    passed_over = []
    for place in places:
        real = rootfs.real_path(place)
        if real is None or real in found:
            continue
        candidate = _candidate(rootfs, layout, real, arch)
        if isinstance(candidate, Candidate):
            found[real] = candidate
        elif candidate:
            passed_over.append(f"{place}: {candidate}")
    return list(found.values()), passed_over


def _candidate(rootfs: Rootfs, layout: Layout, directory: str, arch: Arch) -> Candidate | str:
    """Return a directory as a candidate, or the reason against it; "" if it has no libcuda."""
    if directory == "/" or layout.covers(directory):
        return "something is mounted over it" if directory != "/" else "it leads to the root"
    if not NOT_IN_A_DIRECTORY.isdisjoint(directory):
        return "no dynamic loader takes its name"
    found = [
        name.removeprefix(f"{_LIBCUDA}.")
        for name in rootfs.names(directory, _MOST_NAMES) or ()
        if is_version(name.removeprefix(f"{_LIBCUDA}.")) and _is_file(rootfs, f"{directory}/{name}")
    ]
    if len(found) != 1:
        return f"{len(found)} files are libcuda" if found else ""
    path = f"{directory}/{_LIBCUDA}.{found[0]}"
    fd = rootfs.open_file(path)
    if fd is None:
        return "its libcuda went away"
    try:
        if elf_of_fd(fd).arch is not arch:
            return f"{found[0]} is for another architecture"
        return Candidate(directory, found[0], _note(fd))
    except MalformedElf as error:
        return f"{found[0]} is no library: {error.found}"
    finally:
        os.close(fd)


def _is_file(rootfs: Rootfs, path: str) -> bool:
    found = rootfs.stat(path, follow=False)
    return found is not None and stat.S_ISREG(found.st_mode)


def _note(fd: int) -> Note | None:
    """Return the note of an open library.

    Raises:
        MalformedElf: its note is invalid.
    """
    for text in text_notes_of_fd(fd, _OWNER):
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise MalformedElf(
                "the note of a libcuda", found="a note that is not valid JSON"
            ) from error
        if not isinstance(content, dict) or "CUDA Version" not in content:
            continue
        cuda = _cuda(content["CUDA Version"])
        branches, brands = (_listed(content.get(key)) for key in ("Driver", "Device"))
        if cuda is None or branches is None or brands is None:
            raise MalformedElf("the note of a libcuda", found="a note that makes no sense")
        return Note(cuda, branches, brands)
    return None


def _cuda(text: object) -> tuple[int, int] | None:
    match = _CUDA.fullmatch(text) if isinstance(text, str) and text.isascii() else None
    return (int(match[1]), int(match[2])) if match else None


def _listed(value: Any) -> frozenset[int] | None:
    if value is None:
        return frozenset()
    if not isinstance(value, list) or len(value) > _MOST_LISTED:
        return None
    return frozenset(value) if all(type(entry) is int for entry in value) else None


def _libraries(
    rootfs: Rootfs, chosen: Candidate, arch: Arch, ours: set[str]
) -> tuple[CachedLibrary, ...]:
    """Return the libraries of a candidate under the driver's names."""
    found: dict[str, str] = {}
    names = rootfs.names(chosen.directory, _MOST_NAMES) or ()
    for name in [name for name in names if _LIBRARY.fullmatch(name)][:_MOST_LIBRARIES]:
        path = f"{chosen.directory}/{name}"
        soname = _soname(rootfs, path, arch)
        if soname is None:
            continue
        found.setdefault(soname, path)
        short = f"{name.partition('.so')[0]}.so"
        if short in ours:
            found.setdefault(short, path)
    return tuple(CachedLibrary(name, path, arch) for name, path in found.items())


def _soname(rootfs: Rootfs, path: str, arch: Arch) -> str | None:
    """Return the soname of a regular file; None if it is not one of the driver's libraries."""
    if not _is_file(rootfs, path):
        return None
    fd = rootfs.open_file(path)
    if fd is None:
        return None
    try:
        elf = elf_of_fd(fd)
    except MalformedElf:
        return None
    finally:
        os.close(fd)
    soname = elf.soname if elf.arch is arch else None
    return soname if soname is not None and _LIBRARY.fullmatch(soname) else None
