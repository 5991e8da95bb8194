"""What daemons and their clients stand on: directories, shared memory, labels, compute modes.

Rules
- All of it is root's. A container of any user may pass through the pipe directory and connect to
  the sockets in it; it can make and remove nothing there. Logs are root's to read.
- The shared memory is one tmpfs for all, mounted once; it can take half of the machine's memory.
- A pipe directory stays the same one as long as somebody may have it mounted; what a dead daemon
  left in it goes.
- Where SELinux is on, containers may use what they share: it gets the label of their own files.
- Shared memory that somebody else has mounted there, as NVIDIA's mps-control-daemon does, is used
  and stays.
- A directory that others than root can change is refused: they could put links there.

Source: k8s-device-plugin, cmd/mps-control-daemon/mount; tmpfs(5); unix(7); NVML,
nvmlDeviceSetComputeMode.
"""

from __future__ import annotations

import json
import os
import re
import stat
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from api.errors import NvshimError, one_line
from hooks import engine
from integration.files import read_file, replace_file
from integration.inventory import ask
from integration.node.mps import launch
from integration.node.mps.errors import ComputeModeFailed, MpsStateUnusable
from integration.node.mps.places import shm
from shim import syscalls

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hooks.config import Config
    from integration.node.mps.places import Places

__all__ = [
    "CGROUP",
    "DEFAULT",
    "EXCLUSIVE_PROCESS",
    "clear",
    "empty_pipe",
    "is_anothers",
    "lay",
    "mounts_of",
    "noted_devices",
    "set_compute_mode",
    "take_cgroups",
    "take_shm",
    "unescaped",
    "unnote_devices",
]

DEFAULT: Final = 0
EXCLUSIVE_PROCESS: Final = 3
"""NVML's numbers of the compute modes."""
CGROUP: Final = "nvshim-mps"
"""The cgroup of all daemons and servers, at the top of every hierarchy."""

_OPEN, _OWN, _SHARED = 0o755, 0o700, 0o1777
_LABEL: Final = b"system_u:object_r:container_file_t:s0\0"
_MODE_PROGRAM: Final = os.path.join(os.path.dirname(os.path.abspath(__file__)), "nvml_mode.py")
_PROBE_WORD: Final = 3  # the place of the program in the command that asks NVML
_TO_END: Final = 1.0
_SOURCE: Final = "nvshim-mps"  # of the shared memory, by which it is known as ours
_OCTAL: Final = re.compile(r"\\([0-7]{3})")  # how mountinfo writes white space
_LONGEST_SOCKET: Final = "control_privileged"
_LONGEST_ADDRESS: Final = 107  # of a socket: sockaddr_un, less the NUL


def lay(places: Places, sys: str) -> None:
    """Make the directories of a resource and the shared memory, where they are missing.

    Args:
        places: of the resource.
        sys: where sysfs is.

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
        _make(places.root, _OPEN)
        _make(os.path.dirname(places.directory), _OPEN)
        _make(places.directory, _OPEN)
        _make(places.pipe, _OPEN)
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
        raise _unusable(places, error) from error


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
        raise _unusable(places, error) from error


def clear(places: Places) -> None:
    """Take away what says that there is a daemon; directories stay, for who has them mounted."""
    empty_pipe(places)
    for path in (places.started, places.devices, places.lock):
        with suppress(FileNotFoundError):
            os.unlink(path)


def is_anothers(root: str) -> bool:
    """Whether somebody else has mounted the shared memory, and so keeps MPS there.

    Args:
        root: the host's directory of MPS.
    """
    words = _mount_at(shm(root))
    return bool(words) and words[words.index("-") + 2] != _SOURCE


def _is_unseen(path: str) -> bool:
    """Whether a mount is not the node's too, whose containers are to have it.

    It may have another path there: this program's root need not be that of process 1.
    """
    devices = {words[2] for words in mounts_of() if unescaped(words[4]) == os.path.realpath(path)}
    try:
        return devices.isdisjoint(words[2] for words in mounts_of("1"))
    except OSError:
        return False  # it cannot be told


def _mount_at(path: str) -> list[str]:
    """The words of mountinfo on the topmost mount there; none if there is none."""
    path = os.path.realpath(path)
    return next((words for words in reversed(mounts_of()) if unescaped(words[4]) == path), [])


def mounts_of(process: str = "self") -> list[list[str]]:
    """What a process has mounted: the words of each line of its mountinfo.

    Raises:
        OSError: it has ended.
    """
    name = f"/proc/{process}/mountinfo"
    with open(name, encoding="utf-8", errors="surrogateescape") as file:
        return [line.split() for line in file]


def unescaped(path: str) -> str:
    """A path as it is, of how mountinfo writes it."""
    return _OCTAL.sub(lambda found: chr(int(found[1], 8)), path)


def take_shm(root: str) -> None:
    """Unmount the shared memory, if nobody on the host has a file of it open.

    Args:
        root: the host's directory of MPS.

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


