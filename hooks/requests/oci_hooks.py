"""NVIDIA's hooks in an OCI spec: how to recognise them, and what each should do.

Other software writes them before the shim sees the spec: engines that apply a CDI spec of
``nvidia-ctk cdi generate`` (containerd, CRI-O, Docker, NRI), Docker and NVIDIA's legacy runtime for
``--gpus``, and containerd's clients for their ``--gpus``. The hooks would run as root, with the
image as their root directory. This module recognises them in any list; the engine does their work
itself, and removes them:

===============================  ==========================================  =====================
program (last name of its path)  arguments                                   what it stands for
===============================  ==========================================  =====================
nvidia-container-runtime-hook,   ``prestart``                                the request of the
nvidia-container-toolkit                                                     environment
any                              ``oci-hook -- …/nvidia-container-cli``      a request of its own:
                                 ``… configure …``                           :class:`ClientRequest`
nvidia-cdi-hook; nvidia-ctk      a word of :data:`OPTIONS`                   an edit of the image:
with ``hook``                                                                :class:`Call`
===============================  ==========================================  =====================

Rules
- The program itself is never opened. It need not exist.
- A hook with an unknown word, option or value stays in the spec, because its effect is unknown.
- A list option may have several items, separated by commas.

Source: NVIDIA Container Toolkit, cmd/nvidia-cdi-hook (1.10 to 1.20) and cmd/nvidia-container-
    runtime-hook, where only "prestart" has an effect; Docker's daemon/nvidia_linux.go;
    containerd's contrib/nvidia and cmd/containerd/command/oci-hook.go.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from api.values import dataclass

LISTS: Final = (
    "prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop",
)  # fmt: skip
"""The lists of hooks that a spec can have."""

_LEGACY: Final = frozenset({"nvidia-container-runtime-hook", "nvidia-container-toolkit"})
_CDI: Final = "nvidia-cdi-hook"
_TOOLKIT: Final = "nvidia-ctk"
_CLI: Final = "nvidia-container-cli"

# Options by name, and whether each takes a value. The first ones set the place of the container's
# state, and the log level.
_EVERYWHERE: Final = {"container-spec": True, "debug": False, "quiet": False, "config": True}
OPTIONS: Final[dict[str, dict[str, bool]]] = {
    "create-symlinks": {"link": True},
    "update-ldcache": {"folder": True, "ldconfig-path": True},
    "create-soname-symlinks": {"folder": True, "ldconfig-path": True},
    "enable-cuda-compat": {
        "host-driver-version": True,
        "host-cuda-version": True,
        "cuda-compat-container-root": True,
    },
    "disable-device-node-modification": {},
    "update-application-profile": {},
    "chmod": {"mode": True, "path": True},
}
"""The hooks of CDI specs whose work is done in process, with their own options."""

_CLIENT_WORDS: Final = ("oci-hook", "--")
_BEFORE_CONFIGURE: Final = {"load-kmods": False, "ldcache": True}
_CLIENT_CAPABILITIES: Final = ("compute", "compat32", "graphics", "utility", "video", "display")
_CONFIGURE: Final = {
    "device": True, "require": True, "ldconfig": True, "no-cgroups": False, "pid": True,
    "ngx": False, **dict.fromkeys(_CLIENT_CAPABILITIES, False),
}  # fmt: skip


class HookUnknown(ValueError):
    """An NVIDIA program has an unknown command line, which the message describes."""


@dataclass(frozen=True, slots=True)
class Call:
    """A hook of NVIDIA's CDI specs: its name, its options in order, its owner."""

    name: str
    options: tuple[tuple[str, str], ...]
    owner: str = "the spec"

    def all_of(self, option: str) -> tuple[str, ...]:
        """Return the values of an option, in order."""
        return tuple(value for name, value in self.options if name == option)

    def items_of(self, option: str) -> tuple[str, ...]:
        """Return the items of an option that is a list, in order."""
        return tuple(item for value in self.all_of(option) for item in value.split(","))


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """A request in a hook by a containerd client: ``ctr run --gpus``, nerdctl."""

    devices: tuple[str, ...]  # as containers name them; empty for none
    capabilities: tuple[str, ...]  # of the driver; ("all",) for all that containerd supports
    requirements: tuple[str, ...]


def parse_call(path: str, arguments: Sequence[str], owner: str = "the spec") -> Call | None:
    """Read a hook of a CDI spec.

    Args:
        path: the path of its program.
        arguments: all arguments, with the program's name first.
        owner: what the hook belongs to, for messages.

    Returns:
        The call; None if the program is not an NVIDIA program for CDI.

    Raises:
        HookUnknown: it is one, but with an unknown word or option.
    """
    program, words = posixpath.basename(path), list(arguments[1:])
    if program not in {_CDI, _TOOLKIT}:
        return None
    options = list(_take_options(words, _EVERYWHERE))
    if program == _TOOLKIT:
        if words[:1] != ["hook"]:
            raise HookUnknown("its first word is not hook")
        del words[0]
        options += _take_options(words, _EVERYWHERE)
    name = words.pop(0) if words else ""
    if name not in OPTIONS:
        raise HookUnknown(f"{name!r} is none of {', '.join(OPTIONS)}")
    options += _take_options(words, _EVERYWHERE | OPTIONS[name])
    if words:
        raise HookUnknown(f"the word {words[0]!r} has no meaning")
    return Call(name, tuple(options), owner)


