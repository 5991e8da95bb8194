"""How names of devices are written, wherever they are: in variables, annotations, mounts.

A list has items. Spaces around an item, and empty items, do not count.

=========================  ==============================================================
item                       what it names
=========================  ==============================================================
``void``                   anywhere in a list: nothing is asked at all
``none``, ``all``          whichever comes first decides for all of NVIDIA's GPUs.
                           ``none``: driver files and control nodes, no GPU;
                           ``all``: every GPU and every MIG device
``3``                      a GPU by its index (PCI bus order)
``0-3``                    the GPUs with these indices
``1:0``                    a MIG device by its index in the GPU with that index
``GPU-…``, ``MIG-…``       a UUID, or as much of its beginning as only one device has
``MIG-GPU-…/1/0``          a MIG device by its GPU's UUID, GPU instance and compute instance
``0000:07:00.0``           a GPU by its PCI address; the domain may have 8 digits or be left
                           out (``07:00.0``)
``VENDOR/CLASS=NAME``      a device of that CDI kind; see below
=========================  ==============================================================

Hexadecimal digits, and the words GPU and MIG, may be in upper or lower case.

A kind holds for the items after it as well: ``nvidia.com/gpu=0,1`` is two of one kind, and in
``0,amd.com/gpu=0,1`` only the first is NVIDIA's. Before the first kind, the default kind holds.

=======================================  ================================================
kind                                     its names
=======================================  ================================================
``nvidia.com/gpu``,                      those of the first table, ``gpu0`` and ``mig1:0``
``runtime.nvidia.com/gpu``               (what ``nvidia-ctk cdi generate`` can call them)
``nvidia.com/gds``, ``/mofed``,          ``all``
``/gdrcopy``, ``/nvswitch``,
``management.nvidia.com/gpu``
``nvidia.com/imex-channel``              ``0``, ``channel0``, ``all``
any other, or another name of the above  what a CDI file says. (But all of
                                         ``runtime.nvidia.com`` is known here)
=======================================  ================================================

Parsing is total: every string is a list of names or one typed error.

Source: NVIDIA Container Toolkit, internal/config/image and pkg/nvcdi (names of devices);
libnvidia-container, src/cli/common.c (what it takes for a GPU); the CDI specification, "Device
names". Where the first two differ, or refuse, what is written here is the union of both.
"""

from __future__ import annotations

from hooks.errors import MalformedDevice
from hooks.requests.names import (
    AllDevices,
    Feature,
    GpuBusId,
    GpuIndex,
    GpuUuid,
    MigIndex,
    MigInstance,
    MigUuid,
    NamedDevices,
    Names,
    NoDevices,
    Void,
)
from hooks.requests.request_errors import MalformedChannel, TooManyDevices

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Final

    from hooks.requests.names import DeviceName, Devices

__all__ = ["items_of", "parse_channels", "parse_names", "united_channels"]

_GPU_KINDS: Final = frozenset({"nvidia.com/gpu", "runtime.nvidia.com/gpu"})
_CHANNEL_KIND: Final = "nvidia.com/imex-channel"
_FEATURE_KINDS: Final = {
    "nvidia.com/gds": Feature.GDS,
    "nvidia.com/mofed": Feature.MOFED,
    "nvidia.com/gdrcopy": Feature.GDRCOPY,
    "nvidia.com/nvswitch": Feature.NVSWITCH,
    "management.nvidia.com/gpu": Feature.MANAGEMENT,
}
# No file may define devices of this vendor.
_LIVE_VENDOR: Final = "runtime.nvidia.com/"

# More than any node has, and few enough that a hostile list costs nothing worth measuring.
_MOST_DEVICES: Final = 1024


def items_of(value: str) -> list[str]:
    """The items of a comma list."""
    return [item for item in (part.strip() for part in value.split(",")) if item]


def parse_names(items: Iterable[str], *, asked: str, default_kind: str = "nvidia.com/gpu") -> Names:
    """What the items of a list name, by the tables in this module's head.

    Args:
        items: as :func:`items_of` gives them.
        asked: what stands there, for messages.
        default_kind: the CDI kind of an item that has none.

    Returns:
        What is named.

    Raises:
        MalformedDevice: an item has none of the known forms.
        MalformedChannel: an IMEX channel is no number of one.
        TooManyDevices: the list is longer than any node is large.
    """
    items = list(items)
    if "void" in items:
        return Names(Void())
    work = _List(asked)
    kind, explicit = default_kind, False
    for item in items:
        head, equals, name = item.partition("=")
        if equals:
            kind, explicit = head, True
            if not _is_kind(kind) or not _is_name(name):
                raise work.malformed(item)
        else:
            name = item
        work.add(kind, name, item, explicit=explicit)
    return work.names()


