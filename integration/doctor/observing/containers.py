"""Read which GPUs the shim granted to containers, and whether their cgroups still allow them.

A container's grant is in its bundle (``nvidia.json``, :mod:`hooks.record`). On cgroup version 1
the kernel shows what the cgroup allows (``devices.list``). On version 2 the rules are a BPF program
that cannot be read. But systemd rewrites it from the unit's ``DeviceAllow`` at every reload, so a
device that is missing there is lost at the next reload, or already.

Source: systemd.resource-control(5); kernel Documentation/admin-guide/cgroup-v1/devices.rst.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, Final

from api.errors import NvshimError
from hooks.node.identity import what_changed
from hooks.ocispec import part, variables_of
from hooks.requests.places import CAPABILITIES
from hooks.words import DEFAULT_CAPABILITIES
from integration.containers.bundles import KNOWN_STATES, find_containers
from integration.containers.bundles import Container as Found
from integration.containers.cgroups import cgroups_in
from integration.containers.procfs import Procfs
from integration.containers.records import entries
from integration.containers.verify_pods import left_pods
from integration.doctor.facts import Container, CouldNotLook, Device
from integration.doctor.observing.containerd import look_at_containerd
from integration.doctor.observing.machine import systemd_runs
from integration.doctor.observing.running import find_program, read_file, run
from integration.doctor.places import Places

_MOST: Final = 2048
_IMAGE: Final = "io.kubernetes.cri.image-name"
_ANY_NUMBER: Final = -1

Rule = tuple[int, int]
"""Major and minor; -1 for any."""


def look_at_containers(places: Places) -> tuple[Container, ...]:
    """Return the running containers of this containerd that have a record of an injection."""
    recorded = [each for each in _containers(places) if each.pid and each.has_record]
    return tuple(_container(places, container) for container in recorded[:_MOST])


def look_at_verify_pods(places: Places) -> tuple[str, ...]:
    """Return the pods that a killed ``nvshim verify`` has left in this containerd."""
    return left_pods(_containers(places), places.config().state)


def _containers(places: Places) -> list[Found]:
    containerd = look_at_containerd(places)
    state = places.at(containerd.state if containerd else KNOWN_STATES[0])
    return find_containers([state], places.at("/proc"))


def _container(places: Places, found: Found) -> Container:
    try:
        if found.record is None:
            raise ValueError("not a JSON object")  # noqa: TRY301 - handled like other damage
        record = dict(found.record)
        devices = tuple(
            Device(str(d["path"]), int(d["major"]), int(d["minor"]))
            for d in entries(record, "edits", "devices")
        )
        gpus = tuple(str(gpu["uuid"]) for gpu in entries(record, "grant", "gpus"))
        driver = str((record.get("node") or {}).get("driver") or "")
        changed = what_changed(_for_us(places, record))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        why = f"its record is malformed: {type(error).__name__}: {error}"
        return Container(found.id, found.namespace, "", "", (), (), unseen=why)
    is_default, image = _capabilities(found, record)
    unit, denied, by, unseen = "", [], "", ""
    if devices:
        try:
            unit, rules, by = _rules(places, found.pid)
            denied = [d.path for d in devices if rules is not None and not _allows(rules, d)]
        except (OSError, ValueError, CouldNotLook) as error:
            unseen = str(error)
    return Container(
        found.id, found.namespace, driver, changed, gpus, devices, unit, tuple(denied), by, unseen,
        is_default, image,
    )  # fmt: skip


def _capabilities(found: Found, record: Mapping[str, Any]) -> tuple[bool, str]:
    """Return whether a container has the default capabilities because it names none; its image."""
    grant = record.get("grant")
    given = grant.get("capabilities") if isinstance(grant, dict) else None
    if not isinstance(given, list) or {*map(str, given)} != DEFAULT_CAPABILITIES:
        return False, ""
    try:
        spec = found.spec_before() or found.spec()
        named = variables_of(spec).get(CAPABILITIES, "").strip()
        image = part(spec, "annotations", dict).get(_IMAGE, "")
    except NvshimError:
        return False, ""
    return not named, str(image)


def _for_us(places: Places, record: dict[str, Any]) -> dict[str, Any]:
    """Return a record whose identity has its paths resolved for this process."""
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


def _rules(places: Places, pid: int) -> tuple[str, list[Rule] | None, str]:
    """Return the unit, the allowed devices (None for all), and what sets them."""
    groups: dict[str, str] = {}
    for controllers, path in cgroups_in(Procfs(places.at("/proc")).cgroup(pid)):
        groups |= dict.fromkeys(controllers.split(","), path)
    if not groups:
        raise CouldNotLook(f"the cgroup of process {pid} cannot be read")
    # In a nested cgroup the innermost unit counts.
    path = groups.get("devices") or groups.get("") or ""
    units = [p for p in path.split("/") if p.endswith((".scope", ".service"))]
    unit = units[-1] if units else ""
    if unit and systemd_runs(places):
        systemctl = find_program(places, "systemctl")
        if not systemctl:
            raise CouldNotLook("systemctl is not installed")
        words = ["show", "--property=DeviceAllow,DevicePolicy", "--", unit]
        said = run(places, [systemctl, *words])
        return unit, allowed_by_systemd(said, lambda p: _number(places, p)), f"systemd's {unit}"
    if "devices" in groups:
        file = places.at(f"/sys/fs/cgroup/devices{groups['devices']}/devices.list")
        return unit, _listed(read_file(file)), "its cgroup"
    return unit, None, ""


def _listed(text: str) -> list[Rule] | None:
    """Parse the rules of cgroup version 1, lines such as "c 195:255 rwm"."""
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
    """Return what a unit's properties allow.

    Args:
        said: the output of ``systemctl show``: lines such as ``DeviceAllow=/dev/char/195:0 rwm``.
        number_of: returns the major and minor number of a path; None if it is not a character
            device.

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
    """Return a node's major and minor; for "char-NAME", the majors of that driver."""
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
