"""The processes that have a device node open or mapped.

Rules
- The number of the node counts, not its path: a container can give a node any name.
- A descriptor opened with O_PATH names a node and does not hold it open.
- Device numbers are read by the child with a deadline, and only for files whose path can be that of
  a driver's node, on a file system that no other machine or process serves.
- The number of each file, identified by mount and inode, is read only once.

Source: proc(5).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

from integration.containers.procfs import Procfs

_OF_DRIVER = "nvidia"
_MAPPED = ("/dev/nvidia", "/dev/dri/")
_WITHOUT_NODES = ("socket:", "pipe:", "anon_inode:", "/memfd:")


def device_users(
    procfs: Procfs, name_of: Callable[[int], str]
) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield each process that holds a named device, with the names; those in containers come last.

    Args:
        name_of: returns the name of a device number; "" for one of no interest.
    """
    numbers: dict[tuple[int, int], int] = {}
    for pid in procfs.pids_by_trust():
        if pid != os.getpid():
            held = (*_open(procfs, pid, numbers), *_mapped(procfs, pid))
            names = dict.fromkeys(name for number in held if (name := name_of(number)))
            if names:
                yield pid, tuple(names)


def _open(procfs: Procfs, pid: int, numbers: dict[tuple[int, int], int]) -> Iterator[int]:
    """Yield the device numbers of the nodes that a process has open.

    Args:
        numbers: the numbers that are already known, by mount and inode; new ones are added.
    """
    for descriptor, path in procfs.descriptors(pid).items():
        if path.startswith(_WITHOUT_NODES) or not _may_be_node(path):
            continue
        file = procfs.open_file(pid, descriptor)
        if file is not None and (file.is_path_only or procfs.is_on_served(pid, file.mount)):
            continue
        place = (0, 0) if file is None else (file.mount, file.inode)
        if not place[1] or place not in numbers:
            numbers[place] = procfs.node(f"{pid}/fd/{descriptor}")
        yield numbers[place]


def _mapped(procfs: Procfs, pid: int) -> Iterator[int]:
    """Yield the device numbers of mapped nodes, which may be closed."""
    files = {
        (each.device, each.inode): each.addresses
        for each in procfs.mappings(pid)
        if each.path.startswith(_MAPPED)
    }
    for (device, _), addresses in files.items():
        if not procfs.is_on_served(pid, device):
            yield procfs.node(f"{pid}/map_files/{addresses}")


def _may_be_node(path: str) -> bool:
    return "/dev/" in path or _OF_DRIVER in os.path.basename(path)
