"""A quick look at a spec: may its container request anything?

Every container of the node passes through here, and most request nothing; the engine does not run
for them. The others are then read by :func:`hooks.requests.request.read_request`.

Rules
- The answer may be yes for a container that requests nothing after all. It is never no for one that
  requests something.
- The answer is yes for a spec of the wrong shape; reading the request gives the error.
- A hook of NVIDIA's in the spec is work for the engine (:mod:`hooks.requests.oci_hooks`), also if
  an engine has given the container all it needs and it requests nothing.
- Nodes that a spec lists already matter only if the configuration limits how many may have them,
  or if a device of the node is out of service.
- The configuration can name further variables and annotations. A malformed one names none, and is
  an error for containers that request something.
- Which exit code a container wants to have if a failure of a GPU ends it, it says by the annotation
  :data:`FAULT_EXIT_CODE`. It is its own exit code, so whoever may annotate it may say so.

Source: OCI runtime specification, config.md; :mod:`hooks.requests.request` lists the places.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

from api.values import dataclass
from hooks.config import Config, Holders, find_files, load_config
from hooks.errors import ConfigError, FaultExitCodeWrong
from hooks.requests.oci_hooks import calls_of, has_nvidia_hook

MOUNTS: Final = "/var/run/nvidia-container-devices"
"""Mounts of /dev/null below here name devices."""
_MOUNTS_NAME: Final = "nvidia-container-devices"

NODES: Final = "/dev/nvidia"
"""How the paths of NVIDIA's device nodes begin."""
GPU_NODES: Final = (NODES, "/dev/dri/", "/dev/kfd")
"""How those of anybody's GPUs begin."""

DEVICES: Final = "NVIDIA_VISIBLE_DEVICES"
CUDA_VERSION: Final = "CUDA_VERSION"
REQUIRE_CUDA: Final = "NVIDIA_REQUIRE_CUDA"
AMD_DEVICES: Final = "AMD_VISIBLE_DEVICES"
INTEL_DEVICES: Final = "INTEL_VISIBLE_DEVICES"
CAPABILITIES: Final = "NVIDIA_DRIVER_CAPABILITIES"
USUAL: Final = frozenset({"", "compute", "utility"})
"""Words of it that name no more than what a container gets that does not set it."""
_BEYOND_NVIDIAS: Final = frozenset({"all", "compat32"})
_VARIABLES: Final = frozenset({DEVICES, CUDA_VERSION, REQUIRE_CUDA, AMD_DEVICES, INTEL_DEVICES})
NOTHING: Final = frozenset({"", "void"})
"""Values that ask for nothing; most often it is these that one meets."""

FAULT_EXIT_CODE: Final = "io.containerd.nvidia.v1.fault-exit-code"
"""An annotation, which goes before the node's configuration."""
_LARGEST_CODE: Final = 255
_DIGITS: Final = 3


@dataclass(frozen=True, slots=True)
class Places:
    """Where a request may stand beside the places that always count."""

    variables: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ("cdi.k8s.io/",)
    failure: str = ""  # why the configuration could not be read; "" if it could
    limited: bool = False  # whether the configuration may limit how many containers have a device
    # the directory with a file for each device that is out of service
    drained: str = Config().drained


@dataclass(frozen=True, slots=True)
class Glance:
    """What a spec tells before a worker looks at it."""

    asks: bool  # whether its container may ask for anything that a worker has to look at
    lists_gpus: bool  # whether something else has given it GPUs already
    # why it may ask all the same: the configuration could not be read; "" if it could
    failure: str = ""


def glance(spec: Mapping[str, Any]) -> Glance:
    """Look at a container's spec.

    Args:
        spec: config.json, decoded.

    Raises:
        FaultExitCodeWrong: what it wants as its exit code cannot be understood.
    """
    places = find_places()
    lists, asks = lists_nodes(spec), may_ask(spec, places)
    failure = "" if asks else places.failure
    asks = asks or needs_worker(spec, places)
    if asks or lists:
        # It is read again at the end, and an error would help nobody then.
        read_fault_exit_code(spec)
    return Glance(asks, lists, failure)


