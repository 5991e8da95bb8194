"""Do in process what the hooks of NVIDIA's CDI specs do.

A spec from ``nvidia-ctk cdi generate`` has hooks that run as root with the image as their root
directory. Most known vulnerabilities of NVIDIA's stack were in them. Since their intended effects
are known, the plan includes them, and no program runs:

==============================  ==============================================================
hook                            in the plan
==============================  ==============================================================
create-symlinks                 links; those below /dev in directories of links
create-soname-symlinks          links of the sonames of libraries that are mounted in the folders
update-ldcache                  the same, and entries of ld.so.cache for them; the folders in the
                                drop-in
enable-cuda-compat              the order of libcuda's, as it is decided for any container
                                (:mod:`hooks.edits.compat`), by the driver's version that the
                                hook receives
disable-device-node-modification  the parameters of the kernel module, with ModifyDeviceFiles 0
update-application-profile      the profile that shows EGL the granted GPUs
chmod                           nothing: it mends directories below /dev that an old crun made
                                with too few permissions
==============================  ==============================================================

Rules
- :mod:`hooks.requests.oci_hooks` defines which hooks these are. A hook with an unknown word or
  option is an error in a CDI spec that we apply. It stays in an OCI spec to which an engine has
  applied the CDI spec.
- An OCI spec does not show which of its mounts come from the CDI spec. So the engine examines all,
  including a tenant's volumes. It therefore opens only regular files, reads only their headers,
  follows no link out of a mount, and skips directories with too many names.
- The target of a link with ".." is resolved by its text alone. A link to itself is ignored.

Source: NVIDIA Container Toolkit, cmd/nvidia-cdi-hook (names, options, effects).
"""

from __future__ import annotations

import itertools
import os
import posixpath
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Final, TypeAlias

from api.values import replace
from hooks.cdi.errors import CdiHookMalformed
from hooks.cdi.spec import SpecHook
from hooks.config import Config
from hooks.edits.compat import DIRECTORY, Compat, Host, with_compat
from hooks.edits.planning import application_profile
from hooks.errors import CdiError, RootfsError
from hooks.image.directory import MOST_NAMES, open_regular
from hooks.image.elf import Elf, elf_of_fd
from hooks.image.rootfs import Rootfs
from hooks.image.rootfs_errors import MalformedElf, NotARegularFile
from hooks.node.fingerprint import read_fields, read_names, read_text
from hooks.node.host_setup import without_node_making
from hooks.node.roots import is_version
from hooks.ocispec import part, parts
from hooks.plan import (
    Bounds,
    CachedLibrary,
    Contribution,
    Device,
    File,
    Link,
    LinkDirectory,
    Mount,
    Plan,
    ProcFile,
)
from hooks.requests.oci_hooks import Call, HookUnknown, absolute, calls_of, parse_call
from hooks.words import Arch, end_of

FindCompat: TypeAlias = Callable[[Plan, Host], Compat]


def call_of(hook: SpecHook, owner: str) -> Call | None:
    """Parse the call of a hook; return None if its program is not NVIDIA's.

    Raises:
        CdiHookMalformed: it is NVIDIA's but has an unknown word or option.
    """
    try:
        return parse_call(hook.path, hook.args, owner)
    except HookUnknown as error:
        raise _malformed(hook, owner, str(error)) from error


def _malformed(hook: SpecHook, owner: str, found: str) -> CdiError:
    return CdiHookMalformed(
        f"the {hook.name} hook {' '.join((hook.path, *hook.args[1:3]))} of {owner}",
        found=found,
        do="write the spec without hooks: nvshim cdi generate",
    )


def perform(calls: Iterable[Call], plan: Plan, config: Config) -> tuple[Plan, tuple[str, ...]]:
    """Return the plan with the effects of the hooks, and notes for display.

    Raises:
        CdiHookMalformed: the value of an option has the wrong form.
    """
    links: dict[str, str] = {}
    folders: dict[str, None] = {}
    linked: dict[str, None] = {}
    files: dict[str, File] = {}
    proc_files: dict[str, ProcFile] = {}
    notes: list[str] = []
    for call in calls:
        match call.name:
            case "create-symlinks":
                for text in call.items_of("link"):
                    path, target = _link(text, call)
                    links[path] = target
            case "update-ldcache":
                folders |= _folders(call)
            case "create-soname-symlinks":
                linked |= _folders(call)
            case "update-application-profile":
                files |= {file.path: file for file in _profiles(plan.devices)}
            case "disable-device-node-modification":
                proc_files |= {file.path: file for file in _parameters(config)}
    libraries, sonames = _libraries(plan.mounts, links, folders, linked)
    plain, directories = _sorted_out(sonames | links)
    at_dev = [path for path in links if posixpath.dirname(path) == _DEV.rstrip("/")]
    notes += [f"no link can be made directly below /dev: {path}" for path in at_dev]
    return (
        replace(
            plan,
            links=(*plan.links, *plain),
            link_directories=(*plan.link_directories, *directories),
            libraries=(*plan.libraries, *libraries),
            library_directories=tuple(dict.fromkeys((*plan.library_directories, *folders))),
            files=(*plan.files, *files.values()),
            proc_files=(*plan.proc_files, *proc_files.values()),
        ),
        tuple(dict.fromkeys(notes)),
    )


