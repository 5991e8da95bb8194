"""Containers that have GPUs of ours: what they were given, and whether they may still use it.

What a container was given is in its bundle (``nvidia.json``, :mod:`hooks.record`). Whether its
cgroup still lets it is told by the kernel on version 1 (``devices.list``). On version 2 the rules
are a program that nobody can read, but systemd writes it anew from ``DeviceAllow`` of the unit at
every reload: what is not in there will be lost, if it is not already.

Source: systemd.resource-control(5); kernel Documentation/admin-guide/cgroup-v1/devices.rst.
"""

from __future__ import annotations

import json
import os
import stat
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final

from hooks.node.identity import what_changed
from integration.doctor.facts import Container, CouldNotLook, Device
from integration.doctor.observing.containerd import look_at_containerd
from integration.doctor.observing.machine import systemd_runs
from integration.doctor.observing.running import find_program, read_file, run, started_at
from shim.bundle import INIT_PID, RECORD

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from integration.doctor.places import Places

__all__ = ["allowed_by_systemd", "look_at_containers"]

_STATE: Final = "/run/containerd"
_TASKS: Final = "io.containerd.runtime.v2.task"
_LARGEST: Final = 16 << 20
_MOST: Final = 2048
_ANY_NUMBER: Final = -1
# Seconds by which the clock of a file and that of a process may differ.
_CLOCKS: Final = 5.0

Rule = tuple[int, int]
"""Major and minor; -1 for any."""


def look_at_containers(places: Places) -> tuple[Container, ...]:
    """The containers of this containerd that run and have a record of an injection."""
    containerd = look_at_containerd(places)
    tasks = places.at(os.path.join(containerd.state if containerd else _STATE, _TASKS))
    found: list[Container] = []
    for namespace in sorted(os.listdir(tasks)) if os.path.isdir(tasks) else ():
        directory = os.path.join(tasks, namespace)
        for name in sorted(os.listdir(directory)) if os.path.isdir(directory) else ():
            bundle = os.path.join(directory, name)
            recorded = os.path.isfile(os.path.join(bundle, RECORD))
            if recorded and len(found) < _MOST and not _has_ended(places, bundle):
                found.append(_container(places, namespace, name, bundle))
    return tuple(found)


def _has_ended(places: Places, bundle: str) -> bool:
    """Whether the container's process has: its bundle stays until somebody removes it."""
    path = os.path.join(bundle, INIT_PID)
    try:
        directory = places.at(f"/proc/{int(read_file(path, 64))}")
        written = os.stat(path).st_mtime
    except (OSError, ValueError):
        return False  # it has none yet
    if not os.path.isdir(directory):
        return True
    # Its number may be another's by now.
    return (started_at(places, directory) or 0.0) > written + _CLOCKS


def _container(places: Places, namespace: str, name: str, bundle: str) -> Container:
    try:
        record = json.loads(read_file(os.path.join(bundle, RECORD), _LARGEST))
        edits, grant = record.get("edits") or {}, record.get("grant") or {}
        devices = tuple(
            Device(str(d["path"]), int(d["major"]), int(d["minor"]))
            for d in edits.get("devices") or ()
        )
        gpus = tuple(str(gpu["uuid"]) for gpu in grant.get("gpus") or ())
        driver = str((record.get("node") or {}).get("driver") or "")
        changed = what_changed(_for_us(places, record))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        why = f"its record makes no sense: {type(error).__name__}: {error}"
        return Container(name, namespace, "", "", (), (), unseen=why)
    unit, denied, by, unseen = "", [], "", ""
    if devices:
        try:
            unit, rules, by = _rules(places, bundle)
            denied = [d.path for d in devices if rules is not None and not _allows(rules, d)]
        except (OSError, ValueError, CouldNotLook) as error:
            unseen = str(error)
    return Container(
        name, namespace, driver, changed, gpus, devices, unit, tuple(denied), by, unseen
    )


def _for_us(places: Places, record: dict[str, Any]) -> dict[str, Any]:
    """A record whose identity has paths as they are for us."""
    identity = record.get("identity")
    if not places.is_below or not isinstance(identity, dict):
        return record
    seen = [[kind, places.at(path), what] for kind, path, what in identity["observations"]]
    moved = {
        "proc": places.at(identity["proc"]),
        "sys": places.at(identity["sys"]),
        "modules": [places.at(path) for path in identity["modules"]],
        "observations": seen,
    }
    return {**record, "identity": {**identity, **moved}}