def read_fault_exit_code(spec: Mapping[str, Any]) -> int | None:
    """The exit code that a container wants if a failure of a GPU ends it.

    Args:
        spec: config.json, decoded.

    Returns:
        1 to 255; 0 to keep its own; None if it does not say.

    Raises:
        FaultExitCodeWrong: it says something else.
    """
    annotations = spec.get("annotations")
    if not isinstance(annotations, dict) or FAULT_EXIT_CODE not in annotations:
        return None
    wish = annotations[FAULT_EXIT_CODE]
    if isinstance(wish, str) and wish.isascii() and wish.isdigit() and len(wish) <= _DIGITS:
        code = int(wish)
        if code <= _LARGEST_CODE:
            return code
    raise FaultExitCodeWrong(
        f"annotation {FAULT_EXIT_CODE}",
        found=f"{wish!r}",
        do="write an exit code, 1 to 255, or 0 for the container's own",
    )


def may_ask(spec: Mapping[str, Any], places: Places | None = None) -> bool:
    """Whether a container may request anything, or has a hook of NVIDIA's in its spec.

    Args:
        places: from :func:`find_places`; by default, those that always count.

    Returns:
        False only if it certainly does not.
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
        return any(node["path"].startswith(NODES) for node in spec["linux"].get("devices") or ())
    except (AttributeError, KeyError, TypeError):
        return False


def may_be_refused(spec: Mapping[str, Any], places: Places) -> bool:
    """Whether a container may not have what its spec lists already.

    That is so where the number of holders is limited, or a device is out of service.

    Args:
        spec: config.json, decoded.
        places: from :func:`find_places`.
    """
    return lists_nodes(spec) and (places.limited or os.path.lexists(places.drained))


def lists_gpus_for_mapped_users(spec: Mapping[str, Any]) -> bool:
    """Whether a spec lists nodes of GPUs, anybody's, for a container in a user namespace.

    Args:
        spec: config.json, decoded; one of the wrong shape lists none.
    """
    try:
        linux = spec["linux"]
        return bool(linux.get("uidMappings")) and any(
            node["path"].startswith(GPU_NODES) for node in linux.get("devices") or ()
        )
    except (AttributeError, KeyError, TypeError):
        return False


def needs_worker(spec: Mapping[str, Any], places: Places) -> bool:
    """Whether there is work for a container that asks for no GPU: its spec has some already.

    Args:
        spec: config.json, decoded.
        places: from :func:`find_places`.
    """
    return may_want_more(spec) or may_be_refused(spec, places) or lists_gpus_for_mapped_users(spec)


def may_want_more(spec: Mapping[str, Any]) -> bool:
    """Whether a container that has GPUs by its spec already names more driver capabilities.

    The CDI specs of our device plugin have the files of the usual capabilities alone, since an
    engine gives all that a spec has to every image. What an image names beyond them we add. Those
    of NVIDIA's program, which have hooks, have all files but 32-bit ones.
    """
    named = ""
    try:
        for entry in spec["process"].get("env") or ():
            name, _, value = entry.partition("=")
            if name == CAPABILITIES:
                named = value
    except (AttributeError, KeyError, TypeError):
        return False
    beyond = {word.strip() for word in named.split(",")} - USUAL
    if beyond and calls_of(spec):
        beyond &= _BEYOND_NVIDIAS
    return bool(beyond) and lists_nodes(spec)


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
    # An image from before NVIDIA_VISIBLE_DEVICES requests GPUs by the version of its CUDA.
    devices = values.get(DEVICES)
    if devices is None and values.get(CUDA_VERSION) and not values.get(REQUIRE_CUDA):
        return True
    asked = (devices, values.get(AMD_DEVICES), values.get(INTEL_DEVICES))
    return any(value is not None and value not in NOTHING for value in asked)


def find_places() -> Places:
    """The places that the configuration names; the usual ones if it cannot be read."""
    try:
        config = load_config()
    except ConfigError as error:
        return Places(failure=str(error), limited=_mentions_limits())
    limited = config.holders != Holders.ANY or bool(config.holders_of)
    return Places(
        config.swarm_resources,
        config.annotation_prefixes,
        limited=limited,
        drained=config.drained,
    )


def _mentions_limits() -> bool:
    """Whether a configuration that cannot be parsed may have limited who has a device."""
    (ours, _), _ = find_files()
    try:
        with open(ours, "rb") as stream:
            return b"holders" in stream.read()
    except OSError:
        return False
