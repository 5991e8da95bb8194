"""What a key of the device plugin's configuration may say, and what is said of one that may not.

A reader takes what is there, of a file or a flag, and where that is; it returns the value as
:mod:`.values` has it, or fails with what was found and what there may be.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn

from api.errors import one_line
from integration.node.plugin.errors import UnknownSetting, WrongSetting
from integration.node.plugin.values import DeviceList

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from enum import StrEnum

__all__ = [
    "ASKED",
    "Place",
    "Reader",
    "known_key",
    "one_of",
    "read_boolean",
    "read_channels",
    "read_devices",
    "read_name",
    "read_path",
    "read_replicas",
    "read_strategies",
    "read_strategy",
    "read_text",
    "resource_name",
    "shown",
]

ASKED: Final = "the device plugin's settings"
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
class Place:
    """Where a value is: ``path`` in the file, or the flag or variable that says it."""

    path: str
    file: str = ""

    def __str__(self) -> str:
        return f"{self.path} in {self.file}" if self.file else self.path

    def key(self, name: str) -> Place:
        """Where a key of it is."""
        return Place(f"{self.path}.{name}" if self.path else name, self.file)

    def entry(self, number: int) -> Place:
        """Where an entry of the list is."""
        return Place(f"{self.path}[{number}]", self.file)

    def fail(self, value: Any, wanted: str) -> NoReturn:
        """Say what is here, and what there may be. Raises WrongSetting."""
        raise WrongSetting(ASKED, found=f"{self}: {shown(value)}", do=f"it has to be {wanted}")


def shown(value: Any) -> str:
    """A value for people, and not all of a long one."""
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    text = repr(str(value)) if isinstance(value, str) else str(value)
    return one_line(text if len(text) <= _LONGEST_FOUND else text[:_LONGEST_FOUND] + "…")


Reader = Callable[[Any, Place], Any]


# -- what a key may say ------------------------------------------------------------------------


def read_boolean(value: Any, at: Place) -> bool:
    """A truth value, also in quotes, in the words of Go's flags and of YAML."""
    if isinstance(value, bool):
        return value
    word = str(value) if isinstance(value, (str, int)) else ""
    if word in _TRUE or word in _YES:
        return True
    if word not in _FALSE and word not in _NO:
        at.fail(value, "true or false")
    return False


def read_text(value: Any, at: Place) -> str:
    """A text of one line."""
    if not isinstance(value, str) or not value.isprintable():
        at.fail(value, "a text")
    return str(value)


def read_path(value: Any, at: Place) -> str:
    """An absolute path without a slash at its end; "" for none."""
    text = read_text(value, at)
    if text and not text.startswith("/"):
        at.fail(value, "an absolute path")
    return text.rstrip("/") or text[:1]


def read_number(value: Any, at: Place, wanted: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if not isinstance(value, str) or not _NUMBER.fullmatch(value):
        at.fail(value, wanted)
    return int(value)


def one_of(kind: type[StrEnum]) -> Callable[[Any, Place], StrEnum]:
    """A reader of one of some words."""

    def read(value: Any, at: Place) -> StrEnum:
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


def read_strategies(value: Any, at: Place) -> tuple[DeviceList, ...]:
    """Strategies: a list, a comma list, or one; each once."""
    words = _listed(value)
    if not words:
        at.fail(value, f"at least one of {', '.join(DeviceList)}")
    known = list(DeviceList)
    for word in words:
        if not isinstance(word, str) or word not in known:
            at.fail(word, _either(known))
    chosen = {DeviceList(str(word)) for word in words}
    return tuple(strategy for strategy in DeviceList if strategy in chosen)


def read_channels(value: Any, at: Place) -> tuple[int, ...]:
    """IMEX channels, likewise."""
    wanted = "[] or [0], for that is the one that a node's containers can share"
    numbers = tuple(dict.fromkeys(read_number(entry, at, wanted) for entry in _listed(value)))
    if numbers not in {(), (0,)}:
        at.fail(",".join(map(str, numbers)), wanted)
    return numbers


def _nothing(value: Any, at: Place) -> None:
    """Of what means nothing here, nothing is checked."""
    del value, at


def read_strategy(value: Any, at: Place) -> None:
    """How time is sliced, which NVIDIA's knows no words for any more."""
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


def read_name(value: Any, at: Place) -> str:
    """A resource's name, with its prefix."""
    name = resource_name(read_text(value, at))
    if name is None:
        at.fail(
            value,
            f"a name such as nvidia.com/gpu, of at most {_LONGEST_NAME} lower-case letters, "
            "digits, hyphens and dots",
        )
    return name


def read_devices(value: Any, at: Place) -> tuple[tuple[str, ...] | None, int | None]:
    """Which devices, and how many; None for all of them."""
    if value == "all":
        return None, None
    if not isinstance(value, list):
        count = read_number(value, at, "all, a number of devices, or a list of them")
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


def read_replicas(value: Any, at: Place) -> int:
    """Into how many shares a device is divided."""
    wanted = f"a number, 2 to {_MOST_REPLICAS}; without sharing, leave the resource out"
    number = read_number(value, at, wanted)
    if not _FEWEST_REPLICAS <= number <= _MOST_REPLICAS:
        at.fail(value, wanted)
    return number


_FEWEST_REPLICAS: Final = 2
# More than a kubelet takes in one message (4 MiB), from a node with 16 GPUs.
_MOST_REPLICAS: Final = 4096


def known_key(key: str, names: Mapping[str, Any], at: Place) -> str:
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
        ASKED,
        found=f"{at.key(key[:_LONGEST_FOUND])}, which means nothing",
        do=f"did you mean {by_case[near[0]]}?" if near else f"there is {', '.join(sorted(names))}",
    )
