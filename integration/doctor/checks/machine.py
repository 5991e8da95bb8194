"""Kernel, security modules, mounts, limits and layers: D080 to D089."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from integration.doctor.facts import Machine
from integration.doctor.findings import ERROR, WARNING, Trouble, check

_FEW_INSTANCES: Final = 64
_MUCH: Final = 64 << 20

# By a directory's purpose: mount options that break it, and their effect.
_FORBIDDEN: Final = {
    "device nodes": (("nodev", "no device node can be opened", ERROR),),
    "the driver": (("noexec", "libraries cannot be mapped and programs cannot run", ERROR),),
    "our state": (("ro", "the shim cannot store its state", ERROR),),
    "shared layers": (("ro", "layers cannot be cached; containers start slower", WARNING),),
    "images": (
        (
            "noexec",
            "with a snapshotter that uses bind mounts, no program of an image runs",
            WARNING,
        ),
    ),
}


@check("D080")
def _selinux(machine: Machine) -> Iterator[str]:
    if machine.selinux == "enforcing" and machine.container_use_devices is not True:
        state = "off" if machine.container_use_devices is False else "missing"
        yield f"SELinux is enforcing, and the boolean container_use_devices is {state}"


@check("D081")
def _apparmor(machine: Machine) -> Iterator[str]:
    if machine.apparmor and not machine.apparmor_parser:
        yield "the kernel enforces AppArmor, but apparmor_parser is not installed"


@check("D082")
def _cgroup(machine: Machine) -> Iterator[str | Trouble]:
    match machine.cgroup:
        case "none":
            yield Trouble("no cgroups are mounted", severity=ERROR)
        case "hybrid":
            yield "hybrid: the controllers are on version 1, version 2 is mounted as well"
        case "v1":
            yield "version 1"


@check("D083")
def _kernel(machine: Machine) -> Iterator[str]:
    if not machine.openat2:
        yield f"Linux {machine.kernel} has no openat2"


@check("D084")
def _mounts(machine: Machine) -> Iterator[Trouble]:
    for mount in machine.mounts:
        for option, result, severity in _FORBIDDEN.get(mount.purpose, ()):
            if option in mount.options:
                yield Trouble(
                    f"{mount.path} ({mount.purpose}) is on {mount.point}, mounted {option}: "
                    f"{result}",
                    severity=severity,
                )


@check("D085")
def _inotify(machine: Machine) -> Iterator[str]:
    instances = machine.inotify_instances
    if instances is not None and instances < _FEW_INSTANCES:
        yield f"fs.inotify.max_user_instances is {instances}"


@check("D089")
def _layers(machine: Machine) -> Iterator[str]:
    usage = machine.layers
    costs = {
        "copies of the driver's files": usage.copied_bytes,
        "other files, perhaps of a driver that was removed": usage.other_bytes,
    }
    for what, size in costs.items():
        if size > _MUCH:
            yield f"{usage.directory} has {size / 1e6:.0f} MB of {what}"
