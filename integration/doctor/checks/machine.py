"""Kernel, security modules, mounts and limits: D080 to D088."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from integration.doctor.checks.containerd import DESCRIPTORS
from integration.doctor.facts import seen
from integration.doctor.findings import Check, Severity, Trouble

if TYPE_CHECKING:
    from collections.abc import Iterator

    from integration.doctor.facts import Node

__all__ = ["MACHINE"]

_ERROR, _WARNING, _NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE

_FEW_INSTANCES: Final = 64

# What a mount must not be for what lies on it, by purpose, and what comes of it.
_FORBIDDEN: Final = {
    "device nodes": (("nodev", "no device node can be opened", _ERROR),),
    "the driver": (("noexec", "no library can be mapped, no program run", _ERROR),),
    "our state": (("ro", "nothing can be kept", _ERROR),),
    "shared layers": (("ro", "no layer can be kept; containers are slower", _WARNING),),
    "images": (
        ("noexec", "where a snapshotter mounts by bind, no program of an image runs", _WARNING),
    ),
}


def _selinux(node: Node) -> Iterator[Trouble]:
    machine = seen(node.machine)
    if machine.selinux == "enforcing" and machine.container_use_devices is not True:
        state = "off" if machine.container_use_devices is False else "not there"
        yield Trouble(f"SELinux enforces, the boolean container_use_devices is {state}")


def _apparmor(node: Node) -> Iterator[Trouble]:
    machine = seen(node.machine)
    if machine.apparmor and not machine.apparmor_parser:
        yield Trouble("the kernel enforces AppArmor, and there is no apparmor_parser")


def _cgroup(node: Node) -> Iterator[Trouble]:
    machine = seen(node.machine)
    match machine.cgroup:
        case "none":
            yield Trouble("no cgroups are mounted", severity=_ERROR)
        case "hybrid":
            yield Trouble("version 1 has the controllers, version 2 is beside it")
        case "v1":
            yield Trouble("version 1")


def _kernel(node: Node) -> Iterator[Trouble]:
    machine = seen(node.machine)
    if not machine.openat2:
        yield Trouble(f"Linux {machine.kernel} has no openat2")


def _mounts(node: Node) -> Iterator[Trouble]:
    for mount in seen(node.machine).mounts:
        for option, result, severity in _FORBIDDEN.get(mount.purpose, ()):
            if option in mount.options:
                yield Trouble(
                    f"{mount.path} ({mount.purpose}) is on {mount.point}, which is {option}: "
                    f"{result}",
                    severity=severity,
                )


def _inotify(node: Node) -> Iterator[Trouble]:
    instances = seen(node.machine).inotify_instances
    if instances is not None and instances < _FEW_INSTANCES:
        yield Trouble(f"fs.inotify.max_user_instances is {instances}")


_NEEDS: Final = ("machine",)

MACHINE: Final = (
    Check(
        code="NVSHIM-D080",
        severity=_WARNING,
        title="SELinux keeps containers from devices",
        why="A process of container_t may not open /dev/nvidia*, whoever has put them there.",
        remedy="allow containers their devices",
        command="setsebool -P container_use_devices on",
        reference="https://github.com/containers/container-selinux",
        needs=_NEEDS,
        look=_selinux,
    ),
    Check(
        code="NVSHIM-D081",
        severity=_WARNING,
        title="AppArmor's profiles cannot be loaded",
        why="containerd then runs containers without a profile.",
        remedy="install the package apparmor",
        command="apt-get install apparmor",
        needs=_NEEDS,
        look=_apparmor,
    ),
    Check(
        code="NVSHIM-D082",
        severity=_NOTE,
        title="cgroups are of version 1",
        why="Everything works, and runc, systemd and Kubernetes are giving it up.",
        remedy="start the kernel with systemd.unified_cgroup_hierarchy=1",
        reference="https://kubernetes.io/docs/concepts/architecture/cgroups/",
        needs=_NEEDS,
        look=_cgroup,
    ),
    Check(
        code="NVSHIM-D083",
        severity=_ERROR,
        title="the kernel is too old",
        why="An image's files are opened by openat2(2) of Linux 5.6, so that no link leads out of "
        "it. There is no replacement that is safe.",
        remedy="run Linux 5.6 or newer",
        needs=_NEEDS,
        look=_kernel,
    ),
    Check(
        code="NVSHIM-D084",
        severity=_ERROR,
        title="a file system is mounted with an option that breaks containers",
        why="nodev, noexec and ro hold for everything that lies on a mount, and for what is "
        "mounted from there by bind.",
        remedy="mount it without that option, or put the directory elsewhere",
        needs=_NEEDS,
        look=_mounts,
    ),
    Check(
        code="NVSHIM-D085",
        severity=_WARNING,
        title="there are few inotify instances",
        why="The fork server uses one to see that it is out of date; without it, it looks at all "
        "its files for each container.",
        remedy="raise the limit",
        command="sysctl fs.inotify.max_user_instances=512",
        needs=_NEEDS,
        look=_inotify,
    ),
    DESCRIPTORS,
)
