"""What the hooks of NVIDIA's CDI specs do, done in process.

A spec that ``nvidia-ctk cdi generate`` writes has hooks that run as root with the image as their
root: most of what was found wrong with NVIDIA's stack over the years is in them. What they are
to bring about is known, so it becomes a part of the plan, and no program runs:

==============================  ==============================================================
hook                            in the plan
==============================  ==============================================================
create-symlinks                 links; those below /dev in directories of links
update-ldcache                  for the libraries that the spec mounts in the folders: entries of
                                ld.so.cache, and links of their sonames; the folders in the
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
- A hook is NVIDIA's if its program is called nvidia-cdi-hook, or nvidia-ctk with ``hook`` as its
  first word, wherever it is; it is not looked at.
- One with a word or an option that is not known here is an error: it would do something else.
- A link's target that climbs ("../x") is resolved as it is written. A link that leads to itself
  is none.

Source: NVIDIA Container Toolkit, cmd/nvidia-cdi-hook (names, options, effects).
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Final, TypeAlias

from api.values import dataclass, replace
from hooks.cdi.errors import CdiHookMalformed
from hooks.cdi.spec import SpecHook
from hooks.config import Config
from hooks.edits.compat import Compat, Host, with_compat
from hooks.edits.planning import application_profile
from hooks.node.driver import read_elf
from hooks.node.host_setup import without_node_making
from hooks.node.roots import is_version
from hooks.node.witness import read_fields, read_names, read_text
from hooks.plan import CachedLibrary, Device, File, Link, LinkDirectory, Mount, Plan, ProcFile
from hooks.words import Arch, end_of

FindCompat: TypeAlias = Callable[[Plan, Host], Compat]


_PROGRAM: Final = "nvidia-cdi-hook"
_TOOLKIT: Final = "nvidia-ctk"

# What each takes; "" are options that take no value. Those in every row say where the state of
# the container is, and how much is logged.
_EVERYWHERE: Final = {"container-spec": True, "debug": False, "quiet": False, "config": True}
_OPTIONS: Final[dict[str, dict[str, bool]]] = {
    "create-symlinks": {"link": True},
    "update-ldcache": {"folder": True, "ldconfig-path": True},
    "enable-cuda-compat": {
        "host-driver-version": True,
        "host-cuda-version": True,
        "cuda-compat-container-root": True,
    },
    "disable-device-node-modification": {},
    "update-application-profile": {},
    "chmod": {"mode": True, "path": True},
}


@dataclass(frozen=True, slots=True)
class Call:
    """A hook of NVIDIA's: its name, its options in order, and the device or file that it is of."""

    name: str
    options: tuple[tuple[str, str], ...]
    owner: str

    def all_of(self, option: str) -> tuple[str, ...]:
        """The values of an option, in order."""
        return tuple(value for name, value in self.options if name == option)


def call_of(hook: SpecHook, owner: str) -> Call | None:
    """The call of a hook; None if its program is not one of NVIDIA's.

    Raises:
        CdiHookMalformed: it is NVIDIA's, and has a word or option that is not known here.
    """
    program = posixpath.basename(hook.path)
    words = list(hook.args[1:])
    if program not in {_PROGRAM, _TOOLKIT}:
        return None
    options = list(_take_options(words, _EVERYWHERE, hook, owner))
    if program == _TOOLKIT:
        if words[:1] != ["hook"]:
            raise _malformed(hook, owner, "its first word is not hook")
        del words[0]
        options += _take_options(words, _EVERYWHERE, hook, owner)
    name = words.pop(0) if words else ""
    if name not in _OPTIONS:
        raise _malformed(hook, owner, f"{name!r} is none of {', '.join(_OPTIONS)}")
    options += _take_options(words, _EVERYWHERE | _OPTIONS[name], hook, owner)
    if words:
        raise _malformed(hook, owner, f"the word {words[0]!r} has no meaning")
    return Call(name, tuple(options), owner)


def _take_options(
    words: list[str], known: dict[str, bool], hook: SpecHook, owner: str
) -> Iterator[tuple[str, str]]:
    """The options at the beginning of ``words``, which are taken from it."""
    while words and words[0].startswith("-"):
        word = words.pop(0)
        name, equals, value = word.lstrip("-").partition("=")
        if name not in known:
            raise _malformed(hook, owner, f"the option {word.partition('=')[0]} is not known")
        if known[name] and not equals:
            if not words:
                raise _malformed(hook, owner, f"{word} has no value")
            value = words.pop(0)
        yield name, value


def _malformed(hook: SpecHook, owner: str, found: str) -> CdiHookMalformed:
    return CdiHookMalformed(
        f"the {hook.name} hook {' '.join((hook.path, *hook.args[1:3]))} of {owner}",
        found=found,
        do="write the spec without hooks: nvshim cdi generate",
    )


