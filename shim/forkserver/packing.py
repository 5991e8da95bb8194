"""Fill the holes in the memory that shims will share, so that each copies few pages of it.

A process that was forked shares a page until it writes to it, and then has 4096 bytes of its own.
What a shim allocates would lie in the free places between what was imported: of 1400 pages that a
shim copied, two thirds had less than 64 bytes changed. So the fork server fills these places before
its first fork, and the objects of a shim lie together in new pages. Shims share what fills them.

Source: CPython 3.11 Objects/obmalloc.c (pools of 16 KiB, blocks of up to 512 bytes); mallinfo(3).
"""

from __future__ import annotations

import ctypes
from typing import Final

# Blocks of Python's allocator: their sizes, and a pool of them with its header.
_BLOCK: Final = 16
_LARGEST_BLOCK: Final = 512
_POOL: Final = 1 << 14
_POOL_HEADER: Final = 48

# What bytes have besides their content, and malloc's chunks besides theirs.
_BYTES_HEADER: Final = bytes.__basicsize__
_CHUNK_HEADER: Final = 16
# Of one size of blocks; where Python has another allocator, nothing tells where a pool starts.
_MOST_BYTES: Final = 1 << 20
# Holes larger than this are few, and are used for large objects.
_LARGEST_HOLE: Final = 1 << 16

_fillers: list[bytes] = []


class _MallocInfo(ctypes.Structure):
    """Struct mallinfo2 of glibc."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
            "fordblks", "keepcost",
        )
    )  # fmt: skip


def fill_holes() -> None:
    """Fill the free memory between objects."""
    for size in range(_BYTES_HEADER // _BLOCK * _BLOCK + _BLOCK, _LARGEST_BLOCK + 1, _BLOCK):
        _fill_pools(size)
    _fill_heap()


def _fill_pools(size: int) -> None:
    """Fill the free blocks of a size, until one is the first of a new pool."""
    length = size - _BYTES_HEADER
    previous = bytes(length)
    for _ in range(_MOST_BYTES // size):
        block = bytes(length)
        is_first = id(previous) % _POOL == _POOL_HEADER
        if is_first and id(block) == id(previous) + size:
            return
        _fillers.append(previous)
        previous = block


def _fill_heap() -> None:
    """Fill the free chunks of malloc, the largest first, until a chunk is of the heap's end."""
    libc = ctypes.CDLL(None)
    try:
        info, end = libc.mallinfo2, libc.sbrk
    except AttributeError:
        return  # not glibc from 2.33 on
    info.restype, end.restype = _MallocInfo, ctypes.c_void_p
    sizes = [_LARGEST_HOLE >> shift for shift in range(7)]
    for size in (*sizes, *range(2 * _LARGEST_BLOCK, _LARGEST_BLOCK, -_BLOCK)):
        while (state := info()).fordblks - state.keepcost > size:
            filler = bytes(size - _BYTES_HEADER)
            if id(filler) + _CHUNK_HEADER > end(0) - state.keepcost:
                break
            _fillers.append(filler)
