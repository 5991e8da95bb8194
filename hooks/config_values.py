"""What a value of a configuration file may be: one function for each kind of value.

Each returns the value as :class:`hooks.config.Config` has it, or None if it is not of its kind.
"""

from __future__ import annotations

import posixpath
import re
from typing import TYPE_CHECKING, Final

from hooks.requests.request import CAPABILITIES

if TYPE_CHECKING:
    from collections.abc import Callable


def path(value: object) -> str | None:
    """An absolute path, with nothing in it that leads back."""
    if not isinstance(value, str) or not value.startswith("/") or "\0" in value:
        return None
    # normpath keeps two leading slashes, which POSIX lets mean something else
    return "/" + posixpath.normpath(value).lstrip("/")


LOOK: Final = "auto"


def yes_no_or_look(value: object) -> bool | str | None:
    """Whether something is done, or that it depends."""
    return value if isinstance(value, bool) or value == LOOK else None


def path_or_look(value: object) -> str | None:
    """An absolute path, or the word for finding it by looking."""
    return LOOK if value == LOOK else path(value)


_LONGEST_TIMEOUT: Final = 600.0


def seconds(value: object) -> float | None:
    """A time limit."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 < value <= _LONGEST_TIMEOUT else None


_DAY: Final = 86400.0


def long_seconds(value: object) -> float | None:
    """How long something is to last."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 < value <= _DAY else None


_MOST: Final = 1000


def count(value: object) -> int | None:
    """How many of something; at least one."""
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 < value <= _MOST else None


def paths(value: object) -> tuple[str, ...] | None:
    """A list of absolute paths."""
    if not isinstance(value, list):
        return None
    found = [path(entry) for entry in value]
    return None if None in found else tuple(each for each in found if each)


XID: Final = re.compile(r"[1-9][0-9]{0,4}=(ignore|suspect|unhealthy|fatal)")
VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# A name that begins with a domain; "" would make every annotation a list of devices.
PREFIX: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9_./-]*")
KIND: Final = re.compile(
    r"[A-Za-z]([A-Za-z0-9_.-]*[A-Za-z0-9])?/[A-Za-z]([A-Za-z0-9_-]*[A-Za-z0-9])?"
)


def either(no: str, yes: str) -> Callable[[object], object]:
    """One of two words, as False and True."""

    def check(value: object) -> bool | None:
        return {no: False, yes: True}.get(value) if isinstance(value, str) else None

    return check


def text_like(pattern: re.Pattern[str]) -> Callable[[object], object]:
    """A string of a form."""

    def check(value: object) -> str | None:
        return value if isinstance(value, str) and pattern.fullmatch(value) else None

    return check


def texts_like(pattern: re.Pattern[str]) -> Callable[[object], object]:
    """A list of strings of a form; each counts once."""
    check = text_like(pattern)

    def check_all(value: object) -> tuple[object, ...] | None:
        if not isinstance(value, list) or not all(check(entry) for entry in value):
            return None
        return tuple(dict.fromkeys(value))

    return check_all


def yes_or_no(value: object) -> bool | None:
    """True or false, and no number that is taken for it."""
    return value if isinstance(value, bool) else None


def one_of(*choices: str) -> Callable[[object], str | None]:
    """One of these words."""
    return lambda value: value if isinstance(value, str) and value in choices else None


def words(value: object) -> tuple[str, ...] | None:
    """A list of strings; each counts once."""
    if not isinstance(value, list) or not all(isinstance(word, str) and word for word in value):
        return None
    return tuple(dict.fromkeys(value))


def capabilities(value: object) -> tuple[str, ...] | None:
    """A list of driver capabilities, sorted; None if the value is none."""
    named = words(value)
    return None if named is None or not CAPABILITIES.issuperset(named) else tuple(sorted(named))


_ANY, _EXCLUSIVE = "any", "exclusive"
_MOST_HOLDERS: Final = 4096
_INDEX: Final = re.compile(r"[0-9]{1,4}(:[0-9]{1,4})?")


def holders(value: object) -> int | str | None:
    """How many may have a device at once."""
    if isinstance(value, bool) or not isinstance(value, int):
        return value if isinstance(value, str) and value in {_ANY, _EXCLUSIVE} else None
    return value if 1 <= value <= _MOST_HOLDERS else None


def holders_of(value: object) -> tuple[str, ...] | None:
    """A list of devices, each with how many may have it: "NAME=HOLDERS"."""
    named = words(value)
    found: dict[str, int | str] = {}
    for word in named or ():
        name, _, many = word.rpartition("=")
        number = int(many) if many.isdecimal() and many.isascii() else many
        device, limit = _device(name), holders(number)
        if device is None or limit is None or device in found:
            return None
        found[device] = limit
    return None if named is None else tuple(f"{name}={many}" for name, many in found.items())


def _device(name: str) -> str | None:
    """A name of a GPU or a MIG device, as an inventory writes it."""
    if _INDEX.fullmatch(name):
        return ":".join(str(int(part)) for part in name.split(":"))
    return _uuid(name, "GPU") or _uuid(name, "MIG") or _pci_address(name)


_UUID_GROUPS: Final = [8, 4, 4, 4, 12]
_HEX: Final = frozenset("0123456789abcdef")
_DOMAIN_DIGITS, _MOST_DOMAIN_DIGITS = 4, 8
_PCI_DIGITS: Final = [2, 2, 1]  # of bus, device and function


def gpu_names(value: object) -> tuple[str, ...] | None:
    """A list of UUIDs and PCI addresses of GPUs, as procfs writes them but for case."""
    named = words(value)
    if named is None:
        return None
    names = [_uuid(word) or _pci_address(word) for word in named]
    return None if None in names else tuple(dict.fromkeys(name for name in names if name))


def _uuid(text: str, of: str = "GPU") -> str | None:
    kind, _, digits = text.partition("-")
    groups = digits.lower().split("-")
    fits = [len(group) for group in groups] == _UUID_GROUPS and _HEX.issuperset("".join(groups))
    return f"{of}-{digits.lower()}" if fits and kind.upper() == of else None


def _pci_address(text: str) -> str | None:
    """As sysfs writes it: NVML and nvidia-smi write eight digits of the domain, lspci none."""
    front, _, rest = text.lower().rpartition(":")
    domain, _, bus = front.rpartition(":")
    device, _, function = rest.partition(".")
    numbers = [domain or "0", bus, device, function]
    lengths = [len(number) for number in numbers]
    if not _HEX.issuperset("".join(numbers)) or lengths[0] > _MOST_DOMAIN_DIGITS:
        return None
    fits = lengths[1:] == _PCI_DIGITS
    return f"{int(numbers[0], 16):0{_DOMAIN_DIGITS}x}:{bus}:{rest}" if fits else None
