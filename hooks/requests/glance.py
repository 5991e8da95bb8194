"""A glance at a spec: may its container ask for anything?

Every container of the node passes through here, and most ask for nothing: for them, nothing
else of the engine is loaded, and no configuration is parsed. Whoever may ask is then read with
care (:func:`hooks.requests.request.read_request`), by the configuration.

Rules
- The answer may be yes for a container that turns out to ask for nothing. It is never no for
  one that asks.
- Who asks in a spec of the wrong shape may ask: whoever reads it says what is wrong.
- Nodes that a spec lists already are looked at only if the configuration may limit who has them.
- The configuration can name further places to look at: variables and annotations. A file that
  sets neither is not parsed; one that is malformed names none, and is an error for those who
  ask for something.

This module loads nothing that costs a millisecond (dataclasses, enum, re, typing).

Source: OCI runtime specification, config.md; the places are told of in
:mod:`hooks.requests.request`.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, Final

__all__ = [
    "ANNOTATION_PREFIXES",
    "HOOK_LISTS",
    "MOUNTS",
    "Places",
    "find_places",
    "has_nvidia_hook",
    "is_nvidia_hook",
    "lists_nodes",
    "may_ask",
    "may_want_more",
]

MOUNTS: Final = "/var/run/nvidia-container-devices"
"""Mounts of /dev/null below here name devices."""
_MOUNTS_NAME: Final = "nvidia-container-devices"

_NODES: Final = "/dev/nvidia"

ANNOTATION_PREFIXES: Final = ("cdi.k8s.io/",)

DEVICES: Final = "NVIDIA_VISIBLE_DEVICES"
CUDA_VERSION: Final = "CUDA_VERSION"
REQUIRE_CUDA: Final = "NVIDIA_REQUIRE_CUDA"
AMD_DEVICES: Final = "AMD_VISIBLE_DEVICES"
INTEL_DEVICES: Final = "INTEL_VISIBLE_DEVICES"
CAPABILITIES: Final = "NVIDIA_DRIVER_CAPABILITIES"
USUAL: Final = frozenset({"", "compute", "utility"})
"""Words of it that name no more than what a container gets that does not set it."""
_VARIABLES: Final = frozenset({DEVICES, CUDA_VERSION, REQUIRE_CUDA, AMD_DEVICES, INTEL_DEVICES})
NOTHING: Final = frozenset({"", "void"})
"""Values that ask for nothing; most often it is these that one meets."""

_HOOKS: Final = frozenset({"nvidia-container-runtime-hook", "nvidia-container-toolkit"})
HOOK_LISTS: Final = ("prestart", "createRuntime")


class Places:
    """Where a request may stand beside the places that are always looked at.

    Attributes:
        variables: names of variables.
        prefixes: how the names of annotations begin.
        failure: why the configuration could not be asked; "" if it could.
        limited: whether the configuration may limit how many have a device.
    """

    __slots__ = ("failure", "limited", "prefixes", "variables")

    def __init__(
        self,
        variables: tuple[str, ...] = (),
        prefixes: tuple[str, ...] = ANNOTATION_PREFIXES,
        failure: str = "",
        *,
        limited: bool = False,
    ) -> None:
        self.variables = variables
        self.prefixes = prefixes
        self.failure = failure
        self.limited = limited


def may_ask(spec: Mapping[str, Any], places: Places | None = None) -> bool:
    """Whether a container may ask for anything, or has NVIDIA's own hook in its spec.

    Args:
        spec: config.json, decoded.
        places: from :func:`find_places`; those that are always looked at if not given.

    Returns:
        False only if it surely does not.
    """
    places = places or Places()
    try:
        return (
            _asks_in_environment(spec["process"].get("env") or (), places.variables)
            or any(name.startswith(places.prefixes) for name in spec.get("annotations") or ())
            # The path may be written in many ways, all of which have its last name.
            or any(_MOUNTS_NAME in mount["destination"] for mount in spec.get("mounts") or ())
            or has_nvidia_hook(spec)
        )
    except (AttributeError, KeyError, TypeError):
        return True


def lists_nodes(spec: Mapping[str, Any]) -> bool:
    """Whether a spec lists device nodes of NVIDIA's already, as containerd's own CDI has it.

    Args:
        spec: config.json, decoded; one of the wrong shape lists none.
    """
    try:
        return any(node["path"].startswith(_NODES) for node in spec["linux"].get("devices") or ())
    except (AttributeError, KeyError, TypeError):
        return False


def may_want_more(spec: Mapping[str, Any]) -> bool:
    """Whether a container that has GPUs by its spec already names more driver capabilities.

    The CDI specs of our device plugin have the files of the usual capabilities alone, since an
    engine gives all that a spec has to every image. What an image names beyond them we add.

    Args:
        spec: config.json, decoded, of a container that may not ask for devices.
    """
    named = ""
    try:
        for entry in spec["process"].get("env") or ():
            name, _, value = entry.partition("=")
            if name == CAPABILITIES:
                named = value
    except (AttributeError, KeyError, TypeError):
        return False
    return not USUAL.issuperset(word.strip() for word in named.split(",")) and lists_nodes(spec)


def _asks_in_environment(environment: Any, more: tuple[str, ...]) -> bool:
    values = {}
    for entry in environment:
        name, _, value = entry.partition("=")
        if name in _VARIABLES:
            values[name] = value
        elif name in more:
            return True
    if not values:
        return False
    # An image of the time before NVIDIA_VISIBLE_DEVICES asks by the version of its CUDA.
    devices = values.get(DEVICES)
    if devices is None and values.get(CUDA_VERSION) and not values.get(REQUIRE_CUDA):
        return True
    asked = (devices, values.get(AMD_DEVICES), values.get(INTEL_DEVICES))
    return any(value is not None and value not in NOTHING for value in asked)


def has_nvidia_hook(spec: Mapping[str, Any]) -> bool:
    """Whether NVIDIA's own hook is in a spec: see :func:`is_nvidia_hook`."""
    hooks = spec.get("hooks")
    if not isinstance(hooks, dict):
        return False
    lists = (hooks.get(name) for name in HOOK_LISTS)
    return any(is_nvidia_hook(hook) for some in lists if isinstance(some, list) for hook in some)


