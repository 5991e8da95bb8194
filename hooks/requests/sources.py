"""Where devices are named in a spec: annotations, mounts and the environment.

Each function looks at one place and says what is named there, or None if the place is not
used at all. Which of them holds is decided in :mod:`hooks.requests.request`, whose head has the
table.
"""

from __future__ import annotations

import posixpath

from hooks.errors import MalformedSpec
from hooks.requests.glance import (
    CUDA_VERSION,
    DEVICES,
    HOOK_LISTS,
    MOUNTS,
    REQUIRE_CUDA,
    is_nvidia_hook,
)
from hooks.requests.names import AllDevices, Names
from hooks.requests.naming import items_of, parse_channels, parse_names, united_channels

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from typing import Any, Final

    from hooks.config import Config

__all__ = [
    "Origin",
    "Said",
    "in_annotations",
    "in_environment",
    "in_mounts",
    "is_legacy",
    "nvidia_hooks",
    "variables_of",
]


class Origin:
    """Who said what is asked: what policy goes by (an ``enum`` would cost its import)."""

    NOBODY: Final = "nobody"
    ENVIRONMENT: Final = "environment"  # the image's author may have
    MOUNTS: Final = "mounts"  # whoever wrote the pod's volumes: a device plugin
    ANNOTATIONS: Final = "annotations"  # the kubelet, or whoever may annotate a container
    DOCKER: Final = "docker"  # a person, by --gpus
    SPEC: Final = "spec"  # whoever made it has given these devices: an engine, by CDI


class Said:
    """What a place says.

    Attributes:
        names: what is named there.
        origin: who said so, of :class:`Origin`.
        source: where it is said, for people.
    """

    __slots__ = ("names", "origin", "source")

    def __init__(self, names: Names, origin: str, source: str) -> None:
        self.names = names
        self.origin = origin
        self.source = source


def in_annotations(spec: Mapping[str, Any], config: Config) -> Said | None:
    """What the annotations name.

    Args:
        spec: config.json, decoded.
        config: which annotations are of devices.

    Raises:
        MalformedSpec: they have the wrong shape.
        RequestError: they cannot be understood.
    """
    annotations = spec.get("annotations")
    if annotations is None:
        return None
    if not isinstance(annotations, dict):
        raise _misshapen("annotations", "an object")
    chosen = sorted(name for name in annotations if name.startswith(config.annotation_prefixes))
    if not all(isinstance(annotations[name], str) for name in chosen):
        raise _misshapen("annotations", "an object of strings")
    items = [item for name in chosen for item in _cdi_names(annotations[name])]
    if not items:
        return None
    source = " ".join(f"{name}={annotations[name]}" for name in chosen)
    names = parse_names(items, asked=source, default_kind=config.default_kind)
    return Said(names, Origin.ANNOTATIONS, source)


def _cdi_names(value: str) -> list[str]:
    """The items of an annotation, from the first that has a kind, or a part of one.

    What has none is no CDI name ("1", "all"), and neither NVIDIA's runtime nor an engine gives
    anything by it.
    """
    items = items_of(value)
    while items and "=" not in items[0] and "/" not in items[0]:
        del items[0]
    return items


def in_mounts(spec: Mapping[str, Any], config: Config) -> Said | None:
    """What mounts of /dev/null name.

    Args:
        spec: config.json, decoded.
        config: whether mounts may, and the kind of a name without one.

    Raises:
        MalformedSpec: the mounts have the wrong shape.
        RequestError: they cannot be understood.
    """
    below = list(_below_mounts(spec)) if config.accept_mounts else []
    if not below:
        return None
    source = f"mounts below {MOUNTS}: {', '.join('/'.join(parts) for parts in below)}"
    items: list[str] = []
    channels: list[str] = []
    for parts in below:
        match parts:
            case ["imex", *channel]:
                channels.append("/".join(channel))
            case ["cdi", vendor, kind, name]:
                items.append(f"{vendor}/{kind}={name}")
            case ["cdi", *rest]:
                items.append("/".join(rest))
            case _:
                items.append("/".join(parts))
    # Each mount is a name by itself: no kind of one holds for the next.
    items.sort(key=lambda item: "=" in item)
    names = parse_names(items, asked=source, default_kind=config.default_kind)
    united = united_channels(names.imex_channels, parse_channels(channels, asked=source))
    names = Names(names.devices, names.features, united, names.cdi_devices)
    return Said(names, Origin.MOUNTS, source)


