"""The syntax of device names in variables, annotations and mounts.

A list consists of items. Spaces around an item, and empty items, are ignored.

=========================  ==============================================================
item                       what it names
=========================  ==============================================================
``void``                   anywhere in a list: nothing is requested at all
``none``, ``all``          whichever comes first decides for all of NVIDIA's GPUs.
                           ``none``: driver files and control nodes, no GPU;
                           ``all``: every GPU and every MIG device
``3``                      a GPU by its index (PCI bus order)
``0-3``                    the GPUs with these indices
``1:0``                    a MIG device by the index of its GPU and its own
``GPU-…``, ``MIG-…``       a UUID, or a prefix of it that only one device has
``MIG-GPU-…/1/0``          a MIG device by its GPU's UUID, GPU instance and compute instance
``0000:07:00.0``           a GPU by its PCI address; the domain may have 8 digits or be left
                           out (``07:00.0``)
``VENDOR/CLASS=NAME``      a device of that CDI kind; see below
=========================  ==============================================================

Hexadecimal digits, and the words GPU and MIG, may be in upper or lower case.

A kind also applies to the items after it: ``nvidia.com/gpu=0,1`` is two of one kind, and in
``0,amd.com/gpu=0,1`` only the first is NVIDIA's. Before the first kind, the default kind applies.

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

Parsing is total: every string is either a list of names or one typed error.

Source: NVIDIA Container Toolkit, internal/config/image and pkg/nvcdi (names of devices);
    libnvidia-container, src/cli/common.c (what it accepts as a GPU); the CDI specification, "Device
    names". Where the first two differ, or refuse, this module accepts the union of both.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Final

from hooks.errors import MalformedChannel, MalformedDevice, RequestError, TooManyDevices
from hooks.words import (
    CDI_DEVICE,
    CDI_KIND,
    AllDevices,
    DeviceName,
    Devices,
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
    quotes_in,
)

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

# More than any node has, but few enough that a hostile list is cheap.
_MOST_DEVICES: Final = 1024


def parse_names(items: Iterable[str], *, asked: str, default_kind: str = "nvidia.com/gpu") -> Names:
    """Return what the items of a list name, by the tables above.

    Raises:
        MalformedDevice: an item has none of the known forms.
        MalformedChannel: an IMEX channel is not a valid number.
        TooManyDevices: the list names more devices than any node has.
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
            if not CDI_KIND.fullmatch(kind) or not CDI_DEVICE.fullmatch(name):
                raise work.malformed(item)
        else:
            name = item
        work.add(kind, name, item, explicit=explicit)
    return work.names()


class _List:
    """The names in a list, while it is parsed."""

    def __init__(self, asked: str) -> None:
        self._asked = asked
        # The first "none" or "all" decides; the other items are not even parsed.
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
        elif CDI_DEVICE.fullmatch(name):
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
            named += len(devices)  # overlapping ranges cost as much as others
            if devices:
                found.update(dict.fromkeys(devices))
            elif explicit and not kind.startswith(_LIVE_VENDOR) and CDI_DEVICE.fullmatch(name):
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

    def malformed(self, item: str) -> RequestError:
        return MalformedDevice(
            self._asked,
            found=f'"{item}" names no device{quotes_in(item)}',
            do="use all, none, void, or a list of indices (0, 0-3), MIG indices (0:1), UUIDs "
            "(GPU-…, MIG-…), PCI addresses (0000:07:00.0) and CDI names (nvidia.com/gpu=0)",
        )


