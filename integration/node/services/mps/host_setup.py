"""Prepare the host for daemons and clients: directories, shared memory, SELinux labels.

Rules
- Everything belongs to root. A container of any user may enter the pipe directory and connect to
  its sockets; it cannot create or remove anything there. Only root can read the logs.
- One tmpfs, mounted once, is the shared memory of all daemons; its limit is half of the machine's
  memory.
- The agent keeps a pipe directory while a container may have it mounted, and empties it after its
  daemon has died. The directories of a claim, including its log, are removed with the claim,
  because no other claim has its name.
- With SELinux, the shared directories get the label of container files, so that containers may use
  them.
- If another program, such as NVIDIA's mps-control-daemon, has mounted the shared memory, the agent
  uses that mount and does not remove it.
- A directory that a user other than root can change is refused: that user could create links there.

Source: k8s-device-plugin, cmd/mps-control-daemon/mount; tmpfs(5); unix(7).
"""

from __future__ import annotations

import os
import shutil
import stat
from contextlib import suppress
from typing import Final

from integration.agent_errors import MpsStateUnusable, NodeAgentError
from integration.containers.procfs import Procfs
from integration.node.mps.paths import Places, shm
from shim import syscalls

CGROUP: Final = "nvshim-mps"
"""The cgroup of all daemons and servers, at the root of every hierarchy."""

_OPEN, _OWN, _SHARED = 0o755, 0o700, 0o1777
_LABEL: Final = b"system_u:object_r:container_file_t:s0\0"
_SOURCE: Final = "nvshim-mps"  # mount source of the shared memory; marks it as ours
_LONGEST_SOCKET: Final = "control_privileged"
_LONGEST_ADDRESS: Final = 107  # sun_path of sockaddr_un, without the NUL


def prepare(places: Places, sys: str) -> None:
    """Create the directories of a resource and the shared memory, where they are missing.

    Raises:
        MpsStateUnusable: they cannot be created, or another user can change them.
    """
    memory = shm(places.root)
    longest = os.fsencode(os.path.join(places.pipe, _LONGEST_SOCKET))
    if len(longest) > _LONGEST_ADDRESS:
        raise MpsStateUnusable(
            f"sockets in {places.pipe}",
            found=f"their addresses need {len(longest)} bytes; the limit is {_LONGEST_ADDRESS}",
            do="set mpsRoot to a shorter path, or give the resource a shorter name",
        )
    try:
        above = os.path.dirname(places.directory)
        for path in (places.root, above, places.directory, places.pipe):
            _make(path, _OPEN)
        _make(places.log, _OWN)
        with suppress(FileExistsError):
            os.mkdir(memory, _OPEN)
        if not os.path.ismount(memory):
            half = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
            flags = syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC
            syscalls.mount(_SOURCE, memory, "tmpfs", flags, f"size={half},mode={_SHARED:o}")
            if _is_private(memory):
                syscalls.umount(memory)
                raise MpsStateUnusable(
                    f"shared memory at {memory}",
                    found="a mount in this pod does not appear on the node",
                    do=f"mount {places.root} into the pod with mountPropagation: Bidirectional, as "
                    "the component mps of the manifests does",
                )
        if os.path.exists(os.path.join(sys, "fs/selinux/enforce")):
            for path in (places.pipe, memory):
                os.setxattr(path, "security.selinux", _LABEL, follow_symlinks=False)
    except OSError as error:
        raise unusable(places, error) from error


def _make(path: str, mode: int) -> None:
    """Create a directory that belongs to root, with this mode; its parents get the default mode.

    Raises:
        OSError: it cannot be created, or belongs to another user.
    """
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with suppress(FileExistsError):
        os.mkdir(path, mode)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if status.st_uid != os.geteuid():
            raise PermissionError(0, f"belongs to user {status.st_uid}", path)
        if stat.S_IMODE(status.st_mode) != mode:
            os.fchmod(fd, mode)
    finally:
        os.close(fd)


def empty_pipe(places: Places) -> None:
    """Remove the files that a dead daemon left in its pipe directory.

    Args:
        places: the paths of the resource, whose lock must be free.

    Raises:
        MpsStateUnusable: a file cannot be removed.
    """
    try:
        fd = os.open(places.pipe, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            for name in os.listdir(fd):
                os.unlink(name, dir_fd=fd)
        finally:
            os.close(fd)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise unusable(places, error) from error


def clear(places: Places) -> None:
    """Remove the files of a daemon; the directories stay, as containers may have them mounted."""
    empty_pipe(places)
    for path in (places.devices, places.lock):
        with suppress(FileNotFoundError):
            os.unlink(path)


def remove(places: Places) -> None:
    """Remove the directories of a removed daemon that no container can use any longer.

    Raises:
        OSError: they cannot be removed.
    """
    with suppress(FileNotFoundError):
        shutil.rmtree(places.directory)


def is_foreign(root: str) -> bool:
    """Whether another program has mounted the shared memory, and so runs MPS there."""
    path = os.path.realpath(shm(root))
    topmost = next((each for each in reversed(Procfs().mounts()) if each.point == path), None)
    return topmost is not None and topmost.source != _SOURCE


def _is_private(path: str) -> bool:
    """Whether a mount is missing on the node, so that containers cannot use it.

    The node may have it at another path, because this program's root can differ from that of
    process 1.
    """
    real = os.path.realpath(path)
    procfs = Procfs()
    devices = {mount.device for mount in procfs.mounts() if mount.point == real}
    of_node = procfs.mounts(1)  # empty if they cannot be read
    return bool(of_node) and devices.isdisjoint(mount.device for mount in of_node)


def remove_shm(root: str) -> None:
    """Unmount the shared memory, unless another program has mounted it.

    Raises:
        OSError: a process on the host has a file of it open.
    """
    memory = shm(root)
    if is_foreign(root):
        return
    while os.path.ismount(memory):
        syscalls.umount(memory)
    with suppress(FileNotFoundError):
        os.rmdir(memory)


def cgroup_tops() -> dict[str, bool]:
    """Return where the top of each cgroup hierarchy is mounted, and whether it has cpusets.

    Only cgroup file systems are touched, because any other may hang.
    """
    found = {}
    for mount in Procfs().mounts():
        # In a container a part of a hierarchy may be mounted at its place.
        if mount.kind == "cgroup2":
            is_top = not os.path.exists(f"{mount.point}/cgroup.type")
        else:
            is_top = mount.kind == "cgroup" and os.path.exists(f"{mount.point}/release_agent")
        if is_top:
            found[mount.point] = mount.kind == "cgroup" and "cpuset" in mount.options
    return found


def daemon_cgroups() -> list[str]:
    """Return the cgroup of all daemons and servers in each hierarchy.

    A new cgroup with cpusets has no processors, so no process can join it: its top is used.
    """
    tops = cgroup_tops().items()
    return [top if has_cpusets else os.path.join(top, CGROUP) for top, has_cpusets in tops]


def remove_cgroups() -> None:
    """Remove the cgroups of daemons that contain no process."""
    for top in cgroup_tops():
        with suppress(OSError):
            os.rmdir(os.path.join(top, CGROUP))


def unusable(places: Places, error: OSError) -> NodeAgentError:
    """Return the error for a file of a resource that cannot be created or changed."""
    return MpsStateUnusable(
        f"the directories of MPS for {places.resource}, below {places.root}",
        found=f"{error.filename or places.directory}: {error.strerror}",
        do="run the node agent as root, or set mpsRoot to a directory that root owns",
    )