class _List:
    """What a list names, in the making."""

    def __init__(self, asked: str) -> None:
        self._asked = asked
        # The first of "none" and "all" decides, and what else is there is not even looked at.
        self._word: Devices | None = None
        self._gpus: dict[tuple[str, str], bool] = {}
        self._features: set[str] = set()
        self._channels: list[str] = []
        self._cdi: dict[str, None] = {}

    def add(self, kind: str, name: str, item: str, *, explicit: bool) -> None:
        if name == "none" and (kind in _GPU_KINDS or not explicit):
            self._word = self._word or NoDevices()
        elif kind in _GPU_KINDS:
            if name == "all":
                self._word = self._word or AllDevices()
            else:
                self._gpus[kind, name] = explicit
        elif kind in _FEATURE_KINDS and name == "all":
            self._features.add(_FEATURE_KINDS[kind])
        elif kind == _CHANNEL_KIND:
            self._channels.append(name)
        elif _is_name(name):
            self._cdi[f"{kind}={name}"] = None
        else:
            raise self.malformed(item)
        self._bound(len(self._cdi))

    def names(self) -> Names:
        devices: Devices = self._word or self._named()
        channels = parse_channels(self._channels, asked=self._asked)
        return Names(devices, frozenset(self._features), channels, tuple(self._cdi))

    def _named(self) -> Devices:
        found: dict[DeviceName, None] = {}
        named = 0
        for (kind, name), explicit in self._gpus.items():
            devices = _devices(name, aliases=explicit)
            named += len(devices)  # ranges that overlap cost as much as others
            if devices:
                found.update(dict.fromkeys(devices))
            elif explicit and not kind.startswith(_LIVE_VENDOR) and _is_name(name):
                self._cdi[f"{kind}={name}"] = None
            else:
                raise self.malformed(name)
            self._bound(named + len(self._cdi))
        return NamedDevices(tuple(found)) if found else Void()

    def _bound(self, count: int) -> None:
        if count > _MOST_DEVICES:
            raise TooManyDevices(
                self._asked,
                found=f"more than {_MOST_DEVICES} devices",
                do="use all for every one",
            )

    def malformed(self, item: str) -> MalformedDevice:
        return MalformedDevice(
            self._asked,
            found=f'"{item}" names no device',
            do="use all, none, void, or a list of indices (0, 0-3), MIG indices (0:1), UUIDs "
            "(GPU-…, MIG-…), PCI addresses (0000:07:00.0) and CDI names (nvidia.com/gpu=0)",
        )


def parse_channels(items: Iterable[str], *, asked: str) -> tuple[int, ...] | None:
    """The numbers of IMEX channels.

    Args:
        items: of a list: ``0``, ``channel0`` or ``all``.
        asked: what stands there, for messages.

    Returns:
        The numbers, in order, each once; None for every one that the node has.

    Raises:
        MalformedChannel: an item is no number of a channel.
        TooManyDevices: there are more than any node has.

    Source: NVIDIA Container Toolkit, pkg/nvcdi/lib-imex.go.
    """
    channels: dict[int, None] = {}
    every = False
    for item in items:
        digits = item.removeprefix("channel")
        if item == "all":
            every = True
        elif _is_number(digits, _CHANNEL_DIGITS) and int(digits) <= _LAST_CHANNEL:
            channels[int(digits)] = None
        else:
            raise MalformedChannel(
                asked,
                found=f'"{item}" is no IMEX channel',
                do=f"use all, or numbers from 0 to {_LAST_CHANNEL} (0, channel0)",
            )
        if len(channels) > _MOST_DEVICES * 2:  # a driver makes 2048 of them by default
            raise TooManyDevices(asked, found="more IMEX channels than there are", do="use all")
    return None if every else tuple(channels)


def united_channels(
    some: tuple[int, ...] | None, others: tuple[int, ...] | None
) -> tuple[int, ...] | None:
    """The channels of two lists, as :func:`parse_channels` gives them."""
    if some is None or others is None:
        return None
    return tuple(dict.fromkeys(some + others))


_LAST_CHANNEL: Final = (1 << 20) - 1
_CHANNEL_DIGITS: Final = 7

# More digits than any node has devices; it bounds the work int() does.
_INDEX_DIGITS: Final = 6
_WIDEST_RANGE: Final = 256