def perform(calls: Iterable[Call], plan: Plan, config: Config) -> tuple[Plan, tuple[str, ...]]:
    """The plan with the effects of hooks, and notes for people.

    Raises:
        CdiHookMalformed: a value of an option has the wrong form.
    """
    links: dict[str, str] = {}
    folders: dict[str, None] = {}
    files: dict[str, File] = {}
    proc_files: dict[str, ProcFile] = {}
    notes: list[str] = []
    for call in calls:
        notes.append(f"{call.name} of {call.owner} was done in process")
        match call.name:
            case "create-symlinks":
                for text in call.all_of("link"):
                    path, target = _link(text, call)
                    links[path] = target
            case "update-ldcache":
                folders |= dict.fromkeys(_absolute(text, call) for text in call.all_of("folder"))
            case "update-application-profile":
                files |= {file.path: file for file in _profiles(plan.devices)}
            case "disable-device-node-modification":
                proc_files |= {file.path: file for file in _parameters(config)}
    libraries, sonames = _libraries(plan.mounts, links, folders)
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


def decide_compat(
    calls: Iterable[Call], plan: Plan, config: Config, find: FindCompat
) -> tuple[Plan, str]:
    """The plan with the image's own libcuda first, if a hook wants it and it fits; and why.

    Args:
        config: where procfs is, and whether this is wanted at all.
    """
    versions = [
        version
        for call in calls
        if call.name == "enable-cuda-compat"
        for version in call.all_of("host-driver-version")
    ]
    if not versions or not config.cuda_compat:
        return plan, ""
    if not is_version(versions[-1]):
        return plan, f"{versions[-1]!r} is no version of a driver: the image's libcuda stays behind"
    host = Host(versions[-1], models=tuple(_models(config)))
    compat = find(plan, host)
    return with_compat(plan, compat), compat.why


def _models(config: Config) -> Iterator[str]:
    """The names of the node's GPUs; which of them a foreign spec gives is not known."""
    directory = f"{config.proc}/driver/nvidia/gpus"
    for name in read_names(directory) or ():
        model = read_fields(f"{directory}/{name}/information", ("Model",))["Model"]
        if model:
            yield model


def _absolute(text: str, call: Call) -> str:
    path = posixpath.normpath(text)
    if not path.startswith("/") or path.startswith("//"):
        raise CdiHookMalformed(
            f"{call.name} of {call.owner}", found=f"{text!r} is no absolute path"
        )
    return path


def _link(text: str, call: Call) -> tuple[str, str]:
    """Path and target of ``TARGET::PATH``; the target a name beside it, or absolute."""
    target, _, at = text.rpartition("::")
    if not target:
        raise CdiHookMalformed(
            f"{call.name} of {call.owner}", found=f"{text!r} is not of the form TARGET::PATH"
        )
    path = _absolute(at, call)
    return path, posixpath.normpath(target) if target.startswith("/") else target


_DEV: Final = "/dev/"


def _sorted_out(links: dict[str, str]) -> tuple[list[Link], list[LinkDirectory]]:
    """Links for the rootfs, and directories of links for /dev, which is mounted over."""
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
    mounts: Iterable[Mount], links: dict[str, str], folders: Iterable[str]
) -> tuple[list[CachedLibrary], dict[str, str]]:
    """Entries of the loader's cache for what is mounted in folders; links of the sonames."""
    wanted = tuple(folders)
    found: dict[tuple[str, Arch], CachedLibrary] = {}
    arches: dict[str, Arch] = {}
    sonames: dict[str, str] = {}
    for path, source in _mounted_files(mounts, wanted):
        elf = read_elf(os.path.realpath(source))
        if elf is None or elf.arch is None:
            continue
        arches[path] = elf.arch
        directory, name = posixpath.split(path)
        soname = elf.soname or name
        found.setdefault((soname, elf.arch), CachedLibrary(soname, path, elf.arch))
        sonames.setdefault(f"{directory}/{soname}", name)
    for path in links:
        directory, name = posixpath.split(path)
        end = end_of(path, sonames | links)
        if directory in wanted and end in arches:
            arch = arches[end]
            found.setdefault((name, arch), CachedLibrary(name, end, arch))
    return list(found.values()), {p: t for p, t in sonames.items() if p not in arches}


_MOST_IN_A_FOLDER: Final = 4096


def _mounted_files(mounts: Iterable[Mount], folders: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """The shared objects in folders of the container: path there, path on the host."""
    for mount in mounts:
        if mount.kind != "bind":
            continue
        directory, name = posixpath.split(mount.destination)
        if directory in folders and _SHARED_OBJECT.fullmatch(name):
            yield mount.destination, mount.source
        for folder in folders:
            if folder == mount.destination or folder.startswith(f"{mount.destination}/"):
                below = f"{mount.source}{folder[len(mount.destination) :]}"
                try:
                    names = sorted(os.listdir(below))[:_MOST_IN_A_FOLDER]
                except OSError:
                    continue
                for inside in filter(_SHARED_OBJECT.fullmatch, names):
                    yield f"{folder}/{inside}", f"{below}/{inside}"


_GPU_NODE: Final = re.compile(r"/dev/nvidia([0-9]+)", re.ASCII)


def _profiles(devices: Iterable[Device]) -> Iterator[File]:
    """The profile for the GPUs among devices."""
    profile = application_profile(
        device.minor for device in devices if _GPU_NODE.fullmatch(device.path)
    )
    if profile is not None:
        yield profile


def _parameters(config: Config) -> Iterator[ProcFile]:
    """The kernel module's parameters as a container is to read them."""
    shown = without_node_making(read_text(f"{config.proc}/driver/nvidia/params") or "")
    if shown is not None:
        yield shown