def _below_mounts(spec: Mapping[str, Any]) -> Iterator[list[str]]:
    mounts = spec.get("mounts")
    if mounts is None:
        return
    if not isinstance(mounts, list) or not all(isinstance(mount, dict) for mount in mounts):
        raise _misshapen("mounts", "a list of objects")
    top = MOUNTS.split("/")[1:]
    for mount in mounts:
        destination = mount.get("destination")
        if mount.get("source") == "/dev/null" and isinstance(destination, str):
            parts = posixpath.normpath(f"/{destination}").lstrip("/").split("/")
            if parts[: len(top)] == top and len(parts) > len(top):
                yield parts[len(top) :]


def in_environment(
    variables: Mapping[str, str], config: Config, hooks: Collection[str]
) -> Said | None:
    """What the environment names.

    Args:
        variables: of the process.
        config: which variables, and the kind of a name without one.
        hooks: of which lists NVIDIA's own hook is.

    Raises:
        RequestError: they cannot be understood.
    """
    origin = Origin.DOCKER if "prestart" in hooks else Origin.ENVIRONMENT
    usual = [DEVICES] if DEVICES in variables else []
    swarm = [name for name in config.swarm_resources if name in variables]
    # Docker's --gpus writes the usual one, and any other may be the image's.
    chosen = (usual or swarm) if origin == Origin.DOCKER else (swarm or usual)
    if not chosen:
        if not is_legacy(variables):
            return None
        return Said(Names(AllDevices()), origin, f"legacy image: {CUDA_VERSION} is set")
    source = " ".join(f"{name}={variables[name]}" for name in chosen)
    items = [item for name in chosen for item in items_of(variables[name])]
    names = parse_names(items, asked=source, default_kind=config.default_kind)
    return Said(names, origin, source)


def is_legacy(variables: Mapping[str, str]) -> bool:
    """Whether the image is of the time before NVIDIA_VISIBLE_DEVICES."""
    return bool(variables.get(CUDA_VERSION)) and not variables.get(REQUIRE_CUDA)


def nvidia_hooks(spec: Mapping[str, Any]) -> set[str]:
    """The lists of hooks in which NVIDIA's is."""
    hooks = spec.get("hooks")
    if hooks is None:
        return set()
    if not isinstance(hooks, dict):
        raise _misshapen("hooks", "an object")
    found = set()
    for name in HOOK_LISTS:
        entries = hooks.get(name)
        if entries is None:
            continue
        if not isinstance(entries, list):
            raise _misshapen(f"hooks.{name}", "a list")
        if any(map(is_nvidia_hook, entries)):
            found.add(name)
    return found


def variables_of(spec: Mapping[str, Any]) -> dict[str, str]:
    """All variables of the process, each with its last value."""
    process = spec.get("process") if isinstance(spec, dict) else None
    if not isinstance(process, dict):
        raise _misshapen("process", "an object")
    environment = process.get("env")
    if environment is None:  # optional in the specification
        return {}
    if not isinstance(environment, list) or not all(isinstance(e, str) for e in environment):
        raise _misshapen("process.env", "a list of strings")
    return {name: value for name, _, value in (entry.partition("=") for entry in environment)}


def _misshapen(part: str, wanted: str) -> MalformedSpec:
    return MalformedSpec(
        f"{part} of config.json",
        found=f"it is not {wanted}",
        do="make the spec by the OCI runtime specification",
    )
