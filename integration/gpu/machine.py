"""A place to run containers on a machine that may lack half of what they need.

Machines with GPUs are lent as virtual machines with a kernel of somebody's own, or as containers:
without systemd, with cgroups of version 1, 2, both, read-only or not mounted at all, with a root
that is an overlay. What can be had is found out by trying, and what had to be done without is
noted, for it bounds what a run proves.

Rules
- Everything happens in a mount namespace of our own, where one can be had: no mount outlives us.
- Nothing of the machine is changed outside the work directory, but for what containers need while
  they run (cgroups, /run/containerd).

Source: statvfs(3), mount_namespaces(7), cgroups(7); kernel Documentation/filesystems/overlayfs.rst.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from integration import traces
from integration.gpu.errors import MachineUnfit
from shim import syscalls

if TYPE_CHECKING:
    from collections.abc import Iterator

# In this order. The path of containerd's socket, which ends at 107 bytes, is below.
_PLACES: Final = ("/tmp", "/var/tmp", "/run", "/root")  # noqa: S108 - a directory of our own in it
_NEEDED_BYTES: Final = 500 << 20
_CGROUPS: Final = "/sys/fs/cgroup"
_CONTROLLERS: Final = frozenset({"cpu", "memory", "pids"})
_PROBE: Final = "nvshim-gpu-probe"
_RUNTIME: Final = "/run/containerd"


@dataclass(slots=True)
class Machine:
    """What a run has to work with.

    Attributes:
        work: a directory of its own, removed at the end.
        notes: what the machine lacks, and what was done about it, for people.
        overlay: whether overlay mounts work below ``work``.
        cgroups: why the machine's cgroups cannot be used; "" if they can.
    """

    work: str
    notes: list[str] = field(default_factory=list)
    overlay: bool = True
    cgroups: str = ""


@contextlib.contextmanager
def prepared(place: str | None = None) -> Iterator[Machine]:
    """A machine on which containers can be tried.

    Args:
        place: where the work directory is made; None for the first that will do.

    Yields:
        The machine. Its work directory and what was mounted are gone afterwards.

    Raises:
        MachineUnfit: we are not root, or there is no place, or nothing can be mounted.
    """
    if os.geteuid() != 0:
        raise MachineUnfit("containers with GPUs", found="we are not root", do="run it as root")
    work = tempfile.mkdtemp(prefix="nvshim-gpu-", dir=_choose_place(place))
    os.chmod(work, 0o711)  # noqa: S103 - roots of containers with other users are in it
    made = not os.path.lexists(_RUNTIME)
    try:
        machine = Machine(work)
        apart = _leave_mount_namespace(machine)
        if apart:
            _prepare_runtime(machine)
        _prepare_overlay(machine)
        _prepare_cgroups(machine, may_mount=apart)
        yield machine
    finally:
        with contextlib.suppress(OSError):
            syscalls.umount(work, syscalls.MNT_DETACH)
        shutil.rmtree(work, ignore_errors=True)
        if made:
            with contextlib.suppress(OSError):
                syscalls.umount(_RUNTIME, syscalls.MNT_DETACH)
            with contextlib.suppress(OSError):
                os.rmdir(_RUNTIME)


def _choose_place(wanted: str | None) -> str:
    faults = []
    for place in (wanted,) if wanted else _PLACES:
        fault = _fault_of(place)
        if not fault:
            return os.path.realpath(place)
        faults.append(f"{place} {fault}")
    raise MachineUnfit(
        f"a directory with {_NEEDED_BYTES >> 20} MiB for containers",
        found="; ".join(faults),
        do="name one with --work",
    )


def _fault_of(place: str) -> str:
    try:
        seen = os.statvfs(place)
    except OSError as error:
        return f"cannot be used: {(error.strerror or '').lower()}"
    for flag, word in (
        (os.ST_RDONLY, "is read-only"),
        (os.ST_NOEXEC, "is mounted noexec"),
        (os.ST_NODEV, "is mounted nodev"),
    ):
        if seen.f_flag & flag:
            return word
    free = seen.f_bavail * seen.f_frsize
    return f"has {free >> 20} MiB" if free < _NEEDED_BYTES else ""


def _leave_mount_namespace(machine: Machine) -> bool:
    try:
        syscalls.unshare(syscalls.CLONE_NEWNS)
        syscalls.mount("none", "/", "", syscalls.MS_REC | syscalls.MS_PRIVATE)
    except OSError as error:
        machine.notes.append(f"no mount namespace of our own: {error.strerror}")
        return False
    return True


def _prepare_runtime(machine: Machine) -> None:
    """Have the directory where shims listen and runc keeps its state to ourselves."""
    try:
        os.makedirs(_RUNTIME, exist_ok=True)
        syscalls.mount("tmpfs", _RUNTIME, "tmpfs", 0, "mode=711")
    except OSError as error:
        machine.notes.append(f"{_RUNTIME} is the machine's own: {error.strerror}")


def _prepare_overlay(machine: Machine) -> None:
    """Find out whether snapshots can be overlays here; on a file system of our own if need be."""
    fault = _overlay_fault(machine.work)
    if not fault:
        return
    try:
        syscalls.mount("tmpfs", machine.work, "tmpfs", 0, "mode=711,size=80%")
    except OSError as error:
        machine.overlay = False
        machine.notes.append(f"no overlay mounts: {fault}; nor a tmpfs: {error.strerror}")
        return
    again = _overlay_fault(machine.work)
    if again:
        machine.overlay = False
        machine.notes.append(f"no overlay mounts: {again}; snapshots are copies")
    else:
        machine.notes.append(f"no overlay mounts in {machine.work}: {fault}; on a tmpfs instead")


def _overlay_fault(directory: str) -> str:
    with tempfile.TemporaryDirectory(dir=directory) as trial:
        paths = {name: os.path.join(trial, name) for name in ("lower", "upper", "work", "all")}
        for path in paths.values():
            os.mkdir(path)
        options = "lowerdir={lower},upperdir={upper},workdir={work}".format(**paths)
        try:
            syscalls.mount("overlay", paths["all"], "overlay", 0, options)
        except OSError as error:
            return error.strerror or str(error)
        fault = ""
        try:
            # Some kernels mount it, and then refuse each write.
            with open(os.path.join(paths["all"], "file"), "w", encoding="ascii") as file:
                file.write("written")
        except OSError as error:
            fault = f"no writes: {error.strerror}"
        syscalls.umount(paths["all"], syscalls.MNT_DETACH)
        return fault


def _prepare_cgroups(machine: Machine, *, may_mount: bool) -> None:
    if may_mount and not traces.cgroup_hierarchies():
        try:
            mounted = _mount_cgroups()
        except OSError as error:
            machine.cgroups = f"none are mounted, and they cannot be: {error.strerror}"
            return
        machine.notes.append(f"no cgroups were mounted; {mounted} is now, for us")
    points = traces.cgroup_hierarchies()
    if not points:
        machine.cgroups = "none are mounted"
    for point in points:
        fault = _cgroup_fault(point)
        if fault and may_mount:
            with contextlib.suppress(OSError):
                flags = syscalls.MS_REMOUNT | syscalls.MS_BIND | syscalls.MS_NOSUID
                syscalls.mount("none", point, "", flags | syscalls.MS_NODEV | syscalls.MS_NOEXEC)
            still = _cgroup_fault(point)
            if not still:
                machine.notes.append(f"{point} was not writable ({fault}); it is now, for us")
            fault = still
        if fault:
            machine.cgroups = f"{point}: {fault}"
            return


def _mount_cgroups() -> str:
    """Mount what the kernel has: version 2 if it has the controllers, else version 1."""
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
        except OSError:  # mounted elsewhere together with another
            os.rmdir(point)
        else:
            mounted.append(name)
    return f"version 1 ({', '.join(mounted)})"


def _cgroup_fault(point: str) -> str:
    path = os.path.join(point, _PROBE)
    try:
        os.mkdir(path)
    except OSError as error:
        return error.strerror or str(error)
    os.rmdir(path)
    return ""