def _take_options(words: list[str], known: Mapping[str, bool]) -> Iterator[tuple[str, str]]:
    """Remove the options at the start of ``words``, and yield them."""
    while words and words[0].startswith("-"):
        word = words.pop(0)
        name, equals, value = word.lstrip("-").partition("=")
        if name not in known:
            raise HookUnknown(f"the option {word.partition('=')[0]} is not known")
        if known[name] and not equals:
            if not words:
                raise HookUnknown(f"{word} has no value")
            value = words.pop(0)
        yield name, value


def absolute(text: str) -> str | None:
    """Return an option's path in normal form; None if it is not absolute."""
    path = posixpath.normpath(text)
    return path if path.startswith("/") and not path.startswith("//") else None


def link_of(text: str) -> tuple[str, str] | None:
    """Return path and target of ``TARGET::PATH``; None for another form."""
    target, _, at = text.rpartition("::")
    path = absolute(at)
    return (path, target) if target and path is not None else None


def call_in(hook: object) -> Call | None:
    """Return the call of a spec's hook; None if its work is not done in process."""
    path, arguments = _command(hook)
    try:
        call = parse_call(path, arguments)
    except HookUnknown:
        return None
    return call if call is not None and _is_doable(call) else None


def _is_doable(call: Call) -> bool:
    """Whether a call's values have the right form; NVIDIA's program also fails with others."""
    return (
        all(map(link_of, call.items_of("link")))
        and all(map(absolute, call.items_of("folder")))
        and all(map(absolute, call.all_of("cuda-compat-container-root")))
        # It repairs directories of device nodes. Elsewhere it would have another effect.
        and all((absolute(path) or "").startswith("/dev/") for path in call.items_of("path"))
    )


def client_request(hook: object) -> ClientRequest | None:
    """Parse the request in a hook of containerd's clients; return None for other hooks."""
    _, arguments = _command(hook)
    words = list(arguments[1:])
    if tuple(words[:2]) != _CLIENT_WORDS or posixpath.basename("".join(words[2:3])) != _CLI:
        return None
    del words[:3]
    try:
        list(_take_options(words, _BEFORE_CONFIGURE))
        if words[:1] != ["configure"]:
            return None
        del words[0]
        options = list(_take_options(words, _CONFIGURE))
    except HookUnknown:
        return None
    if len(words) != 1:  # only the root of the container
        return None
    named = {name for name, _ in options}
    every = named.issuperset(_CLIENT_CAPABILITIES)
    return ClientRequest(
        tuple(item for name, value in options if name == "device" for item in value.split(",")),
        ("all",) if every else tuple(n for n in (*_CLIENT_CAPABILITIES, "ngx") if n in named),
        tuple(value for name, value in options if name == "require"),
    )


def is_dockers(hook: object) -> bool:
    """Whether NVIDIA's legacy runtime and Docker's ``--gpus`` add this hook."""
    path, arguments = _command(hook)
    return posixpath.basename(path) in _LEGACY and "prestart" in arguments[1:]


def is_nvidia_hook(hook: object) -> bool:
    """Whether the engine does the work of this hook, and removes it from the spec."""
    return is_dockers(hook) or client_request(hook) is not None or call_in(hook) is not None


def has_nvidia_hook(spec: Mapping[str, Any]) -> bool:
    """Whether a spec has a hook that :func:`is_nvidia_hook` knows."""
    return any(is_nvidia_hook(hook) for _, hook in hooks_of(spec))


def calls_of(spec: Mapping[str, Any]) -> tuple[Call, ...]:
    """Return the calls of a spec's hooks that are done in process, in the order of execution."""
    found = (call_in(hook) for _, hook in hooks_of(spec))
    return tuple(call for call in found if call is not None)


def hooks_of(spec: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield a spec's hooks, each with its list; malformed parts are skipped."""
    found = spec.get("hooks")
    hooks = found if isinstance(found, dict) else {}
    for name in LISTS:
        listed = hooks.get(name)
        yield from ((name, hook) for hook in (listed if isinstance(listed, list) else ()))


def tell_hook(hook: object) -> str:
    """Describe a hook in a few words."""
    path, arguments = _command(hook)
    call = call_in(hook)
    words = (call.name,) if call is not None else arguments[1:4]
    return " ".join((path, *words))


def _command(hook: object) -> tuple[str, tuple[str, ...]]:
    """Return path and arguments of a hook; nothing if it is malformed."""
    path = hook.get("path") if isinstance(hook, dict) else None
    arguments = hook.get("args") if isinstance(hook, dict) else None
    if not isinstance(path, str) or not isinstance(arguments, list):
        return path if isinstance(path, str) else "", ()
    return path, tuple(arguments) if all(isinstance(each, str) for each in arguments) else ()
