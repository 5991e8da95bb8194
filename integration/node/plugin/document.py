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
import difflib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn

from api.errors import one_line
from hooks.cdi.tree import BadTree, of_json, of_yaml
from integration.node.plugin.errors import SettingsMalformed, UnknownSetting, WrongSetting
from integration.node.plugin.flags import FLAGS
from integration.node.plugin.values import (
    Allocation,
    DeviceIds,
    DeviceList,
    Mig,
    SharedResource,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from enum import StrEnum

__all__ = ["IGNORED", "KEYS", "VERSION", "Found", "read_document", "read_value", "resource_name"]

VERSION: Final = "v1"
"""Of the configuration file."""

_ASKED: Final = "the device plugin's settings"
_LONGEST_FOUND: Final = 80

_TRUE: Final = frozenset({"1", "t", "T", "TRUE", "true", "True"})
_FALSE: Final = frozenset({"0", "f", "F", "FALSE", "false", "False"})
# Words that YAML 1.1 has for them besides, without quotes.
_YES: Final = frozenset({"yes", "Yes", "YES", "on", "On", "ON", "y", "Y"})
_NO: Final = frozenset({"no", "No", "NO", "off", "Off", "OFF", "n", "N"})

_NUMBER: Final = re.compile(r"[+]?[0-9]{1,9}", re.ASCII)
_PREFIX: Final = "nvidia.com/"
_LONGEST_NAME: Final = 63
_LABEL: Final = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_NAME: Final = re.compile(rf"{_LABEL}(\.{_LABEL})*", re.ASCII)
_HEX: Final = "[0-9a-fA-F]"
_UUID: Final = rf"{_HEX}{{8}}(-{_HEX}{{4}}){{3}}-{_HEX}{{12}}"
_DEVICE: Final = re.compile(
    rf"\d+(:\d+)?|GPU-{_UUID}|MIG-{_UUID}|MIG-GPU-{_UUID}/\d+/\d+", re.ASCII
)


@dataclass(frozen=True, slots=True)
class Found:
    """A value that somebody gave.

    Attributes:
        value: as :class:`~integration.node.plugin.values.Settings` has it.
        origin: where, for people.
    """

    value: Any
    origin: str


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a value is: ``path`` in the file, or the flag or variable that says it."""

    path: str
    file: str = ""

    def __str__(self) -> str:
        return f"{self.path} in {self.file}" if self.file else self.path

    def key(self, name: str) -> _Place:
        return _Place(f"{self.path}.{name}" if self.path else name, self.file)

    def entry(self, number: int) -> _Place:
        return _Place(f"{self.path}[{number}]", self.file)

    def fail(self, value: Any, wanted: str) -> NoReturn:
        raise WrongSetting(_ASKED, found=f"{self}: {_shown(value)}", do=f"it has to be {wanted}")


def _shown(value: Any) -> str:
    """A value for people, and not all of a long one."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    text = repr(str(value)) if isinstance(value, str) else str(value)
    return one_line(text if len(text) <= _LONGEST_FOUND else text[:_LONGEST_FOUND] + "…")


# -- what a key may say ------------------------------------------------------------------------


def _boolean(value: Any, at: _Place) -> bool:
    if isinstance(value, bool):
        return value
    word = str(value) if isinstance(value, (str, int)) else ""
    if word in _TRUE or word in _YES:
        return True
    if word not in _FALSE and word not in _NO:
        at.fail(value, "true or false")
    return False


def _text(value: Any, at: _Place) -> str:
    if not isinstance(value, str) or not value.isprintable():
        at.fail(value, "a text")
    return str(value)


def _path(value: Any, at: _Place) -> str:
    text = _text(value, at)
    if text and not text.startswith("/"):
        at.fail(value, "an absolute path")
    return text.rstrip("/") or text[:1]


def _number(value: Any, at: _Place, wanted: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if not isinstance(value, str) or not _NUMBER.fullmatch(value):
        at.fail(value, wanted)
    return int(value)


def _one_of(kind: type[StrEnum]) -> Callable[[Any, _Place], StrEnum]:
    def read(value: Any, at: _Place) -> StrEnum:
        word = str(value) if isinstance(value, str) else ""
        if word not in list(kind):
            at.fail(value, _either(list(kind)))
        return kind(word)

    return read


def _either(words: Sequence[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _listed(value: Any) -> list[Any]:
    """A list, or a comma list, or one value."""
    entries = value if isinstance(value, list) else [value]
    found: list[Any] = []
    for entry in entries:
        if isinstance(entry, str):
            found += [word.strip() for word in entry.split(",")]
        else:
            found.append(entry)
    return [entry for entry in found if entry != ""]


def _strategies(value: Any, at: _Place) -> tuple[DeviceList, ...]:
    words = _listed(value)
    if not words:
        at.fail(value, f"at least one of {', '.join(DeviceList)}")
    known = list(DeviceList)
    for word in words:
        if not isinstance(word, str) or word not in known:
            at.fail(word, _either(known))
    chosen = {DeviceList(str(word)) for word in words}
    return tuple(strategy for strategy in DeviceList if strategy in chosen)


def _channels(value: Any, at: _Place) -> tuple[int, ...]:
    wanted = "[] or [0], for that is the one that a node's containers can share"
    numbers = tuple(dict.fromkeys(_number(entry, at, wanted) for entry in _listed(value)))
    if numbers not in {(), (0,)}:
        at.fail(",".join(map(str, numbers)), wanted)
    return numbers


def _nothing(value: Any, at: _Place) -> None:
    """Of what means nothing here, nothing is checked."""
    del value, at


def _strategy(value: Any, at: _Place) -> None:
    if value != "":
        at.fail(value, "left out: there is one way only")


def resource_name(text: str) -> str | None:
    """A resource's name with its prefix.

    Args:
        text: "nvidia.com/gpu", or "gpu".

    Returns:
        The name; None if no resource can be called so.
    """
    name = text if text.startswith(_PREFIX) else _PREFIX + text
    if len(name) > _LONGEST_NAME or _NAME.fullmatch(name.removeprefix(_PREFIX)) is None:
        return None
    return name


def _name(value: Any, at: _Place) -> str:
    name = resource_name(_text(value, at))
    if name is None:
        at.fail(
            value,
            f"a name such as nvidia.com/gpu, of at most {_LONGEST_NAME} lower-case letters, "
            "digits, hyphens and dots",
        )
    return name


def _devices(value: Any, at: _Place) -> tuple[tuple[str, ...] | None, int | None]:
    """Which devices, and how many; None for all of them."""
    if value == "all":
        return None, None
    if not isinstance(value, list):
        count = _number(value, at, "all, a number of devices, or a list of them")
        if count < 1:
            at.fail(value, "all, or 1 device at least")
        return None, count
    found = []
    for number, entry in enumerate(value):
        text = str(entry) if isinstance(entry, (str, int)) else ""
        if _DEVICE.fullmatch(text) is None:
            at.entry(number).fail(entry, "an index (0), of a MIG device (0:1), or a UUID")
        prefix = next((each for each in _PREFIXES if text.startswith(each)), "")
        found.append(prefix + text.removeprefix(prefix).lower())
    return tuple(dict.fromkeys(found)), None


_PREFIXES: Final = ("MIG-GPU-", "MIG-", "GPU-")


def _replicas(value: Any, at: _Place) -> int:
    wanted = f"a number, 2 to {_MOST_REPLICAS}; without sharing, leave the resource out"
    number = _number(value, at, wanted)
    if not _FEWEST_REPLICAS <= number <= _MOST_REPLICAS:
        at.fail(value, wanted)
    return number


_FEWEST_REPLICAS: Final = 2
# More than a kubelet takes in one message (4 MiB), from a node with 16 GPUs.
_MOST_REPLICAS: Final = 4096

_OF_RESOURCE: Final[Mapping[str, Callable[[Any, _Place], Any]]] = {
    "name": _name,
    "rename": lambda value, at: _name(value, at) if value != "" else "",
    "devices": _devices,
    "replicas": _replicas,
}


def _resources(value: Any, at: _Place) -> tuple[SharedResource, ...]:
    if not isinstance(value, list) or not value:
        at.fail(value, "a list of resources, each with name and replicas")
    found: list[SharedResource] = []
    for number, entry in enumerate(value):
        place = at.entry(number)
        if not isinstance(entry, dict):
            place.fail(entry, "an object with name and replicas")
        known: dict[str, Any] = {}
        for key, given in entry.items():
            name = _known(key, _OF_RESOURCE, place)
            if given is not None:
                known[name] = _OF_RESOURCE[name](given, place.key(name))
        for needed in ("name", "replicas"):
            if needed not in known:
                place.key(needed).fail("nothing", "there")
        devices, count = known.get("devices", (None, None))
        found.append(
            SharedResource(
                name=known["name"],
                replicas=known["replicas"],
                rename=known.get("rename", ""),
                devices=devices,
                count=count,
            )
        )
    names = [resource.name for resource in found]
    for number, name in enumerate(names):
        if name in names[:number]:
            at.entry(number).fail(name, "a resource that is not in the list already")
    return tuple(found)


def _version(value: Any, at: _Place) -> str:
    if value not in {"", VERSION}:
        at.fail(value, VERSION)
    return VERSION


_SHARED: Final[Mapping[str, Callable[[Any, _Place], Any]]] = {
    "renameByDefault": _boolean,
    "failRequestsGreaterThanOne": _boolean,
    "resources": _resources,
    "strategy": _strategy,
}

KEYS: Final[Mapping[str, Callable[[Any, _Place], Any]]] = {
    "version": _version,
    "flags.migStrategy": _one_of(Mig),
    "flags.failOnInitError": _boolean,
    "flags.mpsRoot": _path,
    "flags.nvidiaDriverRoot": _path,
    "flags.nvidiaDevRoot": _path,
    "flags.gdrcopyEnabled": _boolean,
    "flags.gdsEnabled": _boolean,
    "flags.mofedEnabled": _boolean,
    "flags.plugin.passDeviceSpecs": _boolean,
    "flags.plugin.deviceListStrategy": _strategies,
    "flags.plugin.deviceIDStrategy": _one_of(DeviceIds),
    "flags.plugin.cdiAnnotationPrefix": _text,
    "flags.plugin.sharedDevicesAllocationPolicy": _one_of(Allocation),
    **{
        f"sharing.{kind}.{name}": read
        for kind in ("timeSlicing", "mps")
        for name, read in _SHARED.items()
    },
    "imex.channelIDs": _channels,
    "imex.required": _boolean,
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


def _known(key: str, names: Mapping[str, Any], at: _Place) -> str:
    """The name that a key stands for.

    Raises:
        UnknownSetting: it stands for none.
    """
    if key in names:
        return key
    by_case = {name.casefold(): name for name in names}
    if (found := by_case.get(key.casefold())) is not None:
        return found
    near = difflib.get_close_matches(key.casefold(), by_case, n=1)
    raise UnknownSetting(
        _ASKED,
        found=f"{at.key(key[:_LONGEST_FOUND])}, which means nothing",
        do=f"did you mean {by_case[near[0]]}?" if near else f"there is {', '.join(sorted(names))}",
    )


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
            f"{_ASKED} in {file}", found=str(error), do="write it as YAML or JSON"
        ) from error
    found: dict[str, Found] = {}
    notes: list[str] = []
    _walk(tree, _Place("", file), found, notes)
    return found, tuple(notes)


def _tree(text: str) -> Any:
    """The tree of JSON, or else of YAML, which has objects in braces too."""
    if text.lstrip().startswith("{"):
        with contextlib.suppress(BadTree):
            return of_json(text)
    return of_yaml(text)


def _walk(tree: Any, at: _Place, found: dict[str, Found], notes: list[str]) -> None:
    if tree is None:
        return
    if not isinstance(tree, dict):
        if not at.path:
            raise SettingsMalformed(
                f"{_ASKED} in {at.file}", found=_shown(tree), do="write an object with version: v1"
            )
        at.fail(tree, f"an object with {', '.join(_below(at.path))}")
    names = _below(at.path)
    for key, value in tree.items():
        name = _known(key, names, at)
        place = at.key(name)
        if value is None:
            continue
        if place.path in IGNORED:
            notes.append(f"{place} means nothing here: {IGNORED[place.path]}")
        elif names[name]:
            _walk(value, place, found, notes)
            if place.path.startswith("sharing.") and f"{place.path}.resources" not in found:
                place.key("resources").fail("nothing", "a list of resources")
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
    place = _Place(origin)
    return Found(KEYS[path](list(words) if len(words) != 1 else words[0], place), origin)