def contribute(
    spec: Mapping[str, Any], config: Config, find_compat: FindCompat | None
) -> tuple[Contribution, Compat]:
    """Do the work of the CDI hooks that an engine has written into an OCI spec.

    This grants nothing: the devices and the driver's files are already in the spec.

    Args:
        spec: config.json, decoded.
        find_compat: decides whether the image's own libcuda comes first; None if the image cannot
            be read.

    Returns:
        Edits of only the image, and the decision about its libcuda.

    Raises:
        MalformedSpec: a part of the spec has the wrong shape.
    """
    calls = calls_of(spec)
    given = Plan(devices=tuple(_devices_in(spec)), mounts=tuple(_mounts_in(spec)))
    done, notes = perform(calls, given, config)
    compat = Compat() if find_compat is None else decide_compat(calls, done, config, find_compat)
    plan = replace(with_compat(done, compat), devices=(), mounts=())
    return Contribution(plan, Bounds(), notes=notes), compat


def _mounts_in(spec: Mapping[str, Any]) -> Iterator[Mount]:
    """Yield the bind mounts of a spec."""
    for entry in parts(spec, "mounts", dict):
        source, destination = entry.get("source"), entry.get("destination")
        options = part(entry, "options", list, "mounts.")
        is_bind = entry.get("type") == "bind" or "bind" in options or "rbind" in options
        if is_bind and isinstance(source, str) and source.startswith("/"):
            yield Mount(source, posixpath.normpath(str(destination)))


def _devices_in(spec: Mapping[str, Any]) -> Iterator[Device]:
    """Yield the device nodes of a spec."""
    for node in parts(part(spec, "linux", dict), "devices", dict, "linux."):
        path, major, minor = node.get("path"), node.get("major"), node.get("minor")
        if isinstance(path, str) and isinstance(major, int) and isinstance(minor, int):
            yield Device(path, major, minor)


def decide_compat(calls: Iterable[Call], plan: Plan, config: Config, find: FindCompat) -> Compat:
    """Whether the image's own libcuda comes first: a hook must want it, and it must fit.

    Args:
        config: locates procfs, and can turn this off.
    """
    asking = [call for call in calls if call.name == "enable-cuda-compat"]
    versions = [text for call in asking for text in call.all_of("host-driver-version")]
    if not versions or not config.cuda_compat:
        return Compat()
    if not is_version(versions[-1]):
        no_version = f"{versions[-1]!r} is no version of a driver"
        return Compat(why=f"{no_version}: the image's libcuda stays behind")
    places = [text for call in asking for text in call.all_of("cuda-compat-container-root")]
    directory = (absolute(places[-1]) if places else None) or DIRECTORY
    return find(plan, Host(versions[-1], None, tuple(_models(config)), directory))


def _models(config: Config) -> Iterator[str]:
    """Return the models of all GPUs, since a foreign spec does not say which GPUs it grants."""
    directory = f"{config.proc}/driver/nvidia/gpus"
    for name in read_names(directory) or ():
        model = read_fields(f"{directory}/{name}/information", ("Model",))["Model"]
        if model:
            yield model


def _folders(call: Call) -> dict[str, None]:
    return dict.fromkeys(_absolute(text, call) for text in call.items_of("folder"))


def _absolute(text: str, call: Call) -> str:
    path = absolute(text)
    if path is None:
        raise CdiHookMalformed(
            f"{call.name} of {call.owner}", found=f"{text!r} is no absolute path"
        )
    return path


def _link(text: str, call: Call) -> tuple[str, str]:
    """Return path and target of ``TARGET::PATH``; the target is a sibling, or absolute."""
    target, _, at = text.rpartition("::")
    if not target:
        raise CdiHookMalformed(
            f"{call.name} of {call.owner}", found=f"{text!r} is not of the form TARGET::PATH"
        )
    path = _absolute(at, call)
    return path, posixpath.normpath(target) if target.startswith("/") else target


_DEV: Final = "/dev/"