def _rules(places: Places, bundle: str) -> tuple[str, list[Rule] | None, str]:
    """The unit, the devices that are allowed (None for all), and who says so."""
    pid = int(read_file(os.path.join(bundle, INIT_PID), 64))
    groups: dict[str, str] = {}
    for line in read_file(places.at(f"/proc/{pid}/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        groups |= dict.fromkeys(controllers.split(","), path)
    # Of a nested cgroup, the unit is the last that is one.
    path = groups.get("devices") or groups.get("") or ""
    units = [p for p in path.split("/") if p.endswith((".scope", ".service"))]
    unit = units[-1] if units else ""
    if unit and systemd_runs(places):
        systemctl = find_program(places, "systemctl")
        if not systemctl:
            raise CouldNotLook("there is no systemctl")
        words = ["show", "--property=DeviceAllow,DevicePolicy", "--", unit]
        said = run(places, [systemctl, *words])
        return unit, allowed_by_systemd(said, lambda p: _number(places, p)), f"systemd's {unit}"
    if "devices" in groups:
        file = places.at(f"/sys/fs/cgroup/devices{groups['devices']}/devices.list")
        return unit, _listed(read_file(file)), "its cgroup"
    return unit, None, ""


def _listed(text: str) -> list[Rule] | None:
    """The rules of version 1: "c 195:255 rwm" a line."""
    rules: list[Rule] = []
    for line in text.splitlines():
        kind, number, access = line.split()
        if kind == "a":
            return None
        if kind == "c" and {"r", "w"} <= set(access):
            rules.append(_rule(number))
    return rules


def _rule(number: str) -> Rule:
    major, _, minor = number.partition(":")
    return (
        _ANY_NUMBER if major == "*" else int(major),
        _ANY_NUMBER if minor == "*" else int(minor),
    )


def allowed_by_systemd(
    said: str, number_of: Callable[[str], tuple[int, ...] | None]
) -> list[Rule] | None:
    """What a unit's properties allow.

    Args:
        said: of ``systemctl show``: lines ``DeviceAllow=/dev/char/195:0 rwm``.
        number_of: the major and minor of a path; None if it is no character device.

    Returns:
        The rules; None if all devices are allowed.
    """
    rules: list[Rule] = []
    properties = [line.partition("=") for line in said.splitlines()]
    for name, _, value in properties:
        if name != "DeviceAllow":
            continue
        words = value.split()
        for place, access in zip(words[::2], words[1::2], strict=False):
            if not {"r", "w"} <= set(access):
                continue
            head, _, number = place.rpartition("/")
            if head == "/dev/char" and ":" in number:
                rules.append(_rule(number))
            elif place.startswith("char-"):
                rules += [(m, _ANY_NUMBER) for m in number_of(place) or ()]
            elif (found := number_of(place)) is not None:
                rules.append((found[0], found[1]))
    policy = {name: value for name, _, value in properties}.get("DevicePolicy", "auto")
    return None if policy == "auto" and not rules else rules


def _number(places: Places, place: str) -> tuple[int, ...] | None:
    """A node's major and minor; of "char-NAME", the majors of that driver."""
    if place.startswith("char-"):
        return tuple(_majors(places, place.removeprefix("char-")))
    try:
        seen = os.stat(places.at(place))
    except OSError:
        return None
    if not stat.S_ISCHR(seen.st_mode):
        return None
    return os.major(seen.st_rdev), os.minor(seen.st_rdev)


def _majors(places: Places, driver: str) -> Iterator[int]:
    character = read_file(places.at("/proc/devices")).partition("\n\n")[0]
    for line in character.splitlines()[1:]:
        major, _, name = line.strip().partition(" ")
        if fnmatchcase(name, driver):
            yield int(major)


def _allows(rules: list[Rule], device: Device) -> bool:
    return any(
        major in {device.major, _ANY_NUMBER} and minor in {device.minor, _ANY_NUMBER}
        for major, minor in rules
    )
