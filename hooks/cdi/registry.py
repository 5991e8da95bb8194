"""Find the spec file that has a device.

Rules
- The files of a later directory win over those of an earlier one: generated files (/var/run/cdi)
  win over installed ones (/etc/cdi).
- A device in two files of one directory is a conflict and cannot be used. (The reference library
  refuses it even if a later directory defines it.)
- An unusable file does not affect the others. If no other file has a requested device, the error
  names the unusable file and its fault.

The files are read when a container names a device, and not kept in memory, since they may change
during the hours that a shim lives. (:mod:`hooks.cdi.files` caches YAML files.)

Source: CDI specification, "Error Handling"; the reference library's package comment, "Device
Conflicts" and "CDI Spec Directories".
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Final

from api.values import dataclass, field
from hooks.cdi import files, schema
from hooks.cdi.errors import CdiDeviceConflict, CdiDeviceUnknown, CdiFileUnusable, CdiSpecInvalid
from hooks.cdi.spec import QualifiedName, SpecDevice, SpecFile, parse_name
from hooks.errors import CdiError, enumerated


@dataclass(frozen=True, slots=True)
class Loaded:
    """A usable spec file; later directories have greater priority."""

    path: str
    priority: int
    spec: SpecFile


@dataclass(frozen=True, slots=True)
class Fault:
    """An unusable file or directory, and why; ``kind`` if it could still be read."""

    path: str
    error: CdiError
    kind: str = ""


@dataclass(frozen=True, slots=True)
class ResolvedDevice:
    """A device, and the file that defines it."""

    name: QualifiedName
    device: SpecDevice
    file: Loaded


@dataclass(frozen=True, slots=True)
class Resolution:
    """The devices that a container names, in its order."""

    devices: tuple[ResolvedDevice, ...] = ()
    left: tuple[str, ...] = ()  # names that are known without a file, of kinds that no file defines


@dataclass(frozen=True, slots=True)
class _Only:
    """The relevant kinds, and the cache's directory."""

    kinds: tuple[bytes, ...] | None
    state: str

    def wants(self, data: bytes) -> bool:
        """Whether a file may be of one of the kinds."""
        # After a backslash, JSON and YAML may hide any character.
        return self.kinds is None or b"\\" in data or any(kind in data for kind in self.kinds)


_MOST_TOLD: Final = 4


@dataclass(frozen=True, slots=True)
class Registry:
    """All spec files of a node, as they are now."""

    directories: tuple[str, ...]
    files: list[Loaded] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)

    @classmethod
    def of(
        cls, directories: Iterable[str], kinds: Iterable[str] | None = None, state: str = ""
    ) -> Registry:
        """Read the spec files; unusable ones become faults of the registry.

        Args:
            directories: the directories, lowest priority first. A missing one has no files.
            kinds: the relevant kinds; None for all. Files that mention none of them are skipped.
            state: the state directory, which has the cache of YAML files; "" for no cache.
        """
        registry = cls(tuple(directories))
        only = _Only(None if kinds is None else tuple(kind.encode() for kind in kinds), state)
        for priority, directory in enumerate(registry.directories):
            try:
                fd = files.open_directory(directory)
            except CdiFileUnusable as error:
                registry.faults.append(Fault(directory, error))
                continue
            if fd is None:
                continue
            try:
                for name in files.names_in(fd, directory):
                    registry._load(os.path.join(directory, name), priority, fd, name, only)
            except CdiFileUnusable as error:
                registry.faults.append(Fault(directory, error))
            finally:
                os.close(fd)
        return registry

    def _load(self, path: str, priority: int, dir_fd: int, name: str, only: _Only) -> None:
        kind = ""
        try:
            content = files.read(path, dir_fd=dir_fd, name=name)
            if content is None or not only.wants(content.data):
                return
            in_yaml = bool(only.state) and not files.is_json(content.data)
            spec = files.load_kept(only.state, content, path) if in_yaml else None
            if spec is None:
                tree = files.tree_of(content.data, path)
                if isinstance(tree, dict) and isinstance(tree.get("kind"), str):
                    kind = tree["kind"]
                spec = schema.parse(tree, path)
                if in_yaml:
                    files.store_kept(only.state, content, spec)
            self.files.append(Loaded(path, priority, spec))
        except (CdiFileUnusable, CdiSpecInvalid) as error:
            self.faults.append(Fault(path, error, kind))

    def find(self, name: QualifiedName) -> ResolvedDevice:
        """Return the device with a name, from the file with the highest priority.

        Raises:
            CdiDeviceUnknown: no usable file has it.
            CdiDeviceConflict: several files in one directory have it.
        """
        having = [
            ResolvedDevice(name, device, file)
            for file in self.files
            if file.spec.kind == name.kind
            for device in file.spec.devices
            if device.name == name.device
        ]
        if not having:
            raise self._unknown(name)
        highest = max(found.file.priority for found in having)
        deciding = [found for found in having if found.file.priority == highest]
        if len(deciding) > 1:
            raise CdiDeviceConflict(
                f"the CDI device {name}",
                found=f"{' and '.join(found.file.path for found in deciding)} both have it",
                do="remove it from all but one",
            )
        return deciding[0]

    def has_kind(self, kind: str) -> bool:
        """Whether any file has a kind, even an unusable file."""
        return any(file.spec.kind == kind for file in self.files) or any(
            fault.kind == kind for fault in self.faults
        )

    def _unknown(self, name: QualifiedName) -> CdiDeviceUnknown:
        faults = [fault for fault in self.faults if fault.kind in {"", name.kind}]
        there = [
            device.name
            for file in self.files
            if file.spec.kind == name.kind
            for device in file.spec.devices
        ]
        known = sorted(dict.fromkeys(there))
        where = " and ".join(self.directories) or "no directory"
        found = (
            f"{name.kind} has {enumerated(known, most=_MOST_TOLD)}"
            if known
            else f"no spec of {name.kind} in {where}"
        )
        for fault in faults[:_MOST_TOLD]:
            found += f"; {fault.path} cannot be used: {fault.error.found}"
        return CdiDeviceUnknown(
            f"the CDI device {name}",
            found=found,
            do="mend that file" if faults else "see what nvshim cdi list shows",
        )


def resolve(
    wanted: Iterable[str],
    directories: Iterable[str],
    *,
    builtin: Callable[[str], bool] = lambda _: False,
    state: str = "",
) -> Resolution:
    """Return the devices with these names on this node, in order.

    Args:
        wanted: full names; a duplicate counts once.
        builtin: whether a name is known without a spec file. If no file has its kind, the caller
            handles it.
        state: the state directory, which has the cache of YAML files; "" for no cache.

    Raises:
        CdiNameMalformed: one of them is not a full name.
        CdiDeviceUnknown: no usable file has it.
        CdiDeviceConflict: several files in one directory have it.
    """
    asked = [parse_name(text) for text in dict.fromkeys(wanted)]
    places = tuple(directories)
    registry = Registry.of(places, {name.kind for name in asked}, state)
    left = {name for name in asked if builtin(str(name)) and not registry.has_kind(name.kind)}
    try:
        found = tuple(registry.find(name) for name in asked if name not in left)
    except CdiDeviceUnknown:
        # Perhaps a broken file defines it, so read all files this time.
        registry = Registry.of(places)
        found = tuple(registry.find(name) for name in asked if name not in left)
    return Resolution(found, tuple(str(name) for name in asked if name in left))