def _devices(name: str, *, aliases: bool) -> tuple[DeviceName, ...]:
    """The GPUs and MIG devices of one item; none if it has none of the forms.

    Args:
        name: an item, or what stands behind its kind.
        aliases: whether it may be of the forms that only CDI has.
    """
    if aliases:
        for alias in ("gpu", "mig"):
            rest = name.removeprefix(alias)
            if rest != name and rest[:1].isdecimal() and (":" in rest) == (alias == "mig"):
                name = rest
    if "." in name:
        bus_id = _bus_id(name)
        return (GpuBusId(bus_id),) if bus_id else ()
    return _by_index(name) or _by_uuid(name)


def _by_index(name: str) -> tuple[DeviceName, ...]:
    if _is_number(name):
        return (GpuIndex(int(name)),)
    gpu, _, device = name.partition(":")
    if _is_number(gpu) and _is_number(device):
        return (MigIndex(int(gpu), int(device)),)
    first, _, last = name.partition("-")
    if _is_number(first) and _is_number(last):
        indices = range(int(first), int(last) + 1)
        return tuple(map(GpuIndex, indices)) if len(indices) <= _WIDEST_RANGE else ()
    return ()


def _by_uuid(name: str) -> tuple[DeviceName, ...]:
    kind, _, digits = name.partition("-")
    match kind.upper():
        case "GPU" if _begins_uuid(digits):
            return (GpuUuid(f"GPU-{digits.lower()}"),)
        case "MIG" if _begins_uuid(digits):
            return (MigUuid(f"MIG-{digits.lower()}"),)
        case "MIG" if digits[:4].upper() == "GPU-":
            return _legacy_mig(digits[4:])
    return ()


def _legacy_mig(text: str) -> tuple[DeviceName, ...]:
    uuid, _, instances = text.partition("/")
    first, _, second = instances.partition("/")
    if len(uuid) != _UUID_LENGTH or not _begins_uuid(uuid):
        return ()
    if not _is_number(first) or not _is_number(second):
        return ()
    return (MigInstance(f"GPU-{uuid.lower()}", int(first), int(second)),)


def _is_number(text: str, digits: int = _INDEX_DIGITS) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= digits


_HEX: Final = frozenset("0123456789abcdefABCDEF")
_UUID_DASHES: Final = frozenset({8, 13, 18, 23})
_UUID_LENGTH: Final = 36


def _begins_uuid(text: str) -> bool:
    """Whether a UUID may begin so, or is this."""
    return 0 < len(text) <= _UUID_LENGTH and all(
        character == "-" if place in _UUID_DASHES else character in _HEX
        for place, character in enumerate(text)
    )


_MOST_SLOTS: Final = 0x1F
_MOST_FUNCTIONS: Final = 7
_DOMAIN_DIGITS: Final = range(4, 9)  # sysfs writes four or more, NVML eight


def _bus_id(text: str) -> str:
    """A PCI address as sysfs writes it; "" if the text is none."""
    address, _, function = text.rpartition(".")
    domain, bus, slot = (["0000"] * 3 + address.split(":"))[-3:]
    if address.count(":") not in {1, 2} or not _HEX.issuperset(domain + bus + slot + function):
        return ""
    if len(domain) not in _DOMAIN_DIGITS or (len(bus), len(slot), len(function)) != (2, 2, 1):
        return ""
    if int(slot, 16) > _MOST_SLOTS or int(function, 16) > _MOST_FUNCTIONS:
        return ""
    return f"{int(domain, 16):04x}:{bus}:{slot}.{function}".lower()


_LETTERS: Final = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
_ALPHANUMERIC: Final = _LETTERS | frozenset("0123456789")
_IN_VENDOR: Final = _ALPHANUMERIC | frozenset("_-.")
_IN_CLASS: Final = _ALPHANUMERIC | frozenset("_-")
_IN_NAME: Final = _ALPHANUMERIC | frozenset("_-.:")


def _is_kind(text: str) -> bool:
    vendor, _, group = text.partition("/")
    return _is_word(vendor, _LETTERS, _IN_VENDOR) and _is_word(group, _LETTERS, _IN_CLASS)


def _is_name(text: str) -> bool:
    return _is_word(text, _ALPHANUMERIC, _IN_NAME)


def _is_word(text: str, first: frozenset[str], inner: frozenset[str]) -> bool:
    return bool(text) and text[0] in first and text[-1] in _ALPHANUMERIC and inner.issuperset(text)
