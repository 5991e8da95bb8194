"""openat2(2): the one system call that can resolve a path inside a hostile tree.

A path of an image may contain links to anywhere, and another container may be renaming
directories below it at this moment. Only the kernel can resolve such a path without a gap
between looking and using. ``RESOLVE_IN_ROOT`` treats the given directory as "/" for
absolute links and for "..", ``RESOLVE_NO_MAGICLINKS`` refuses the links of procfs that lead
to wherever some descriptor points. The call came with Linux 5.6; an emulation in user space
would bring the gap back, so there is none.

Neither the standard library nor glibc 2.36 has a function for it: the number is 437 on every
architecture, and the call goes through syscall(2).

Source: openat2(2); Documentation/filesystems/path-lookup.rst of the kernel.
"""

from __future__ import annotations

import ctypes
import errno
import os
from typing import Final

__all__ = ["open_in_root"]

_SYS_OPENAT2: Final = 437
_RESOLVE_NO_MAGICLINKS: Final = 0x02
_RESOLVE_IN_ROOT: Final = 0x10

# The kernel answers EAGAIN when any rename or mount on the whole machine raced with a ".." of
# this path. A quiet machine needs one attempt; a neighbour who renames in a tight loop costs
# a handful. Whoever needs more than this is being played with.
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
    """Opens what ``path`` leads to when the directory ``root`` is "/".

    Args:
        root: descriptor of the directory that nothing may leave.
        path: a path below it; a leading "/" means ``root`` itself.
        flags: open(2) flags that create nothing; O_CLOEXEC is always added.

    Returns:
        A new descriptor, owned by the caller.

    Raises:
        OSError: as the kernel answers. EAGAIN only after many attempts.
        ValueError: ``path`` holds a NUL, at which C would cut it.
    """
    name = os.fsencode(path)
    if b"\0" in name:
        raise ValueError("embedded NUL in a path")
    how = _OpenHow(flags | os.O_CLOEXEC, 0, _RESOLVE_IN_ROOT | _RESOLVE_NO_MAGICLINKS)
    for _ in range(_ATTEMPTS):
        fd: int = _syscall(_SYS_OPENAT2, root, name or b".", how, ctypes.sizeof(how))
        if fd >= 0:
            return fd
        reason = ctypes.get_errno()
        if reason not in {errno.EAGAIN, errno.EINTR}:
            break
    raise OSError(reason, os.strerror(reason), path)
