"""NVIDIA's configuration of its device plugin: every key that there is, and what it may say.

Rules
- The file is YAML or JSON, of version v1; an empty one says nothing. A key that is null says
  nothing either.
- A key that is not known is an error, for it would be a setting that is ignored. Upper and lower
  case make no difference, as NVIDIA's decoder has it.
- A key that is of other programs (gpu-feature-discovery), or of what is not needed here, is
  accepted, and said (:data:`IGNORED`).
- A value that NVIDIA accepts is accepted. What it accepts and does not obey is obeyed: ``rename``
  and ``devices`` of what is shared.
- A truth value or number may be in quotes, as templates write them.

Source: k8s-device-plugin api/config/v1 (config.go, flags.go, sharing.go, replicas.go,
resources.go, imex.go).
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from hooks.cdi.tree import BadTree, of_json, of_yaml
from integration.node.plugin.errors import SettingsMalformed
from integration.node.plugin.flags import FLAGS
from integration.node.plugin.reading import (
    ASKED,
    Place,
    known_key,
    one_of,
    read_boolean,
    read_channels,
    read_devices,
    read_name,
    read_path,
    read_replicas,
    read_strategies,
    read_strategy,
    read_text,
    shown,
)
from integration.node.plugin.values import Allocation, DeviceIds, Mig, SharedResource

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from integration.node.plugin.reading import Reader

__all__ = ["IGNORED", "KEYS", "VERSION", "Found", "read_document", "read_value"]

VERSION: Final = "v1"
"""Of the configuration file."""


@dataclass(frozen=True, slots=True)
class Found:
    """A value that somebody gave.

    Attributes:
        value: as :class:`~integration.node.plugin.values.Settings` has it.
        origin: where, for people.
    """

    value: Any
    origin: str


_OF_RESOURCE: Final[Mapping[str, Reader]] = {
    "name": read_name,
    "rename": lambda value, at: read_name(value, at) if value != "" else "",
    "devices": read_devices,
    "replicas": read_replicas,
}


def _resources(value: Any, at: Place) -> tuple[SharedResource, ...]:
    if not isinstance(value, list) or not value:
        at.fail(value, "a list of resources, each with name and replicas")
    found = tuple(_resource(entry, at.entry(number)) for number, entry in enumerate(value))
    names: set[str] = set()
    for number, resource in enumerate(found):
        for key, name in (("name", resource.name), ("rename", resource.rename)):
            if name in names:
                at.entry(number).key(key).fail(name, "a name that is not in the list already")
        names |= {resource.name, resource.rename} - {""}
    return found


def _resource(value: Any, at: Place) -> SharedResource:
    if not isinstance(value, dict):
        at.fail(value, "an object with name and replicas")
    known: dict[str, Any] = {}
    for key, given in value.items():
        name = known_key(key, _OF_RESOURCE, at)
        if given is not None:
            known[name] = _OF_RESOURCE[name](given, at.key(name))
    for needed in ("name", "replicas"):
        if needed not in known:
            at.key(needed).fail(None, "there")
    devices, count = known.get("devices", (None, None))
    return SharedResource(known["name"], known["replicas"], known.get("rename", ""), devices, count)


def _version(value: Any, at: Place) -> str:
    if not isinstance(value, str) or value not in {"", VERSION}:
        at.fail(value, VERSION)
    return VERSION


_SHARED: Final[Mapping[str, Reader]] = {
    "renameByDefault": read_boolean,
    "failRequestsGreaterThanOne": read_boolean,
    "resources": _resources,
    "strategy": read_strategy,
}

KEYS: Final[Mapping[str, Reader]] = {
    "version": _version,
    "flags.migStrategy": one_of(Mig),
    "flags.failOnInitError": read_boolean,
    "flags.mpsRoot": read_path,
    "flags.nvidiaDriverRoot": read_path,
    "flags.nvidiaDevRoot": read_path,
    "flags.gdrcopyEnabled": read_boolean,
    "flags.gdsEnabled": read_boolean,
    "flags.mofedEnabled": read_boolean,
    "flags.plugin.passDeviceSpecs": read_boolean,
    "flags.plugin.deviceListStrategy": read_strategies,
    "flags.plugin.deviceIDStrategy": one_of(DeviceIds),
    "flags.plugin.cdiAnnotationPrefix": read_text,
    "flags.plugin.sharedDevicesAllocationPolicy": one_of(Allocation),
    **{
        f"sharing.{kind}.{name}": read
        for kind in ("timeSlicing", "mps")
        for name, read in _SHARED.items()
    },
    "imex.channelIDs": read_channels,
    "imex.required": read_boolean,
}
"""Every key that means something, and how it is read."""

IGNORED: Final[Mapping[str, str]] = {
    **{flag.path: flag.meaning for flag in FLAGS if flag.ignored},
    "flags.gfd": "it is of gpu-feature-discovery",
    "flags.useNodeFeatureAPI": "it is of gpu-feature-discovery",
    "flags.restartOnDeviceUnhealthy": "a device recovers without a restart",
    "resources": "NVIDIA's plugin ignores it as well; sharing can rename a resource",
}
"""Every key that is accepted and means nothing here, with the reason."""


def _below(path: str) -> dict[str, bool]:
    """The keys that an object may have; True for those that hold objects themselves."""
    prefix = f"{path}." if path else ""
    found: dict[str, bool] = {}
    for known in (*KEYS, *IGNORED):
        if known.startswith(prefix):
            name, dot, _ = known.removeprefix(prefix).partition(".")
            found[name] = bool(dot)
    return found


# -- reading -----------------------------------------------------------------------------------


def read_document(content: bytes, file: str) -> tuple[dict[str, Found], tuple[str, ...]]:
    """What a configuration file says.

    Args:
        content: of the file.
        file: its path, for messages.

    Returns:
        The values by their paths ("flags.migStrategy"), and what of it means nothing here.

    Raises:
        SettingsMalformed: it is neither YAML nor JSON.
        UnknownSetting: it has a key that means nothing.
        WrongSetting: a value means nothing.
    """
    try:
        tree = _tree(content.decode("utf-8-sig"))
    except (UnicodeDecodeError, BadTree) as error:
        raise SettingsMalformed(
            f"{ASKED} in {file}", found=str(error), do="write it as YAML or JSON"
        ) from error
    found: dict[str, Found] = {}
    notes: list[str] = []
    _walk(tree, Place("", file), found, notes)
    return found, tuple(notes)


def _tree(text: str) -> Any:
    """The tree of JSON, or else of YAML, which has objects in braces too."""
    if text.lstrip().startswith("{"):
        with contextlib.suppress(BadTree):
            return of_json(text)
    return of_yaml(text)


def _walk(tree: Any, at: Place, found: dict[str, Found], notes: list[str]) -> None:
    if tree is None:
        return
    if not isinstance(tree, dict):
        if not at.path:
            raise SettingsMalformed(
                f"{ASKED} in {at.file}", found=shown(tree), do="write an object with version: v1"
            )
        at.fail(tree, f"an object with {', '.join(_below(at.path))}")
    names = _below(at.path)
    for key, value in tree.items():
        name = known_key(key, names, at)
        place = at.key(name)
        if value is None:
            continue
        if place.path in IGNORED:
            notes.append(f"{place} means nothing here: {IGNORED[place.path]}")
        elif names[name]:
            _walk(value, place, found, notes)
            if place.path.startswith("sharing.") and f"{place.path}.resources" not in found:
                place.key("resources").fail(None, "a list of resources")
        else:
            found[place.path] = Found(KEYS[place.path](value, place), str(place))


def read_value(path: str, words: Sequence[str], origin: str) -> Found:
    """What a flag or variable says.

    Args:
        path: of the key that it stands for, one of :data:`KEYS`.
        words: as they were given; several for one that may be given several times.
        origin: the flag or variable.

    Raises:
        WrongSetting: the value means nothing.
    """
    place = Place(origin)
    return Found(KEYS[path](list(words) if len(words) != 1 else words[0], place), origin)
