"""Let shims share memory with the fork server: the less they write, the less they copy.

A forked process shares a page until it writes to it; then it gets its own copy of 4096 bytes.

- Code that is executed is written to (:mod:`shim.forkserver.executed_code`).
- A shim's new objects would go into the gaps between imported ones: two thirds of the 1400 pages
  that a shim copied had less than 64 changed bytes. So the fork server fills these gaps before its
  first fork, and a shim's objects go together into new pages. All shims share the filling.
- Python writes to every object that it uses, because the reference count is in the object itself.
  From 3.12 on it does not change the count of an immortal object. Objects from before the fork
  server's first fork live as long as every shim, so they can be immortal: this reduced the private
  memory of an idle shim from 4.1 MB to 2.2 MB. Python has no function for this; the count of
  ``None`` shows the value for an immortal object.

Source: CPython 3.11 Objects/obmalloc.c (pools of 16 KiB, blocks of up to 512 bytes, and what
pymalloc_free does with other memory), Doc/c-api/memory.rst (PyMemAllocatorEx); mallinfo(3);
PEP 683; CPython 3.12 and 3.13, Include/object.h (``_Py_IMMORTAL_REFCNT``).
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

# Blocks of Python's allocator: their sizes, and a pool of them with its header.
_BLOCK: Final = 16
_LARGEST_BLOCK: Final = 512
_POOL: Final = 1 << 14
_POOL_HEADER: Final = 48

# The overhead of bytes objects, and of malloc's chunks.
_BYTES_HEADER: Final = bytes.__basicsize__
_CHUNK_HEADER: Final = 16
# The most bytes in blocks of one size, since another allocator has no pools to reach.
_MOST_BYTES: Final = 1 << 20
# Larger holes are few, and hold large objects.
_LARGEST_HOLE: Final = 1 << 16

# A code object is larger.
_SMALLEST_CODE: Final = 128

# PyMemAllocatorDomain.
_RAW: Final = 0
_OBJECTS: Final = 2

# Older versions have no immortal objects; newer ones keep more than the count in its place.
_KNOWN: Final = ((3, 12), (3, 13))
_LARGEST_COUNT: Final = 1 << 31

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
    sizes = [_LARGEST_HOLE >> shift for shift in range(7)]
    _fill_heap((*sizes, *range(2 * _LARGEST_BLOCK, _LARGEST_BLOCK, -_BLOCK)))


def _fill_pools(size: int) -> None:
    """Fill the free blocks of a size, until one starts a new pool."""
    length = size - _BYTES_HEADER
    previous = bytes(length)
    for _ in range(_MOST_BYTES // size):
        block = bytes(length)
        is_first = id(previous) % _POOL == _POOL_HEADER
        if is_first and id(block) == id(previous) + size:
            return
        _fillers.append(previous)
        previous = block


def _fill_heap(sizes: Iterable[int]) -> None:
    """Fill the free chunks of malloc with chunks of these sizes, until one is at the heap's end."""
    libc = ctypes.CDLL(None)
    try:
        info, end = libc.mallinfo2, libc.sbrk
    except AttributeError:
        return  # not glibc 2.33 or later
    info.restype, end.restype = _MallocInfo, ctypes.c_void_p
    for size in sizes:
        while (state := info()).fordblks - state.keepcost > size:
            filler = bytes(size - _BYTES_HEADER)
            if id(filler) + _CHUNK_HEADER > end(0) - state.keepcost:
                break
            _fillers.append(filler)


class _Allocator(ctypes.Structure):
    """Struct PyMemAllocatorEx."""

    _fields_ = tuple(
        (name, ctypes.c_void_p) for name in ("ctx", "malloc", "calloc", "realloc", "free")
    )


@contextmanager
def side_by_side() -> Iterator[None]:
    """Allocate new objects with malloc, which places them side by side whatever their sizes.

    Python's allocator has separate pools for each size. It hands what is not in a pool to free(3),
    so these objects need no care afterwards.
    """
    usual, other = _Allocator(), _Allocator()
    ctypes.pythonapi.PyMem_GetAllocator(_OBJECTS, ctypes.byref(usual))
    ctypes.pythonapi.PyMem_GetAllocator(_RAW, ctypes.byref(other))
    # A build without the global lock, or one that checks its allocations, does not do that.
    if "t" in sys.abiflags or usual.ctx or other.ctx:
        yield
        return
    other.realloc, other.free = usual.realloc, usual.free
    ctypes.pythonapi.PyMem_SetAllocator(_OBJECTS, ctypes.byref(other))
    try:
        _fill_heap(range(_LARGEST_BLOCK, _SMALLEST_CODE, -_BLOCK))
        yield
    finally:
        ctypes.pythonapi.PyMem_SetAllocator(_OBJECTS, ctypes.byref(usual))


def is_possible() -> bool:
    """Whether this Python has immortal objects, and their form is known."""
    # A build without the global lock ("t") has two counts, in other places.
    return sys.version_info[:2] in _KNOWN and "t" not in sys.abiflags


def make_immortal() -> None:
    """Make all existing objects immortal, if that is possible.

    Call this in a process with one thread, whose objects need not be freed.
    """
    if not is_possible():
        return
    immortal = ctypes.c_ssize_t.from_address(id(None)).value
    for address in _addresses():
        count = ctypes.c_ssize_t.from_address(address)
        if 0 < count.value < _LARGEST_COUNT:
            count.value = immortal


def _addresses() -> set[int]:
    """Return the addresses of the objects that the collector tracks, and of their referents."""
    waiting = gc.get_objects()
    found: set[int] = set()  # created afterwards, so that neither includes it
    while waiting:
        each = waiting.pop()
        if id(each) not in found:
            found.add(id(each))
            waiting += gc.get_referents(each)
    return found
