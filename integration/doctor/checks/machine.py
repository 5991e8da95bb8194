"""Kernel, security modules, mounts and limits: D080 to D088."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from integration.doctor.findings import ERROR, NOTE, WARNING, Trouble, check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from integration.doctor.facts import Machine

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


@check(
    "NVSHIM-D080",
    WARNING,
    "SELinux keeps containers from devices",
    why="A process of container_t may not open /dev/nvidia*, whoever has put them there.",
    remedy="allow containers their devices",
    command="setsebool -P container_use_devices on",
    reference="https://github.com/containers/container-selinux",
)
def _selinux(machine: Machine) -> Iterator[Trouble]:
    if machine.selinux == "enforcing" and machine.container_use_devices is not True:
        state = "off" if machine.container_use_devices is False else "not there"
        yield Trouble(f"SELinux enforces, the boolean container_use_devices is {state}")


@check(
    "NVSHIM-D081",
    WARNING,
    "AppArmor's profiles cannot be loaded",
    why="containerd then runs containers without a profile.",
    remedy="install the package apparmor",
    command="apt-get install apparmor",
)
def _apparmor(machine: Machine) -> Iterator[Trouble]:
    if machine.apparmor and not machine.apparmor_parser:
        yield Trouble("the kernel enforces AppArmor, and there is no apparmor_parser")


@check(
    "NVSHIM-D082",
    NOTE,
    "cgroups are of version 1",
    why="Everything works, and runc, systemd and Kubernetes are giving it up.",
    remedy="start the kernel with systemd.unified_cgroup_hierarchy=1",
    reference="https://kubernetes.io/docs/concepts/architecture/cgroups/",
)
def _cgroup(machine: Machine) -> Iterator[Trouble]:
    match machine.cgroup:
        case "none":
            yield Trouble("no cgroups are mounted", severity=ERROR)
        case "hybrid":
            yield Trouble("version 1 has the controllers, version 2 is beside it")
        case "v1":
            yield Trouble("version 1")


@check(
    "NVSHIM-D083",
    ERROR,
    "the kernel is too old",
    why=(
        "An image's files are opened by openat2(2) of Linux 5.6, so that no link leads out of "
        "it. There is no replacement that is safe."
    ),
    remedy="run Linux 5.6 or newer",
)
def _kernel(machine: Machine) -> Iterator[Trouble]:
    if not machine.openat2:
        yield Trouble(f"Linux {machine.kernel} has no openat2")


@check(
    "NVSHIM-D084",
    ERROR,
    "a file system is mounted with an option that breaks containers",
    why=(
        "nodev, noexec and ro hold for everything that lies on a mount, and for what is "
        "mounted from there by bind."
    ),
    remedy="mount it without that option, or put the directory elsewhere",
)
def _mounts(machine: Machine) -> Iterator[Trouble]:
    for mount in machine.mounts:
        for option, result, severity in _FORBIDDEN.get(mount.purpose, ()):
            if option in mount.options:
                yield Trouble(
                    f"{mount.path} ({mount.purpose}) is on {mount.point}, which is {option}: "
                    f"{result}",
                    severity=severity,
                )


@check(
    "NVSHIM-D085",
    WARNING,
    "there are few inotify instances",
    why=(
        "The fork server uses one to see that it is out of date; without it, it looks at all "
        "its files for each container."
    ),
    remedy="raise the limit",
    command="sysctl fs.inotify.max_user_instances=512",
)
def _inotify(machine: Machine) -> Iterator[Trouble]:
    instances = machine.inotify_instances
    if instances is not None and instances < _FEW_INSTANCES:
        yield Trouble(f"fs.inotify.max_user_instances is {instances}")