# -- compute modes ----------------------------------------------------------------------------


def note_devices(places: Places, uuids: Iterable[str]) -> None:
    """Say whose compute mode is going to be set, so that it is set back whatever happens.

    Raises:
        MpsStateUnusable: it cannot be written.
    """
    known = dict.fromkeys((*noted_devices(places), *uuids))
    try:
        replace_file(places.devices, json.dumps(list(known)).encode(), mode=0o600)
    except OSError as error:
        raise _unusable(places, error) from error


def unnote_devices(places: Places, uuids: Iterable[str]) -> None:
    """Say whose compute mode was set back.

    Raises:
        MpsStateUnusable: it cannot be written.
    """
    gone = frozenset(uuids)
    left = [uuid for uuid in noted_devices(places) if uuid not in gone]
    try:
        replace_file(places.devices, json.dumps(left).encode(), mode=0o600)
    except OSError as error:
        raise _unusable(places, error) from error


def noted_devices(places: Places) -> tuple[str, ...]:
    """The GPUs whose compute mode somebody has set for a resource."""
    try:
        known: Any = json.loads(read_file(places.devices) or b"[]")
    except (OSError, ValueError):
        return ()
    return tuple(each for each in known if isinstance(each, str)) if isinstance(known, list) else ()


def set_compute_mode(config: Config, mode: int, uuids: tuple[str, ...]) -> None:
    """Say how many processes may open GPUs: any, or one, which is to be the server of MPS.

    Args:
        config: where the driver is.
        mode: :data:`DEFAULT` or :data:`EXCLUSIVE_PROCESS`.
        uuids: of the GPUs.

    Raises:
        ComputeModeFailed: not all are set so.
        DriverNotFound: there is no driver below the driver root.
        DriverMismatch: its files are not of the loaded kernel module's version.
    """
    if not uuids:
        return
    command = list(engine.probe_command(config))
    command[_PROBE_WORD] = _MODE_PROGRAM
    answer = ask([*command, str(mode), *uuids], config.nvml_timeout + _TO_END)
    try:
        told: Any = json.loads(answer or b"")
        failed = {uuid: str(why) for uuid, why in told.items() if why}
    except (ValueError, AttributeError):
        failed = {uuids[0]: "NVML crashed, or did not answer in time"}
    if failed:
        uuid, why = next(iter(failed.items()))
        raise ComputeModeFailed(
            f"compute mode {'EXCLUSIVE_PROCESS' if mode else 'DEFAULT'} of {', '.join(uuids)}",
            found=one_line(f"{'NVML' if uuid == 'error' else uuid}: {why}"),
            do="see that nvidia-smi -c works on the node; the node agent tries it again",
        )


def _unusable(places: Places, error: OSError) -> NvshimError:
    return MpsStateUnusable(
        f"the directories of MPS for {places.resource}, below {places.root}",
        found=one_line(f"{error.filename or places.directory}: {error.strerror}"),
        do="run the node agent as root, or set mpsRoot to a directory of root's",
    )
