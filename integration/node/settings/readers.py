"""The kinds of values in the device plugin's settings, and their places for messages.

Kinds accept what NVIDIA's plugin accepts, and return values as
:mod:`integration.node.values.resources` declares them. Values of the file and texts of flags are
read in the same way: a boolean or a number may be in quotes, as templates write them.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final, NoReturn

from api.errors import one_line
from api.values import dataclass, field
from hooks.schema import FALSE, TRUE, Kind, WrongValue, choice, either, need
from integration.agent_errors import WrongSetting
from integration.node.values.resources import PATTERN, DeviceList

SUBJECT: Final = "the device plugin's settings"
VERSION: Final = "v1"
"""The version of the configuration file."""

_LONGEST_FOUND: Final = 80

# Go's words for booleans, and those that YAML 1.1 adds.
_TRUE: Final = TRUE | {"yes", "Yes", "YES", "on", "On", "ON", "y", "Y"}
_FALSE: Final = FALSE | {"no", "No", "NO", "off", "Off", "OFF", "n", "N"}

_NUMBER: Final = re.compile(r"[+]?[0-9]{1,9}")
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

    def read(self, kind: Kind, value: Any) -> Any:
        """Convert a value in the file, or a text.

        Raises:
            WrongSetting: the value is not allowed; the message has it and the allowed ones.
        """
        try:
            return kind.check(value)
        except WrongValue as error:
            part = Place(f"{self.path}{error.part}", self.file)
            part.fail(error.value, error.wanted_text)

    def fail(self, value: Any, wanted: str) -> NoReturn:
        """Raise WrongSetting with the value and what is allowed."""
        quoted = isinstance(value, str) and len(value) > 1 and value[0] == value[-1] in {"'", '"'}
        bare = ", without the quotes" if quoted else ""
        raise WrongSetting(
            SUBJECT, found=f"{self}: {shown(value)}", do=f"it must be {wanted}{bare}"
        ) from None


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


def _boolean(value: Any) -> bool:
    word = str(value) if isinstance(value, (str, int)) else ""
    need(word in _TRUE or word in _FALSE)
    return word in _TRUE


def _printable(value: Any) -> str:
    need(isinstance(value, str) and value.isprintable())
    return str(value)


def _directory(value: Any) -> str:
    """Return an absolute path without a trailing slash; "" for none."""
    text = _printable(value)
    need(not text or text.startswith("/"))
    return text.rstrip("/") or text[:1]


def _number(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    need(isinstance(value, str) and _NUMBER.fullmatch(value))
    return int(value)


def one_of(words: type[StrEnum]) -> Kind:
    """Return the kind of a setting that is one of several words."""
    return choice({word.value: word for word in words})


def _listed(value: Any) -> list[Any]:
    """Return the entries of a list or of a comma-separated string, or the single value."""
    entries: list[Any] = []
    for entry in value if isinstance(value, list) else [value]:
        is_text = isinstance(entry, str)
        entries += [word.strip() for word in entry.split(",")] if is_text else [entry]
    return [entry for entry in entries if entry != ""]


def _strategies(value: Any) -> tuple[DeviceList, ...]:
    words = _listed(value)
    need(words)
    chosen = [_STRATEGY.check(word) for word in words]
    return tuple(strategy for strategy in DeviceList if strategy in chosen)


def _channels(value: Any) -> tuple[int, ...]:
    numbers = tuple(dict.fromkeys(map(_CHANNEL.check, _listed(value))))
    if numbers not in {(), (0,)}:
        raise WrongValue(_CHANNEL.wanted, ",".join(map(str, numbers)))
    return numbers


def _left_out(value: Any) -> None:
    need(value == "")


def _version(value: Any) -> str:
    need(isinstance(value, str) and value in {"", VERSION})
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


def _resource_name(value: Any) -> str:
    name = resource_name(_printable(value))
    need(name)
    return str(name)


def _devices(value: Any) -> tuple[tuple[str, ...] | None, int | None]:
    """Return a list of devices and a count. At most one is set; both are None for all devices."""
    if value == "all":
        return None, None
    if not isinstance(value, list):
        count = _number(value)
        if count < 1:
            raise WrongValue("all, or at least 1 device", value)
        return None, count
    devices = []
    for number, entry in enumerate(value):
        if isinstance(entry, str) and PATTERN in entry:
            devices.append(_printable(entry))
            continue
        device = _DEVICE.fullmatch(str(entry) if isinstance(entry, (str, int)) else "")
        if device is None:
            wanted = (
                "an index (0, or 0:1 for a MIG device), a UUID, or a pattern of the GPU's name such"
                " as *H100*"
            )
            raise WrongValue(wanted, entry, f"[{number}]")
        prefix = device["new"] or device["old"] or ""
        devices.append(prefix + device[0].removeprefix(prefix).lower())
    return tuple(dict.fromkeys(devices)), None


def _replicas(value: Any) -> int:
    number = _number(value)
    need(_FEWEST_REPLICAS <= number <= _MOST_REPLICAS)
    return number


_STRATEGY: Final = one_of(DeviceList)
_CHANNEL: Final = Kind(
    _number, "[] or [0], the one channel that the containers of a node can share"
)
BOOLEAN: Final = Kind(_boolean, "true or false", metavar="true|false")
CHANNELS: Final = Kind(_channels, _CHANNEL.wanted, metavar="NUMBER", is_list=True)
DEVICES: Final = Kind(_devices, "all, a number of devices, or a list of devices")
DIRECTORY: Final = Kind(_directory, "an absolute path", metavar="DIR")
LAYOUT_VERSION: Final = Kind(_version, VERSION)
PREFIX: Final = Kind(_printable, "a printable string", metavar="PREFIX")
REPLICAS: Final = Kind(
    _replicas, f"a number from 2 to {_MOST_REPLICAS}; leave out a resource that is not shared"
)
RESOURCE_NAME: Final = Kind(
    _resource_name,
    f"a name such as nvidia.com/gpu, of at most {_LONGEST_NAME} lower-case letters, digits, "
    "hyphens and dots",
)
RENAME: Final = choice({"": ""}, RESOURCE_NAME, RESOURCE_NAME.wanted)
SLICING: Final = Kind(_left_out, "left out: there is only one strategy")
STRATEGIES: Final = Kind(
    _strategies, f"at least one of {either(DeviceList)}", metavar=_STRATEGY.metavar, is_list=True
)