def _sorted_out(links: dict[str, str]) -> tuple[list[Link], list[LinkDirectory]]:
    """Return links for the rootfs, and link directories for /dev, which is mounted over."""
    plain = []
    below_dev: dict[str, dict[str, str]] = {}
    for path, target in links.items():
        directory, _, name = path.rpartition("/")
        if path.startswith(_DEV):
            below_dev.setdefault(directory, {})[name] = target
            continue
        lead = target
        if "/" in target and not target.startswith("/"):
            lead = posixpath.normpath(f"{directory}/{target}")
            lead = "/" + lead.lstrip("/")
        if lead not in {name, path}:
            plain.append(Link(path, lead, "link of a CDI spec"))
    directories = [
        LinkDirectory(path, tuple(names.items()), "links of a CDI spec")
        for path, names in below_dev.items()
        if path != _DEV.rstrip("/")
    ]
    return plain, directories


_SHARED_OBJECT: Final = re.compile(r".+\.so(?:\.[^/]*)?")


def _libraries(
    mounts: Iterable[Mount],
    links: dict[str, str],
    folders: Collection[str],
    linked: Collection[str] = (),
) -> tuple[list[CachedLibrary], dict[str, str]]:
    """Return cache entries and soname links for the libraries mounted in some folders.

    Args:
        folders: the folders whose libraries go into the cache.
        linked: other folders, whose libraries get only soname links.
    """
    found: dict[tuple[str, Arch], CachedLibrary] = {}
    arches: dict[str, Arch] = {}
    sonames: dict[str, str] = {}
    for path, elf in _mounted_libraries(mounts, tuple(dict.fromkeys((*folders, *linked)))):
        if elf is None or elf.arch is None:
            continue
        arches[path] = elf.arch
        directory, name = posixpath.split(path)
        soname = elf.soname or name
        if directory in folders:
            found.setdefault((soname, elf.arch), CachedLibrary(soname, path, elf.arch))
        sonames.setdefault(f"{directory}/{soname}", name)
    for path in links:
        directory, name = posixpath.split(path)
        end = end_of(path, sonames | links)
        if directory in folders and end in arches:
            arch = arches[end]
            found.setdefault((name, arch), CachedLibrary(name, end, arch))
    return list(found.values()), {p: t for p, t in sonames.items() if p not in arches}


_MOST_FILES: Final = 4096


def _mounted_libraries(
    mounts: Iterable[Mount], folders: tuple[str, ...]
) -> Iterator[tuple[str, Elf | None]]:
    """Return the paths and headers of shared objects in the container's folders."""
    return itertools.islice(_every_mounted_library(mounts, folders), _MOST_FILES)


def _every_mounted_library(
    mounts: Iterable[Mount], folders: tuple[str, ...]
) -> Iterator[tuple[str, Elf | None]]:
    for mount in mounts:
        if mount.kind != "bind":
            continue
        directory, name = posixpath.split(mount.destination)
        if directory in folders and _SHARED_OBJECT.fullmatch(name):
            yield mount.destination, _elf_at(mount.source)
        for folder in folders:
            if folder == mount.destination or folder.startswith(f"{mount.destination}/"):
                below = folder[len(mount.destination) :] or "/"
                for name, elf in _libraries_in(mount.source, below):
                    yield f"{folder}/{name}", elf


def _libraries_in(source: str, below: str) -> Iterator[tuple[str, Elf | None]]:
    """Return the first shared objects in a mounted directory, by name.

    None if there are too many names to list. Follow links only within the mount, since a tenant's
    link may lead anywhere on the host.
    """
    try:
        with Rootfs.open(source) as mounted:
            names = mounted.names(below, MOST_NAMES) or ()
            for name in filter(_SHARED_OBJECT.fullmatch, names[:_MOST_FILES]):
                yield name, _elf_in(mounted, f"{below}/{name}")
    except (RootfsError, ValueError):  # ValueError: a zero byte in the path
        return


def _elf_in(mounted: Rootfs, path: str) -> Elf | None:
    try:
        fd = mounted.open_file(path)
    except RootfsError:
        return None
    return None if fd is None else _elf_of(fd)


def _elf_at(path: str) -> Elf | None:
    """Read the headers of a host's ELF file; return None for other files, without opening them."""
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            fd = open_regular(place, f"to read {path}")
        finally:
            os.close(place)
    except (OSError, ValueError, NotARegularFile):
        return None
    return _elf_of(fd)


def _elf_of(fd: int) -> Elf | None:
    try:
        return elf_of_fd(fd)
    except MalformedElf:
        return None
    finally:
        os.close(fd)


_GPU_NODE: Final = re.compile(r"/dev/nvidia([0-9]+)", re.ASCII)


def _profiles(devices: Iterable[Device]) -> Iterator[File]:
    """Yield the profile for the GPUs among these devices."""
    profile = application_profile(
        device.minor for device in devices if _GPU_NODE.fullmatch(device.path)
    )
    if profile is not None:
        yield profile


def _parameters(config: Config) -> Iterator[ProcFile]:
    """Yield the kernel module's parameters as a container should read them."""
    shown = without_node_making(read_text(f"{config.proc}/driver/nvidia/params") or "")
    if shown is not None:
        yield shown
