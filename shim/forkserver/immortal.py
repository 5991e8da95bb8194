"""Make what shims share immortal, so that none of them copies a page to count a reference.

A process that was forked shares a page until it writes to it, and Python writes to whatever it
looks at: it counts the references to each object in the object itself. From 3.12 on it leaves the
count of an immortal object alone. What the fork server has made before its first fork lives as
long as every shim, so it may as well be immortal: 4.1 MB of its own that an idle shim had became
2.2 MB. Python has no function for it; the count of ``None`` is what such an object's looks like.

Source: PEP 683; CPython 3.12 and 3.13, Include/object.h (``_Py_IMMORTAL_REFCNT``).
"""

from __future__ import annotations

import ctypes
import gc
import sys
from typing import Final

# Before, no object is immortal; later ones keep more than the count in the same place.
_KNOWN: Final = ((3, 12), (3, 13))
_LARGEST_COUNT: Final = 1 << 31


def is_possible() -> bool:
    """Whether this Python has immortal objects, and their form is known."""
    # A build without the global lock ("t") counts in two other places.
    return sys.version_info[:2] in _KNOWN and "t" not in sys.abiflags


def make_immortal() -> None:
    """Make every object that exists now immortal; nothing is done where it is not possible.

    To be called in a process with one thread, whose objects nobody needs freed.
    """
    if not is_possible():
        return
    immortal = ctypes.c_ssize_t.from_address(id(None)).value
    for address in _addresses():
        count = ctypes.c_ssize_t.from_address(address)
        if 0 < count.value < _LARGEST_COUNT:
            count.value = immortal


def _addresses() -> set[int]:
    """Where the objects are that the garbage collector knows, and those that they refer to."""
    waiting = gc.get_objects()
    found: set[int] = set()  # made after, so that neither of the two is found
    while waiting:
        each = waiting.pop()
        if id(each) not in found:
            found.add(id(each))
            waiting += gc.get_referents(each)
    return found
