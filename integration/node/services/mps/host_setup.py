"""What daemons and their clients stand on: directories, shared memory, labels.

Rules
- All of it is root's. A container of any user may pass through the pipe directory and connect to
  the sockets in it; it can make and remove nothing there. Logs are root's to read.
- The shared memory is one tmpfs for all, mounted once; it can take half of the machine's memory.
- A pipe directory stays the same one as long as somebody may have it mounted; what a dead daemon
  left in it goes. What is of a claim goes with the claim, its log too: no other has its name.
- Where SELinux is on, containers may use what they share: it gets the label of their own files.
- Shared memory that somebody else has mounted there, as NVIDIA's mps-control-daemon does, is used
  and stays.
- A directory that others than root can change is refused: they could put links there.

Source: k8s-device-plugin, cmd/mps-control-daemon/mount; tmpfs(5); unix(7).
"""

from __future__ import annotations

import os
import shutil
import stat
from contextlib import suppress
from typing import Final

from integration import driver_launch_child as launch
from integration.agent_errors import MpsStateUnusable
from integration.containers.procfs import Procfs
from integration.node.mps.paths import Places, shm
from shim import syscalls

CGROUP: Final = "nvshim-mps"
"""The cgroup of all daemons and servers, at the top of every hierarchy."""

_OPEN, _OWN, _SHARED = 0o755, 0o700, 0o1777
_LABEL: Final = b"system_u:object_r:container_file_t:s0\0"
_SOURCE: Final = "nvshim-mps"  # of the shared memory, by which it is known as ours
_LONGEST_SOCKET: Final = "control_privileged"
_LONGEST_ADDRESS: Final = 107  # of a socket: sockaddr_un, less the NUL


def lay(places: Places, sys: str) -> None:
    """Make the directories of a resource and the shared memory, where they are missing.

    Raises:
        MpsStateUnusable: they cannot be made, or others can change them.
    """
    memory = shm(places.root)
    longest = os.fsencode(os.path.join(places.pipe, _LONGEST_SOCKET))
    if len(longest) > _LONGEST_ADDRESS:
        raise MpsStateUnusable(
            f"sockets in {places.pipe}",
            found=f"their addresses would have {len(longest)} bytes; {_LONGEST_ADDRESS} can be",
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
            if _is_unseen(memory):
                syscalls.umount(memory)
                raise MpsStateUnusable(
                    f"shared memory at {memory}",
                    found="what is mounted there in this pod is not seen on the node",
                    do=f"have {places.root} in it with mountPropagation: Bidirectional; "
                    "the component mps of the manifests does",
                )
        if os.path.exists(os.path.join(sys, "fs/selinux/enforce")):
            for path in (places.pipe, memory):
                os.setxattr(path, "security.selinux", _LABEL, follow_symlinks=False)
    except OSError as error:
        raise unusable(places, error) from error


def _make(path: str, mode: int) -> None:
    """A directory of root's with that mode; those above it are made as they are anywhere.

    Raises:
        OSError: it cannot be made, or is not root's alone.
    """
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with suppress(FileExistsError):
        os.mkdir(path, mode)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        seen = os.fstat(fd)
        if seen.st_uid != os.geteuid():
            raise PermissionError(0, f"belongs to user {seen.st_uid}", path)
        if stat.S_IMODE(seen.st_mode) != mode:
            os.fchmod(fd, mode)
    finally:
        os.close(fd)


def empty_pipe(places: Places) -> None:
    """Remove what a dead daemon has left in its pipe directory.

    Args:
        places: of the resource, whose lock nobody has.

    Raises:
        MpsStateUnusable: it cannot be removed.
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
    """Take away what says that there is a daemon; directories stay, for who has them mounted."""
    empty_pipe(places)
    for path in (places.devices, places.lock):
        with suppress(FileNotFoundError):
            os.unlink(path)


def remove(places: Places) -> None:
    """Remove the directories of a daemon that is cleared, and that no container can have any more.

    Raises:
        OSError: they cannot be removed.
    """
    with suppress(FileNotFoundError):
        shutil.rmtree(places.directory)


def is_anothers(root: str) -> bool:
    """Whether somebody else has mounted the shared memory, and so keeps MPS there."""
    path = os.path.realpath(shm(root))
    topmost = next((each for each in reversed(Procfs().mounts()) if each.point == path), None)
    return topmost is not None and topmost.source != _SOURCE


def _is_unseen(path: str) -> bool:
    """Whether a mount is not the node's too, whose containers are to have it.

    It may have another path there: this program's root need not be that of process 1.
    """
    real = os.path.realpath(path)
    procfs = Procfs()
    devices = {mount.device for mount in procfs.mounts() if mount.point == real}
    theirs = procfs.mounts(1)  # empty if they cannot be read
    return bool(theirs) and devices.isdisjoint(mount.device for mount in theirs)


def take_shm(root: str) -> None:
    """Unmount the shared memory, if nobody on the host has a file of it open.

    Raises:
        OSError: somebody has.
    """
    memory = shm(root)
    if is_anothers(root):
        return
    while os.path.ismount(memory):
        syscalls.umount(memory)
    with suppress(FileNotFoundError):
        os.rmdir(memory)


def take_cgroups() -> None:
    """Remove the cgroups of daemons, where nobody is in them any more."""
    for top in launch.cgroup_tops():
        with suppress(OSError):
            os.rmdir(os.path.join(top, CGROUP))


def unusable(places: Places, error: OSError) -> MpsStateUnusable:
    """What to raise when a file of a resource cannot be made or changed."""
    return MpsStateUnusable(
        f"the directories of MPS for {places.resource}, below {places.root}",
        found=f"{error.filename or places.directory}: {error.strerror}",
        do="run the node agent as root, or set mpsRoot to a directory of root's",
    )