def is_nvidia_hook(hook: object) -> bool:
    """Whether an OCI hook is the one that NVIDIA's runtime, Docker and podman add.

    It would do again, by programs that may not be there, what the engine has done: it is taken
    out of the spec.

    Args:
        hook: an entry of a list of the spec's hooks.

    Source: Docker's daemon/nvidia_linux.go; NVIDIA Container Toolkit, cmd/nvidia-container-
    runtime-hook, of which "prestart" is the one command that does anything.
    """
    if not isinstance(hook, dict):
        return False
    path, arguments = hook.get("path"), hook.get("args")
    return (
        isinstance(path, str)
        and path.rpartition("/")[2] in _HOOKS
        and isinstance(arguments, list)
        and "prestart" in arguments[1:]
    )


_CONFIG: Final = ("NVSHIM_CONFIG", "/etc/containerd-shim-nvidia/config.toml")
_NVIDIA_CONFIG: Final = (
    "NVIDIA_CTK_CONFIG_FILE_PATH",
    "/etc/nvidia-container-runtime/config.toml",
)

# How lines of a configuration begin that name further places, in our file and in NVIDIA's.
_KEYS: Final = ("swarm-resource", "annotation-prefixes")
# How those of our file begin that limit who has a device.
_LIMITS: Final = b"holders"
# What NVIDIA's file says from the start.
_USUAL: Final = frozenset({'annotation-prefixes=["cdi.k8s.io/"]', 'swarm-resource=""'})


def find_places() -> Places:
    """The places that the configuration names, without parsing it if it names none.

    Returns:
        The places; those of the file that :func:`hooks.config.load_config` would read.
    """
    files = []
    for variable, usual in (_CONFIG, _NVIDIA_CONFIG):
        named = os.environ.get(variable)
        files.append(named or usual)
        if named:
            break
    for file in files:
        try:
            with open(file, "rb") as stream:
                content = stream.read()
        except FileNotFoundError:
            continue
        except OSError as error:
            return Places(failure=f"{file}: {error.strerror}")
        places = _configured() if _names_places(content) else Places()
        places.limited = _LIMITS in content or b"\\" in content
        return places
    return Places()


def _names_places(content: bytes) -> bool:
    text = content.decode(errors="replace")
    if not any(key in text for key in _KEYS) and "\\" not in text:
        return False
    for line in text.splitlines():
        setting = "".join(line.partition("#")[0].split())
        # A key may be quoted, dotted, or spelt with escapes; then the parser is to say.
        if setting not in _USUAL and (any(key in setting for key in _KEYS) or "\\" in setting):
            return True
    return False


def _configured() -> Places:
    from api.errors import NvshimError  # noqa: PLC0415 - few nodes come here
    from hooks.config import load_config  # noqa: PLC0415 - likewise

    try:
        config = load_config()
    except NvshimError as error:
        return Places(failure=str(error))
    return Places(config.swarm_resources, config.annotation_prefixes)
