"""Check and convert the values of the device plugin's settings.

A reader receives a value from a file or a flag, and its place. It returns the value as
:mod:`integration.node.values.resources` declares it, or raises an error with the value and what is
allowed. Readers accept what NVIDIA's plugin accepts; a boolean or a number may be in quotes, as
templates write them.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, NamedTuple, NoReturn

from api.errors import one_line
from integration.agent_errors import WrongSetting
from integration.node.values.resources import DeviceList

SUBJECT: Final = "the device plugin's settings"
VERSION: Final = "v1"
"""The version of the configuration file."""

_LONGEST_FOUND: Final = 80

# Go's words for booleans, and those that YAML 1.1 adds.
_TRUE: Final = frozenset(
    {"1", "t", "T", "TRUE", "true", "True"} | {"yes", "Yes", "YES", "on", "On", "ON", "y", "Y"}
)
_FALSE: Final = frozenset(
    {"0", "f", "F", "FALSE", "false", "False"} | {"no", "No", "NO", "off", "Off", "OFF", "n", "N"}
)

_NUMBER: Final = re.compile(r"[+]?[0-9]{1,9}", re.ASCII)
_PREFIX: Final = "nvidia.com/"
_LONGEST_NAME: Final = 63
_LABEL: Final = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_NAME: Final = re.compile(rf"{_LABEL}(\.{_LABEL})*", re.ASCII)
_HEX: Final = "[0-9a-fA-F]"
_UUID: Final = rf"{_HEX}{{8}}(-{_HEX}{{4}}){{3}}-{_HEX}{{12}}"
_DEVICE: Final = re.compile(
    rf"\d+(:\d+)?|(?P<new>GPU-|MIG-){_UUID}|(?P<old>MIG-GPU-){_UUID}/\d+/\d+", re.ASCII
)
_FEWEST_REPLICAS: Final = 2
# More than fit into one message to the kubelet for a single GPU. The exact limit depends on the
# node's devices (integration.node.services.plugin.resources checks it).
_MOST_REPLICAS: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Place:
    """The origin of a value: ``path`` in the file, or the flag or variable that sets it."""

    path: str
    file: str = ""
    # shared by all places of the file: a line for each key that has no effect
    notes: list[str] = field(default_factory=list, compare=False)

    def __str__(self) -> str:
        return f"{self.path} in {self.file}" if self.file else self.path

    def key(self, name: str) -> Place:
        """Return the place of a key of this object."""
        return Place(f"{self.path}.{name}" if self.path else name, self.file, self.notes)

    def entry(self, number: int) -> Place:
        """Return the place of an entry of this list."""
        return Place(f"{self.path}[{number}]", self.file, self.notes)

    def fail(self, value: Any, wanted: str) -> NoReturn:
        """Raise WrongSetting with the value and what is allowed."""
        quoted = isinstance(value, str) and len(value) > 1 and value[0] == value[-1] in {"'", '"'}
        bare = ", without the quotes" if quoted else ""
        raise WrongSetting(
            SUBJECT, found=f"{self}: {shown(value)}", do=f"it must be {wanted}{bare}"
        )


def shown(value: Any) -> str:
    """Return a value as text for a message; a long one is shortened."""
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    text = repr(str(value)) if isinstance(value, str) else str(value)
    return one_line(text if len(text) <= _LONGEST_FOUND else text[:_LONGEST_FOUND] + "…")


def known_key(
    key: str, names: Iterable[str], at: Place, parents: Mapping[str, Sequence[str]]
) -> str | None:
    """Return the name of the setting for a key, ignoring case as NVIDIA's decoder does.

    NVIDIA's decoder ignores unknown keys, and later releases add keys. So an unknown key adds a
    note and is not an error.

    Args:
        names: the keys that the object may have.
        at: the object that contains the key.
        parents: the objects that a key belongs to, by its name in lower case.

    Returns:
        The name; None if the key is unknown.
    """
    by_case = {name.casefold(): name for name in names}
    if (name := by_case.get(key.casefold())) is not None:
        return name
    near = difflib.get_close_matches(key.casefold(), by_case, n=1)
    elsewhere = parents.get(key.casefold(), ())
    hint = f"; did you mean {by_case[near[0]]}?" if near else ""
    hint = f"; it belongs to {' or '.join(elsewhere)}" if elsewhere else hint
    at.notes.append(one_line(f"{at.key(key[:_LONGEST_FOUND])} has no effect{hint}"))
    return None


class Kind(NamedTuple):
    """The type of a setting."""

    read: Callable[[Any, Place], Any]  # checks a value and converts it
    metavar: str = "TEXT"  # stands for the value in the help of the flag


def _read_ignored(value: Any, at: Place) -> None:
    """Accept any value of a setting without effect."""
    del value, at


def _read_boolean(value: Any, at: Place) -> bool:
    word = str(value) if isinstance(value, (str, int)) else ""
    if word not in _TRUE and word not in _FALSE:
        at.fail(value, "true or false")
    return word in _TRUE


def _read_text(value: Any, at: Place) -> str:
    if not isinstance(value, str) or not value.isprintable():
        at.fail(value, "a printable string")
    return str(value)


def _read_directory(value: Any, at: Place) -> str:
    """Return an absolute path without a trailing slash; "" for none."""
    text = _read_text(value, at)
    if text and not text.startswith("/"):
        at.fail(value, "an absolute path")
    return text.rstrip("/") or text[:1]


def _read_number(value: Any, at: Place, wanted: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if not isinstance(value, str) or not _NUMBER.fullmatch(value):
        at.fail(value, wanted)
    return int(value)


def one_of(words: type[StrEnum]) -> Kind:
    """Return the type of a setting that is one of several words."""

    def read(value: Any, at: Place) -> StrEnum:
        if not isinstance(value, str) or value not in list(words):
            at.fail(value, _either(list(words)))
        return words(str(value))

    return Kind(read, "|".join(words))


def _either(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}"


def _listed(value: Any) -> list[Any]:
    """Return the entries of a list or of a comma-separated string, or the single value."""
    entries: list[Any] = []
    for entry in value if isinstance(value, list) else [value]:
        is_text = isinstance(entry, str)
        entries += [word.strip() for word in entry.split(",")] if is_text else [entry]
    return [entry for entry in entries if entry != ""]


def _read_strategies(value: Any, at: Place) -> tuple[DeviceList, ...]:
    words, known = _listed(value), list(DeviceList)
    if not words:
        at.fail(value, f"at least one of {', '.join(known)}")
    for word in words:
        if not isinstance(word, str) or word not in known:
            at.fail(word, _either(known))
    return tuple(strategy for strategy in known if strategy in words)


def _read_channels(value: Any, at: Place) -> tuple[int, ...]:
    wanted = "[] or [0], the one channel that the containers of a node can share"
    numbers = tuple(dict.fromkeys(_read_number(entry, at, wanted) for entry in _listed(value)))
    if numbers not in {(), (0,)}:
        at.fail(",".join(map(str, numbers)), wanted)
    return numbers


def _read_slicing(value: Any, at: Place) -> None:
    """Refuse a strategy of time-slicing; NVIDIA's plugin has removed all values."""
    if value != "":
        at.fail(value, "left out: there is only one strategy")


