"""Read files of MIG layouts: mig-parted's configuration, version v1, in YAML or JSON.

::

    version: v1
    mig-configs:
      mixed:
      - device-filter: ["0x233010DE"]
        devices: all
        mig-enabled: true
        mig-devices: {"1g.10gb": 2, "3g.40gb": 1}

Rules
- Unknown fields are errors, and so are duplicate fields.
- A boolean may be any word that YAML 1.1, and so mig-parted, accepts, such as ``True`` and ``on``.
- ``device-filter``: a PCI device and its vendor, for some boards followed by ``:`` and the
  subsystem; one value or a list. If it is missing or empty, the entry is for all models.
- ``devices``: ``all``, or a list of indices in PCI order. An index that the node lacks is ignored.
- ``mig-devices``: the number of devices of each profile. It is required if MIG is enabled, and may
  be empty; otherwise it must be absent or empty. A count of 0 means the same as no entry, but not
  all counts may be 0.
- An entry applies to a GPU if its filter and its devices match; if several do, the last one counts.

Source: NVIDIA/mig-parted, api/spec/v1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from hooks.cdi.tree import BadTree, Plain, of_yaml
from integration.files import read_file
from integration.mig.errors import LayoutUnknown, MigConfigInvalid
from integration.mig.profiles import ProfileName

__all__ = ["ALL", "VERSION", "DeviceFilter", "Entry", "Layout", "choose", "read_layouts"]

VERSION: Final = "v1"
ALL: Final = "all"

_FILE: Final = ("version", "mig-configs")
_ENTRY: Final = ("device-filter", "devices", "mig-enabled", "mig-devices")
_OPTIONAL: Final = frozenset({"device-filter", "mig-devices"})
_INTEGER: Final = re.compile(r"0|[1-9]\d{0,9}", re.ASCII)
_WORD: Final = 1 << 32
_FLAGS: Final = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


@dataclass(frozen=True, slots=True)
class DeviceFilter:
    """A model of GPU."""

    device: int  # the PCI device in the upper 16 bits, its vendor in the lower ones
    subsystem: int | None = None  # the same of the subsystem; None for any


@dataclass(frozen=True, slots=True)
class Entry:
    """The MIG mode and devices that some GPUs of a node should have."""

    filters: tuple[DeviceFilter, ...]  # empty for all models
    indices: frozenset[int] | None  # None for all
    enabled: bool  # whether MIG mode is on
    counts: Mapping[ProfileName, int]  # without zeros

    def matches(self, index: int, device: int, subsystem: int) -> bool:
        """Return whether the entry applies to a GPU.

        Args:
            index: the GPU's place in PCI order.
            device: its PCI device and vendor, as in :class:`DeviceFilter`.
            subsystem: its subsystem, in the same form.
        """
        return (self.indices is None or index in self.indices) and (
            not self.filters
            or any(
                each.device == device and each.subsystem in {None, subsystem}
                for each in self.filters
            )
        )


@dataclass(frozen=True, slots=True)
class Layout:
    """The MIG devices that a node should have."""

    name: str
    entries: tuple[Entry, ...]

    def entry_for(self, index: int, device: int, subsystem: int) -> Entry | None:
        """Return the entry that applies to a GPU; None if there is none. Arguments as above."""
        matching = [each for each in self.entries if each.matches(index, device, subsystem)]
        return matching[-1] if matching else None


def read_layouts(path: str) -> dict[str, Layout]:
    """Read a file's layouts, by name.

    Raises:
        MigConfigInvalid: the file is missing, or not a configuration of this kind.
    """
    reading = _Reading(path)
    try:
        content = read_file(path)
        if content is None:
            reading.fail("it does not exist")
        tree = of_yaml(content.decode())
    except OSError as error:
        reading.fail(error.strerror or str(error))
    except (BadTree, UnicodeDecodeError) as error:
        reading.fail(str(error))
    return reading.layouts(tree)


def choose(layouts: Mapping[str, Layout], name: str | None, path: str) -> Layout:
    """Return a layout by its name, which may be omitted if the file has only one layout.

    Raises:
        LayoutUnknown: the file has no such layout, or several and no name was given.
    """
    if name is None and len(layouts) == 1:
        return next(iter(layouts.values()))
    if name is not None and name in layouts:
        return layouts[name]
    raise LayoutUnknown(
        f"the layout {name} of {path}" if name else f"the layout of {path}",
        found="does not exist" if name else f"is one of {len(layouts)}, and none was named",
        do=f"name one of {', '.join(layouts)}",
    )


class _Reading:
    """One walk through a file; knows where it is, for errors."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._place = ""

    def fail(self, fault: str, field: str = "") -> NoReturn:
        where = ".".join(filter(None, (self._place, field)))
        raise MigConfigInvalid(
            f"the MIG layouts {self._path}",
            found=f"{where}: {fault}" if where else fault,
            do="correct the file; docs/mig.md has the format",
        )

    def layouts(self, tree: Any) -> dict[str, Layout]:
        fields = self._fields(tree, _FILE)
        if fields["version"] != VERSION:
            self.fail(f"it is {fields['version']!s}, and not {VERSION}", "version")
        configs = fields["mig-configs"]
        if not isinstance(configs, dict) or not configs:
            self.fail("it is not an object with one or more layouts", "mig-configs")
        return {str(name): self._layout(str(name), entries) for name, entries in configs.items()}

    def _layout(self, name: str, entries: Any) -> Layout:
        self._place = f"mig-configs.{name}"
        if not isinstance(entries, list) or not entries:
            self.fail("it is not a list with one or more entries")
        made = []
        for number, entry in enumerate(entries):
            self._place = f"mig-configs.{name}[{number}]"
            made.append(self._entry(self._fields(entry, _ENTRY)))
        return Layout(name, tuple(made))

    def _fields(self, value: Any, known: tuple[str, ...]) -> dict[str, Any]:
        if not isinstance(value, dict):
            self.fail("it is not an object")
        for name in value:
            if name not in known:
                self.fail(f"the field is unknown; known are {', '.join(known)}", name)
        for name in known:
            if value.get(name) is None and name not in _OPTIONAL:
                self.fail("it is missing", name)
        return value

    def _entry(self, fields: Mapping[str, Any]) -> Entry:
        enabled = self._flag(fields["mig-enabled"], "mig-enabled")
        counts, field = fields.get("mig-devices"), "mig-devices"
        if enabled and counts is None:
            self.fail("it is missing, though mig-enabled is true; {} is for no devices", field)
        if not enabled and counts:
            self.fail("there cannot be any if mig-enabled is false", field)
        return Entry(
            tuple(self._filters(fields.get("device-filter"))),
            self._indices(fields["devices"]),
            enabled,
            self._counts({} if counts is None else counts, field),
        )

    def _filters(self, value: Any) -> Iterator[DeviceFilter]:
        for text in value if isinstance(value, list) else [value] if value else []:
            words = str(text).split(":") if isinstance(text, str | int) else []
            try:
                numbers = [int(word, 0) for word in words]
            except ValueError:
                numbers = []
            if len(numbers) not in {1, 2} or not all(0 <= each < _WORD for each in numbers):
                self.fail(f"{text!r:.60} is not like 0x233010DE, or 0x233010DE:0x16C110DE",
                          "device-filter")  # fmt: skip
            yield DeviceFilter(*numbers)

    def _indices(self, value: Any) -> frozenset[int] | None:
        if value == ALL:
            return None
        if not isinstance(value, list):
            self.fail("it is not `all` or a list of indices", "devices")
        return frozenset(self._number(each, "devices") for each in value)

    def _counts(self, value: Any, field: str) -> dict[ProfileName, int]:
        if not isinstance(value, dict):
            self.fail("it is not an object of profiles and counts", field)
        counts: dict[ProfileName, int] = {}
        for text, count in value.items():
            name = ProfileName.parse(text)
            if name is None:
                self.fail(f"{text!r:.60} is not a profile like 1g.10gb", field)
            counts[name] = counts.get(name, 0) + self._number(count, f"{field}.{text}")
        if counts and not any(counts.values()):
            self.fail("all counts are 0", field)
        return {name: count for name, count in counts.items() if count}

    def _number(self, value: Any, field: str) -> int:
        if not isinstance(value, Plain) or not _INTEGER.fullmatch(value):
            self.fail("it is not a whole number from 0", field)
        return int(value)

    def _flag(self, value: Any, field: str) -> bool:
        if not isinstance(value, Plain) or value.lower() not in _FLAGS:
            self.fail("it is not true or false", field)
        return _FLAGS[value.lower()]
