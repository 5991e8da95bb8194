"""The kinds of values that only the engine's configuration has."""

from __future__ import annotations

import re
from typing import Any, Final

from hooks.schema import BOOLEAN, PATH, Kind, choice, like, list_of, need, number, one_of
from hooks.words import CAPABILITIES, CDI_KIND, SERVICES, items_of

_INDEX: Final = re.compile(r"[0-9]{1,4}(:[0-9]{1,4})?")
_UUID: Final = re.compile(
    r"(GPU|MIG)-([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})", re.IGNORECASE | re.ASCII
)
_PCI_ADDRESS: Final = re.compile(
    r"(?:([0-9a-f]{0,8}):)?([0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f])", re.IGNORECASE | re.ASCII
)


def _uuid(text: str, of: str = "GPU") -> str:
    match = _UUID.fullmatch(text)
    return f"{of}-{match[2].lower()}" if match and match[1].upper() == of else ""


def _pci_address(text: str) -> str:
    """Return it in sysfs form: NVML and nvidia-smi write eight digits of the domain, lspci none."""
    match = _PCI_ADDRESS.fullmatch(text)
    return f"{int(match[1] or '0', 16):04x}:{match[2].lower()}" if match else ""


def _gpu(value: Any) -> str:
    """Return a GPU's UUID or PCI address, in procfs' form except for upper and lower case."""
    name = isinstance(value, str) and (_uuid(value) or _pci_address(value))
    need(name)
    return str(name)


def _word(value: Any) -> str:
    need(isinstance(value, str) and value)
    return str(value)


def _device(name: str) -> str:
    """Return the name of a GPU or a MIG device as in an inventory."""
    if _INDEX.fullmatch(name):
        return ":".join(str(int(part)) for part in name.split(":"))
    found = _uuid(name, "GPU") or _uuid(name, "MIG") or _pci_address(name)
    need(found)
    return found


def _holders_of(value: Any) -> tuple[str, ...]:
    found: dict[str, int | str] = {}
    for word in NAMESPACES.of_value(value):
        name, _, many = word.rpartition("=")
        device = _device(name)
        need(device not in found)
        found[device] = (HOLDERS.of_text or HOLDERS.of_value)(many)
    return tuple(f"{name}={many}" for name, many in found.items())


def _of(words: tuple[str, ...]) -> Kind:
    """Return a kind of lists of these words."""
    return list_of(one_of(*words), f"a list of {', '.join(words)}")


def _sorted(value: Any) -> tuple[str, ...]:
    return tuple(sorted(_CAPABILITIES.of_value(value)))


_CAPABILITIES: Final = _of(tuple(sorted(CAPABILITIES)))
PATHS: Final = list_of(PATH, "a list of absolute paths", once=False)
PATH_OR_AUTO: Final = choice({"auto": None}, PATH, f'{PATH.wanted} or "auto"')
BOOLEAN_OR_AUTO: Final = choice({"auto": "auto"}, BOOLEAN, 'true, false or "auto"')
FAIL_OR_LEAVE_OUT: Final = choice({"fail": False, "leave-out": True})
EXIT_CODE: Final = number(0, 255, "an exit code, 1 to 255, or 0 for the container's own")
VARIABLES: Final = list_of(like(r"[A-Za-z_][A-Za-z0-9_]*", ""), "a list of names of variables")
PREFIXES: Final = list_of(
    # A name that starts with a domain: with "", every annotation would be a list of devices.
    like(r"[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9_./-]*", ""),
    'a list of prefixes ("cdi.k8s.io/")',
)
KIND: Final = like(CDI_KIND, 'a kind ("nvidia.com/gpu")')
NAMESPACES: Final = list_of(Kind(_word, ""), "a list of namespaces")
GPUS: Final = list_of(
    Kind(_gpu, ""), 'a list of UUIDs ("GPU-…", in full) and PCI addresses ("0000:3b:00.0")'
)
DRIVER_CAPABILITIES: Final = Kind(
    _sorted,
    _CAPABILITIES.wanted,
    lambda text: _sorted(items_of(text)),
    _CAPABILITIES.words,
)
SERVICE_SOCKETS: Final = _of(SERVICES)
HOLDERS: Final = choice(
    {"any": "any", "exclusive": "exclusive"}, number(1, 4096),
    '"any", "exclusive" or a number, at least 1',
)  # fmt: skip
HOLDERS_OF: Final = Kind(
    _holders_of,
    'a list of "NAME=any", "NAME=exclusive" and "NAME=4", by UUID, PCI address or index',
)
MEMORY: Final = choice(
    {"none": "none"}, like(r"[1-9][0-9]{0,6}(MiB|GiB)|([1-9][0-9]?|100)%", ""),
    '"none", an amount ("8GiB", "512MiB"), or a part of the device ("25%")',
)  # fmt: skip
FINDINGS: Final = list_of(
    like(r"(NVSHIM-)?D[0-9]{3}", ""), 'a list of codes of the doctor\'s checks ("D042")'
)
XIDS: Final = list_of(
    like(r"[1-9][0-9]{0,4}=(ignore|suspect|unhealthy|fatal)", ""),
    'a list of "NUMBER=SEVERITY", which is ignore, suspect, unhealthy or fatal',
)
