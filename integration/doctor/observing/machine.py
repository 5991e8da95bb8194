"""Gather facts about the kernel, its security modules and its mounts.

Source: proc_pid_mountinfo(5), cgroups(7), sd_booted(3), selinux(8), openat2(2).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final

from hooks.config import Config
from hooks.image.openat2 import open_in_root
from hooks.node.cache import recall
from hooks.platforms import platform_of
from integration.containers.procfs import Mount as Mounted
from integration.containers.procfs import Procfs, mounts_above
from integration.doctor.facts import Machine, Mount
from integration.doctor.observing.running import find_program, read_file
from integration.doctor.places import Places
from integration.layer_usage import layer_usage

_SELINUX: Final = "/sys/fs/selinux"
_BOOLEAN: Final = "container_use_devices"
_IMAGES: Final = "/var/lib/containerd"


def look_at_machine(places: Places) -> Machine:
    """Return the kernel's release, features and settings."""
    config = places.config()
    enforcing = _text(places, f"{_SELINUX}/enforce")
    boolean = _text(places, f"{_SELINUX}/booleans/{_BOOLEAN}")
    instances = _text(places, "/proc/sys/fs/inotify/max_user_instances")
    mounts = Procfs(places.at("/proc")).mounts()
    return Machine(
        kernel=_text(places, "/proc/sys/kernel/osrelease"),
        openat2=_has_openat2(),
        systemd=systemd_runs(places),
        cgroup=_cgroup(mounts),
        selinux={"": "off", "1": "enforcing"}.get(enforcing, "permissive"),
        # "1 1": the current and the pending value.
        container_use_devices=boolean.startswith("1") if boolean else None,
        apparmor=_text(places, "/sys/module/apparmor/parameters/enabled") == "Y",
        apparmor_parser=bool(find_program(places, "apparmor_parser")),
        platform=platform_of(config),
        mounts=tuple(_of_interest(places, config, mounts)),
        inotify_instances=int(instances) if instances.isdecimal() else None,
        layers=layer_usage(config.layers, _driver_files(places, config)),
    )


def _driver_files(places: Places, config: Config) -> Iterator[str]:
    kept = recall(config)
    if kept is not None:
        yield from (places.at(library.source) for library in kept.driver.libraries)
        yield from (places.at(file.source) for file in kept.driver.files)


def systemd_runs(places: Places) -> bool:
    """Whether systemd is the node's init system."""
    return os.path.isdir(places.at("/run/systemd/system"))


def _text(places: Places, path: str) -> str:
    try:
        return read_file(places.at(path)).strip()
    except OSError:
        return ""


def _has_openat2() -> bool:
    """Test openat2 on the running kernel, which is the node's."""
    try:
        fd = os.open("/", os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        os.close(open_in_root(fd, ".", os.O_PATH))
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def _cgroup(mounts: list[Mounted]) -> str:
    kinds = {mount.kind for mount in mounts} & {"cgroup", "cgroup2"}
    if len(kinds) != 1:
        return "hybrid" if kinds else "none"
    return "v1" if "cgroup" in kinds else "v2"


def _of_interest(places: Places, config: Config, mounts: list[Mounted]) -> Iterator[Mount]:
    directories = {
        "device nodes": config.dev,
        "our state": config.state,
        "shared layers": config.layers,
        **({"the driver": config.driver_root} if config.driver_root is not None else {}),
        "images": places.at(_IMAGES),
    }
    for purpose, path in directories.items():
        for mount in mounts_above(places.within(os.path.realpath(path)), mounts)[:1]:
            yield Mount(purpose, places.within(path), mount.point, mount.options)