def _read_version(value: Any, at: Place) -> str:
    if not isinstance(value, str) or value not in {"", VERSION}:
        at.fail(value, VERSION)
    return VERSION


def resource_name(text: str) -> str | None:
    """Return a resource's name with its prefix.

    Args:
        text: "nvidia.com/gpu" or "gpu".

    Returns:
        The name; None if it is not a valid name of a resource.
    """
    name = text if text.startswith(_PREFIX) else _PREFIX + text
    if len(name) > _LONGEST_NAME or _NAME.fullmatch(name.removeprefix(_PREFIX)) is None:
        return None
    return name


def _read_resource_name(value: Any, at: Place) -> str:
    name = resource_name(_read_text(value, at))
    if name is None:
        at.fail(
            value,
            f"a name such as nvidia.com/gpu, of at most {_LONGEST_NAME} lower-case letters, "
            "digits, hyphens and dots",
        )
    return name


def _read_devices(value: Any, at: Place) -> tuple[tuple[str, ...] | None, int | None]:
    """Return a list of devices and a count, of which at most one is set; both None for all."""
    if value == "all":
        return None, None
    if not isinstance(value, list):
        count = _read_number(value, at, "all, a number of devices, or a list of devices")
        if count < 1:
            at.fail(value, "all, or at least 1 device")
        return None, count
    devices = []
    for number, entry in enumerate(value):
        device = _DEVICE.fullmatch(str(entry) if isinstance(entry, (str, int)) else "")
        if device is None:
            at.entry(number).fail(entry, "an index (0, or 0:1 for a MIG device) or a UUID")
        prefix = device["new"] or device["old"] or ""
        devices.append(prefix + device[0].removeprefix(prefix).lower())
    return tuple(dict.fromkeys(devices)), None


def _read_replicas(value: Any, at: Place) -> int:
    wanted = f"a number from 2 to {_MOST_REPLICAS}; leave out a resource that is not shared"
    number = _read_number(value, at, wanted)
    if not _FEWEST_REPLICAS <= number <= _MOST_REPLICAS:
        at.fail(value, wanted)
    return number


BOOLEAN: Final = Kind(_read_boolean, "true|false")
CHANNELS: Final = Kind(_read_channels, "NUMBER")
DEVICES: Final = Kind(_read_devices)
DIRECTORY: Final = Kind(_read_directory, "DIR")
IGNORED: Final = Kind(_read_ignored)
LAYOUT_VERSION: Final = Kind(_read_version)
PREFIX: Final = Kind(_read_text, "PREFIX")
REPLICAS: Final = Kind(_read_replicas)
RESOURCE_NAME: Final = Kind(_read_resource_name)
SLICING: Final = Kind(_read_slicing)
STRATEGIES: Final = Kind(_read_strategies, "|".join(DeviceList))