def parse_channels(items: Iterable[str], *, asked: str) -> tuple[int, ...] | None:
    """Return the numbers of IMEX channels, each once; None for every channel of the node.

    Args:
        items: the items of a list: ``0``, ``channel0`` or ``all``.

    Raises:
        MalformedChannel: an item is not the number of a channel.
        TooManyDevices: there are more than any node has.

    Source: NVIDIA Container Toolkit, pkg/nvcdi/lib-imex.go.
    """
    channels: dict[int, None] = {}
    every = False
    for item in items:
        digits = item.removeprefix("channel")
        if item == "all":
            every = True
        elif _CHANNEL.fullmatch(digits) and int(digits) <= _LAST_CHANNEL:
            channels[int(digits)] = None
        else:
            raise MalformedChannel(
                asked,
                found=f'"{item}" is no IMEX channel{quotes_in(item)}',
                do=f"use all, or numbers from 0 to {_LAST_CHANNEL} (0, channel0)",
            )
        if len(channels) > _MOST_DEVICES * 2:  # a driver creates 2048 by default
            raise TooManyDevices(asked, found="more IMEX channels than there are", do="use all")
    return None if every else tuple(channels)


def united_channels(
    some: tuple[int, ...] | None, others: tuple[int, ...] | None
) -> tuple[int, ...] | None:
    """Combine the channels of two lists in the form of :func:`parse_channels`."""
    if some is None or others is None:
        return None
    return tuple(dict.fromkeys(some + others))


_LAST_CHANNEL: Final = (1 << 20) - 1
_CHANNEL: Final = re.compile("[0-9]{1,7}")

_WIDEST_RANGE: Final = 256

_NUMBER: Final = "([0-9]{1,6})"  # more digits than any node has devices
_HEX: Final = "[0-9a-fA-F]"
_UUID: Final = f"{_HEX}{{8}}(?:-{_HEX}{{4}}){{3}}-{_HEX}{{12}}"


def _start_of_uuid() -> str:
    """Return a pattern for a UUID or a prefix of one."""
    rest = f"{_HEX}{{0,12}}"
    for digits in ("{0,4}", "{0,4}", "{0,4}", "{1,8}"):
        most = f"{{{digits[3]}}}"
        rest = f"(?:{_HEX}{digits}|{_HEX}{most}-{rest})"
    return rest


def _range(match: re.Match[str]) -> tuple[DeviceName, ...]:
    indices = range(int(match[1]), int(match[2]) + 1)
    return tuple(map(GpuIndex, indices)) if len(indices) <= _WIDEST_RANGE else ()


def _bus_id(match: re.Match[str]) -> tuple[DeviceName, ...]:
    """Return a PCI address in sysfs form: four digits of the domain, or more if needed."""
    return (GpuBusId(f"{int(match[1] or '0', 16):04x}:{match[2].lower()}"),)


_FORMS: Final[tuple[tuple[str, Callable[[re.Match[str]], tuple[DeviceName, ...]]], ...]] = (
    (_NUMBER, lambda found: (GpuIndex(int(found[1])),)),
    (f"{_NUMBER}:{_NUMBER}", lambda found: (MigIndex(int(found[1]), int(found[2])),)),
    (f"{_NUMBER}-{_NUMBER}", _range),
    (f"(?i:GPU)-({_start_of_uuid()})", lambda found: (GpuUuid(f"GPU-{found[1].lower()}"),)),
    (f"(?i:MIG)-({_start_of_uuid()})", lambda found: (MigUuid(f"MIG-{found[1].lower()}"),)),
    (
        f"(?i:MIG-GPU)-({_UUID})/{_NUMBER}/{_NUMBER}",
        lambda found: (MigInstance(f"GPU-{found[1].lower()}", int(found[2]), int(found[3])),),
    ),
    # sysfs writes four or more digits of the domain, NVML eight.
    (f"(?:({_HEX}{{4,8}}):)?({_HEX}{{2}}:[01]{_HEX}[.][0-7])", _bus_id),
)
_COMPILED: Final = tuple((re.compile(form), make) for form, make in _FORMS)


def _devices(name: str, *, aliases: bool) -> tuple[DeviceName, ...]:
    """Return the GPUs and MIG devices of one item; none if its form is unknown.

    Args:
        aliases: whether to accept forms that exist only in CDI.
    """
    if aliases:
        for alias in ("gpu", "mig"):
            rest = name.removeprefix(alias)
            if rest != name and rest[:1].isdecimal() and (":" in rest) == (alias == "mig"):
                name = rest
    for form, make in _COMPILED:
        match = form.fullmatch(name)
        if match is not None:
            return make(match)
    return ()
