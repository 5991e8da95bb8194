"""Golden tables: the results of all cases of a table, compared as a whole.

So no result appears, disappears or changes unnoticed. After an intended change,
``NVSHIM_TEST_GOLDEN=write`` in the environment rewrites a table; read the diff before you commit
it. A case with the same result as another one is written as the name of that case.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from api.errors import NvshimError
from hooks.plan import Contribution, Device, Hook, IntelRdt, Mount, Plan

USUAL = Mount("", "").options


@dataclass(frozen=True, slots=True)
class Golden:
    """A table of results: a JSON file in this directory."""

    file: str

    def compare(self, case: str, found: Any) -> None:
        path = Path(__file__).with_name(self.file)
        table = json.loads(path.read_text()) if path.exists() else {}
        if os.environ.get("NVSHIM_TEST_GOLDEN") == "write":
            same = (k for k, v in sorted(table.items()) if v == found and k != case)
            table[case] = next(same, found)
            path.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
        expected = table[case]
        assert found == (table[expected] if isinstance(expected, str) else expected)


def outcome(make: Callable[[], Iterable[Contribution]], dev: str, names: Mapping[str, str]) -> Any:
    """Return a contribution in readable form, or the error. Node paths appear by name.

    Args:
        dev: the node's device directory.
        names: the names of paths.
    """
    try:
        shown = [contributed(each, dev) for each in make()]
    except NvshimError as error:
        shown = [{"error": str(error)}]
    text = json.dumps(shown)
    for path, name in names.items():
        text = text.replace(path, name)
    every = json.loads(text)
    return every[0] if len(every) == 1 else every


def contributed(made: Contribution, dev: str) -> dict[str, Any]:
    """Return a readable form of a contribution, without empty fields and without reasons."""
    plan, bounds = made.plan, made.bounds
    groups = {device.gid: f"that of {device.path}" for device in reversed(plan.devices)}
    assert bounds.majors == {d.major for d in plan.devices if d.kind == "c"}
    shown = {
        "vendor": made.vendor,
        "granted": list(made.granted),
        "notes": list(made.notes),
        "below": list(bounds.source_roots),
        "groups": sorted(groups.get(gid, str(gid)) for gid in plan.additional_gids),
        **planned(plan, dev),
    }
    return {name: value for name, value in shown.items() if value}


def planned(plan: Plan, dev: str) -> dict[str, Any]:
    """Return a readable form of a plan, without its groups."""
    return {
        "devices": [_device(device, dev) for device in plan.devices],
        "mounts": [mounted(mount) for mount in plan.mounts],
        "links": {link.path: link.target for link in plan.links},
        "libraries": [f"{each.soname}: {each.path}" for each in plan.libraries],
        "searched": list(plan.library_directories),
        "link directories": {each.path: dict(each.links) for each in plan.link_directories},
        "missing": [each.what for each in plan.missing],
        "environment": [f"{name}={value}" for name, value in plan.environment],
        "files": {file.path: file.content.decode() for file in plan.files},
        "files of procfs": {file.path: file.content.decode() for file in plan.proc_files},
        "hooks": [_set(hook) for hook in plan.hooks],
        "intelRdt": [_set(control) for control in plan.intel_rdt],
        "interfaces": {each.host_name: each.name for each in plan.net_devices},
    }


def _device(device: Device, dev: str) -> str:
    """Describe a device: its path, and the fields that differ from the node at that path."""
    numbers = f"{device.kind} {device.major}:{device.minor} {device.mode:o}"
    told = f"{numbers} {device.uid}:{device.gid} {device.access}"
    with suppress(OSError):
        seen = os.stat(dev + device.path.removeprefix("/dev"))
        numbers = f"c {os.major(seen.st_rdev)}:{os.minor(seen.st_rdev)} {seen.st_mode & 0o7777:o}"
        if told == f"{numbers} {seen.st_uid}:{seen.st_gid} rwm":
            return device.path
    return f"{device.path} {told}"


def mounted(mount: Mount) -> str:
    """Describe a mount: its source, its target if that differs, and unusual options."""
    place = "" if mount.source.endswith(mount.destination) else f" at {mount.destination}"
    ways = (
        "" if (mount.kind, mount.options) == ("bind", USUAL) else f" {mount.kind} {mount.options}"
    )
    return f"{mount.source}{place}{ways}"


def _set(edit: Hook | IntelRdt) -> dict[str, Any]:
    """Return the fields that are set."""
    return {name: value for name, value in asdict(edit).items() if value}
