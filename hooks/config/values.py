"""What a value of a configuration file may be: a :class:`Kind` for each kind of value."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from hooks.words import CAPABILITIES, CDI_KIND, SERVICES, normal_path


class Kind(NamedTuple):
    """A kind of value.

    Attributes:
        check: the value as :class:`hooks.config.Config` has it; None if it is invalid.
        wanted: the allowed values, for messages.
    """

    check: Callable[[object], Any]
    wanted: str


LOOK: Final = "auto"


def path(value: object) -> str | None:
    """An absolute path, without ``..``."""
    if not isinstance(value, str) or not value.startswith("/") or "\0" in value:
        return None
    return normal_path(value)


def paths(value: object) -> tuple[str, ...] | None:
    """A list of absolute paths."""
    if not isinstance(value, list):
        return None
    found = [path(entry) for entry in value]
    return None if None in found else tuple(each for each in found if each)


def words(value: object) -> tuple[str, ...] | None:
    """A list of strings; each counts once."""
    if not isinstance(value, list) or not all(isinstance(word, str) and word for word in value):
        return None
    return tuple(dict.fromkeys(value))


def capabilities(value: object) -> tuple[str, ...] | None:
    """A list of driver capabilities, sorted; None if the value is no such list."""
    named = words(value)
    return None if named is None or not CAPABILITIES.issuperset(named) else tuple(sorted(named))


def services(value: object) -> tuple[str, ...] | None:
    """A list of services of the driver; None if the value is no such list."""
    named = words(value)
    return None if named is None or not set(SERVICES).issuperset(named) else named


def _seconds(most: float) -> Callable[[object], float | None]:
    def check(value: object) -> float | None:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        return float(value) if 0 < value <= most else None

    return check


def _count(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 < value <= _MOST else None


def exit_code(value: object) -> int | None:
    """An exit code of a process, or 0 for none."""
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value <= _MOST_EXIT_CODE else None


def _like(pattern: re.Pattern[str]) -> Callable[[object], str | None]:
    return lambda value: value if isinstance(value, str) and pattern.fullmatch(value) else None


def _all_like(pattern: str) -> Callable[[object], tuple[str, ...] | None]:
    check = _like(re.compile(pattern))

    def check_all(value: object) -> tuple[str, ...] | None:
        named = words(value)
        return named if named is not None and all(map(check, named)) else None

    return check_all


def one_of(*choices: str) -> Kind:
    """One of these words."""
    quoted = [f'"{choice}"' for choice in choices]
    return Kind(
        lambda value: value if isinstance(value, str) and value in choices else None,
        f"{', '.join(quoted[:-1])} or {quoted[-1]}",
    )


_ANY, _EXCLUSIVE = "any", "exclusive"
_MOST: Final = 1000
_MOST_EXIT_CODE: Final = 255
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


_UUID: Final = re.compile(
    r"(GPU|MIG)-([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})", re.IGNORECASE | re.ASCII
)
_PCI_ADDRESS: Final = re.compile(
    r"(?:([0-9a-f]{0,8}):)?([0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f])", re.IGNORECASE | re.ASCII
)


def gpu_names(value: object) -> tuple[str, ...] | None:
    """A list of UUIDs and PCI addresses of GPUs, as procfs writes them but for case."""
    named = words(value)
    if named is None:
        return None
    names = [_uuid(word) or _pci_address(word) for word in named]
    return None if None in names else tuple(dict.fromkeys(name for name in names if name))


def _uuid(text: str, of: str = "GPU") -> str | None:
    match = _UUID.fullmatch(text)
    return f"{of}-{match[2].lower()}" if match and match[1].upper() == of else None


def _pci_address(text: str) -> str | None:
    """As sysfs writes it: NVML and nvidia-smi write eight digits of the domain, lspci none."""
    match = _PCI_ADDRESS.fullmatch(text)
    return f"{int(match[1] or '0', 16):04x}:{match[2].lower()}" if match else None


PATH: Final = Kind(path, 'an absolute path ("/…")')
PATH_OR_LOOK: Final = Kind(
    lambda value: LOOK if value == LOOK else path(value), f'{PATH.wanted} or "{LOOK}"'
)
PATHS: Final = Kind(paths, "a list of absolute paths")
YES_OR_NO: Final = Kind(
    # 0 and 1 are equal to False and True, and are refused.
    lambda value: value if isinstance(value, bool) else None,
    "true or false",
)
YES_NO_OR_LOOK: Final = Kind(
    lambda value: value if isinstance(value, bool) or value == LOOK else None,
    f'true, false or "{LOOK}"',
)
FAIL_OR_LEAVE_OUT: Final = Kind(
    lambda value: {"fail": False, "leave-out": True}.get(value) if isinstance(value, str) else None,
    '"fail" or "leave-out"',
)
SECONDS: Final = Kind(_seconds(600), "seconds, more than 0 and at most 600")
LONG_SECONDS: Final = Kind(_seconds(86400), "seconds, more than 0 and at most 86400")
COUNT: Final = Kind(_count, "a number, 1 to 1000")
EXIT_CODE: Final = Kind(exit_code, "an exit code, 1 to 255, or 0 for the container's own")
VARIABLES: Final = Kind(_all_like(r"[A-Za-z_][A-Za-z0-9_]*"), "a list of names of variables")
PREFIXES: Final = Kind(
    # A name that starts with a domain; "" would make every annotation a list of devices.
    _all_like(r"[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9_./-]*"),
    'a list of prefixes ("cdi.k8s.io/")',
)
KIND: Final = Kind(_like(CDI_KIND), 'a kind ("nvidia.com/gpu")')
NAMESPACES: Final = Kind(words, "a list of namespaces")
GPUS: Final = Kind(
    gpu_names, 'a list of UUIDs ("GPU-…", in full) and PCI addresses ("0000:3b:00.0")'
)
DRIVER_CAPABILITIES: Final = Kind(capabilities, f"a list of {', '.join(sorted(CAPABILITIES))}")
SERVICE_SOCKETS: Final = Kind(services, f"a list of {', '.join(SERVICES)}")
HOLDERS: Final = Kind(holders, '"any", "exclusive" or a number, at least 1')
HOLDERS_OF: Final = Kind(
    holders_of,
    'a list of "NAME=any", "NAME=exclusive" and "NAME=4", by UUID, PCI address or index',
)
MEMORY: Final = Kind(
    _like(re.compile(r"none|[1-9][0-9]{0,6}(MiB|GiB)|([1-9][0-9]?|100)%", re.ASCII)),
    '"none", an amount ("8GiB", "512MiB"), or a part of the device ("25%")',
)
FINDINGS: Final = Kind(
    _all_like(r"(NVSHIM-)?D[0-9]{3}"), 'a list of codes of the doctor\'s checks ("D042")'
)
XIDS: Final = Kind(
    _all_like(r"[1-9][0-9]{0,4}=(ignore|suspect|unhealthy|fatal)"),
    'a list of "NUMBER=SEVERITY", which is ignore, suspect, unhealthy or fatal',
)
