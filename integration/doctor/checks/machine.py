"""Kernel, security modules, mounts and limits: D080 to D088."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from integration.doctor.facts import Machine
from integration.doctor.findings import ERROR, WARNING, Trouble, check

_FEW_INSTANCES: Final = 64

# What a mount must not be for what lies on it, by purpose, and what comes of it.
_FORBIDDEN: Final = {
    "device nodes": (("nodev", "no device node can be opened", ERROR),),
    "the driver": (("noexec", "no library can be mapped, no program run", ERROR),),
    "our state": (("ro", "nothing can be kept", ERROR),),
    "shared layers": (("ro", "no layer can be kept; containers are slower", WARNING),),
    "images": (
        ("noexec", "where a snapshotter mounts by bind, no program of an image runs", WARNING),
    ),
}


@check("D080")
def _selinux(machine: Machine) -> Iterator[str]:
    if machine.selinux == "enforcing" and machine.container_use_devices is not True:
        state = "off" if machine.container_use_devices is False else "not there"
        yield f"SELinux enforces, the boolean container_use_devices is {state}"


@check("D081")
def _apparmor(machine: Machine) -> Iterator[str]:
    if machine.apparmor and not machine.apparmor_parser:
        yield "the kernel enforces AppArmor, and there is no apparmor_parser"


@check("D082")
def _cgroup(machine: Machine) -> Iterator[str | Trouble]:
    match machine.cgroup:
        case "none":
            yield Trouble("no cgroups are mounted", severity=ERROR)
        case "hybrid":
            yield "version 1 has the controllers, version 2 is beside it"
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
                    f"{mount.path} ({mount.purpose}) is on {mount.point}, which is {option}: "
                    f"{result}",
                    severity=severity,
                )


@check("D085")
def _inotify(machine: Machine) -> Iterator[str]:
    instances = machine.inotify_instances
    if instances is not None and instances < _FEW_INSTANCES:
        yield f"fs.inotify.max_user_instances is {instances}"
