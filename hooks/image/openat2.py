"""openat2(2): the only system call that can resolve a path inside a hostile tree.

A path in an image may contain links to anywhere, and another container may be renaming directories
on it. Only the kernel can resolve such a path without a gap between check and use.
``RESOLVE_IN_ROOT`` treats the given directory as "/" for absolute links and for "..", and
``RESOLVE_NO_MAGICLINKS`` refuses the links of procfs, which lead to whatever a descriptor refers
to. Linux 5.6 added the call. An emulation in user space would reintroduce the gap, so there is
none.

The standard library and glibc 2.36 have no function for it. Its number is 437 on every
architecture, and the call goes through syscall(2).

Source: openat2(2); Documentation/filesystems/path-lookup.rst of the kernel.
"""

from __future__ import annotations

import ctypes
import errno
import os
from typing import Final

_SYS_OPENAT2: Final = 437
_RESOLVE_NO_XDEV: Final = 0x01
_RESOLVE_NO_MAGICLINKS: Final = 0x02
_RESOLVE_NO_SYMLINKS: Final = 0x04
_RESOLVE_BENEATH: Final = 0x08
_RESOLVE_IN_ROOT: Final = 0x10

# The kernel answers EAGAIN if a rename or mount anywhere on the machine raced with a ".." in this
# path. On a quiet machine one attempt is enough, and a neighbour that renames in a tight loop costs
# a handful. More than this is an attack.
_ATTEMPTS: Final = 256


class _OpenHow(ctypes.Structure):
    """struct open_how of <linux/openat2.h>."""

    _fields_ = (
        ("flags", ctypes.c_uint64),
        ("mode", ctypes.c_uint64),
        ("resolve", ctypes.c_uint64),
    )


_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.restype = ctypes.c_long
_syscall.argtypes = (
    ctypes.c_long,
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.POINTER(_OpenHow),
    ctypes.c_size_t,
)


def open_in_root(root: int, path: str, flags: int) -> int:
    """Open what ``path`` leads to with the directory ``root`` as "/"; return a descriptor.

    Args:
        root: a descriptor of the directory that the path must not leave.
        path: a path below it; a leading "/" means ``root`` itself.
        flags: open(2) flags that create nothing; O_CLOEXEC is always added.

    Raises:
        OSError: the kernel's error. EAGAIN only after many attempts.
        ValueError: ``path`` contains a NUL, which would end it in C.
    """
    return _open(root, path, flags, _RESOLVE_IN_ROOT | _RESOLVE_NO_MAGICLINKS)


def open_without_links(root: int, path: str, flags: int, *, one_mount: bool = False) -> int:
    """Open ``path`` below a directory, refusing links on the way; return a descriptor.

    Args:
        root: a descriptor of the directory.
        one_mount: whether to refuse mounts on the way, or at the end, too.

    Raises:
        OSError: the kernel's error: ELOOP for a link, EXDEV for a mount.
        ValueError: ``path`` contains a NUL.
    """
    resolve = _RESOLVE_BENEATH | _RESOLVE_NO_SYMLINKS | _RESOLVE_NO_MAGICLINKS
    return _open(root, path, flags, resolve | (_RESOLVE_NO_XDEV if one_mount else 0))


def _open(root: int, path: str, flags: int, resolve: int) -> int:
    name = os.fsencode(path)
    if b"\0" in name:
        raise ValueError("embedded NUL in a path")
    how = _OpenHow(flags | os.O_CLOEXEC, 0, resolve)
    for _ in range(_ATTEMPTS):
        fd: int = _syscall(_SYS_OPENAT2, root, name or b".", how, ctypes.sizeof(how))
        if fd >= 0:
            return fd
        reason = ctypes.get_errno()
        if reason not in {errno.EAGAIN, errno.EINTR}:
            break
    raise OSError(reason, os.strerror(reason), path)
