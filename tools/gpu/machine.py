"""An environment for containers on a machine that may lack some requirements.

GPU machines are rented as virtual machines with any kernel, or as containers: without systemd, and
with cgroup v1, v2, both, read-only or not mounted at all. The run tries what works, and records
what is missing, because that limits what the checks show.

Rules
- Everything happens in a separate mount namespace: no mount survives the run.
- The work directory is a tmpfs at a fixed path. Overlays work on it whatever the root is, and the
  bundle's programs can contain the paths of their libraries.

Source: mount_namespaces(7), cgroups(7); kernel Documentation/filesystems/overlayfs.rst.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from integration.containers import traces
from shim import syscalls
from tools.errors import MachineUnfit

WORK: Final = "/run/nvshim-gpu"
"""The work directory."""
BUNDLE: Final = f"{WORK}/bundle"
"""The path of the bundle during a run."""

# Directories of shims' sockets and runc's state, private during a run.
_RUNTIME: Final = "/run/containerd"
_CGROUPS: Final = "/sys/fs/cgroup"
_CONTROLLERS: Final = frozenset({"cpu", "memory", "pids"})


@dataclass(slots=True)
class Machine:
    """The environment of a run."""

    # what the machine lacks, and the workaround, as text for the report
    notes: list[str] = field(default_factory=list)
    overlay: bool = True  # whether snapshots can be overlays
    cgroups: str = ""  # why the machine's cgroups cannot be used; "" if they can


@contextlib.contextmanager
def prepared(bundle: str) -> Iterator[Machine]:
    """Yield a machine where containers can run, with the bundle at :data:`BUNDLE`.

    Raises:
        MachineUnfit: we are not root, or nothing can be mounted.
    """
    if os.geteuid() != 0:
        raise MachineUnfit("containers with GPUs", found="we are not root", do="run it as root")
    made = [path for path in (WORK, _RUNTIME) if not os.path.lexists(path)]
    machine = Machine()
    try:
        try:
            syscalls.unshare(syscalls.CLONE_NEWNS)
            syscalls.mount("none", "/", "", syscalls.MS_REC | syscalls.MS_PRIVATE)
            for path in (WORK, _RUNTIME):
                os.makedirs(path, exist_ok=True)
                syscalls.mount("tmpfs", path, "tmpfs", 0, "mode=711,size=80%")
            os.mkdir(BUNDLE)
            syscalls.mount(bundle, BUNDLE, "", syscalls.MS_BIND)
        except OSError as error:
            raise MachineUnfit(
                f"a mount namespace with {WORK} in it",
                found=error.strerror or str(error),
                do="run it where a container runtime may run",
            ) from error
        _try_overlay(machine)
        _prepare_cgroups(machine)
        yield machine
    finally:
        for path in (BUNDLE, WORK, _RUNTIME):
            with contextlib.suppress(OSError):
                syscalls.umount(path, syscalls.MNT_DETACH)
        for path in made:
            with contextlib.suppress(OSError):
                os.rmdir(path)


def _try_overlay(machine: Machine) -> None:
    paths = {name: f"{WORK}/overlay/{name}" for name in ("lower", "upper", "work", "all")}
    for path in paths.values():
        os.makedirs(path)
    options = "lowerdir={lower},upperdir={upper},workdir={work}".format(**paths)
    try:
        syscalls.mount("overlay", paths["all"], "overlay", 0, options)
        # Some kernels mount an overlay, and then refuse each write.
        with open(f"{paths['all']}/file", "w", encoding="ascii") as file:
            file.write("written")
    except OSError as error:
        machine.overlay = False
        machine.notes.append(f"no overlay mounts: {error.strerror}; snapshots are copies")
    with contextlib.suppress(OSError):
        syscalls.umount(paths["all"], syscalls.MNT_DETACH)


def _prepare_cgroups(machine: Machine) -> None:
    """Prepare writable cgroups, or record why there are none."""
    if not traces.cgroup_hierarchies():
        try:
            machine.notes.append(
                f"no cgroups were mounted; {_mount_cgroups()} is now, during the run"
            )
        except OSError as error:
            machine.cgroups = f"none are mounted, and they cannot be: {error.strerror}"
            return
    for point in traces.cgroup_hierarchies():
        fault = _cgroup_fault(point)
        if not fault:
            continue
        with contextlib.suppress(OSError):
            flags = syscalls.MS_REMOUNT | syscalls.MS_BIND | syscalls.MS_NOSUID
            syscalls.mount("none", point, "", flags | syscalls.MS_NODEV | syscalls.MS_NOEXEC)
        if _cgroup_fault(point):
            machine.cgroups = f"{point}: {fault}"
            return
        machine.notes.append(f"{point} was not writable ({fault}); it is now, during the run")


def _mount_cgroups() -> str:
    """Mount the kernel's cgroups: version 2 if it has the controllers, else version 1."""
    syscalls.mount("cgroup2", _CGROUPS, "cgroup2", 0)
    with open(f"{_CGROUPS}/cgroup.controllers", encoding="ascii") as file:
        if set(file.read().split()) >= _CONTROLLERS:
            return "version 2"
    syscalls.umount(_CGROUPS)
    syscalls.mount("tmpfs", _CGROUPS, "tmpfs", 0, "mode=755")
    with open("/proc/cgroups", encoding="ascii") as file:
        rows = [line.split() for line in file if not line.startswith("#")]
    mounted = []
    for name in (row[0] for row in rows if row[-1] == "1"):
        point = os.path.join(_CGROUPS, name)
        os.mkdir(point)
        try:
            syscalls.mount("cgroup", point, "cgroup", 0, name)
        except OSError:  # mounted elsewhere together with another controller
            os.rmdir(point)
        else:
            mounted.append(name)
    return f"version 1 ({', '.join(mounted)})"


def _cgroup_fault(point: str) -> str:
    path = os.path.join(point, "nvshim-gpu-probe")
    try:
        os.mkdir(path)
        os.rmdir(path)
    except OSError as error:
        return error.strerror or str(error)
    return ""
