"""The system calls that Python's standard library does not have.

Each raises OSError with the kernel's errno. Importing this module costs 4 ms (ctypes), so
the verbs import it only when there is something to mount, unmount or schedule.

Source: mount(2), umount(2), prctl(2), unshare(2).
"""

from __future__ import annotations

import ctypes
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

MS_RDONLY: Final = 1
MS_NOSUID: Final = 1 << 1
MS_NODEV: Final = 1 << 2
MS_NOEXEC: Final = 1 << 3
MS_SYNCHRONOUS: Final = 1 << 4
MS_REMOUNT: Final = 1 << 5
MS_MANDLOCK: Final = 1 << 6
MS_DIRSYNC: Final = 1 << 7
MS_NOSYMFOLLOW: Final = 1 << 8
MS_NOATIME: Final = 1 << 10
MS_NODIRATIME: Final = 1 << 11
MS_BIND: Final = 1 << 12
MS_REC: Final = 1 << 14
MS_UNBINDABLE: Final = 1 << 17
MS_PRIVATE: Final = 1 << 18
MS_SLAVE: Final = 1 << 19
MS_SHARED: Final = 1 << 20
MS_RELATIME: Final = 1 << 21
MS_STRICTATIME: Final = 1 << 24

MNT_DETACH: Final = 2
UMOUNT_NOFOLLOW: Final = 8

CLONE_FS: Final = 0x200
CLONE_NEWNS: Final = 0x20000

_PR_SET_CHILD_SUBREAPER: Final = 36
_PR_SCHED_CORE: Final = 62
_PR_SCHED_CORE_CREATE: Final = 1
_PIDTYPE_PGID: Final = 2

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = (
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_ulong,
    ctypes.c_char_p,
)
_libc.umount2.argtypes = (ctypes.c_char_p, ctypes.c_int)
_libc.prctl.argtypes = (ctypes.c_int, *(ctypes.c_ulong,) * 4)
_libc.unshare.argtypes = (ctypes.c_int,)


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    """Mount, remount, or change the propagation of a mount.

    Args:
        source: what is mounted; empty where the kernel ignores it.
        target: where, following links.
        kind: the file system's type; empty where the kernel ignores it.
        flags: ``MS_…``.
        data: the file system's own options, less than a page.
    """
    encoded = [os.fsencode(text) if text else None for text in (source, kind, data)]
    _check(_libc.mount(encoded[0], os.fsencode(target), encoded[1], flags, encoded[2]))


def umount(target: str, flags: int = UMOUNT_NOFOLLOW) -> None:
    """Unmount the topmost mount at a path.

    Args:
        target: the mount point.
        flags: ``MNT_DETACH``, ``UMOUNT_NOFOLLOW``.
    """
    _check(_libc.umount2(os.fsencode(target), flags))


def unshare(flags: int) -> None:
    """Give the calling thread its own copy of what it shares.

    Args:
        flags: ``CLONE_FS`` (working directory, root, umask), ``CLONE_NEWNS`` (mounts).
    """
    _check(_libc.unshare(flags))


def set_child_subreaper(*, enabled: bool = True) -> None:
    """Become the parent of every orphan among our descendants, or cease to be."""
    _check(_libc.prctl(_PR_SET_CHILD_SUBREAPER, int(enabled), 0, 0, 0))


def create_core_scheduling_domain() -> None:
    """Let our process group share hyper-threads with itself alone."""
    _check(_libc.prctl(_PR_SCHED_CORE, _PR_SCHED_CORE_CREATE, 0, _PIDTYPE_PGID, 0))


def _check(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
