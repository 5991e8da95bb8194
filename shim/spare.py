"""Descriptors that are kept for when there are none: a container must be possible to kill.

To signal what is in a cgroup takes two at once: one holds a process, one reads where it is.
"""

from __future__ import annotations

import os
from contextlib import contextmanager

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Final

_ENOUGH: Final = 2
_kept: list[int] = []


def keep() -> None:
    """Have as many as are needed, if there are so many."""
    try:
        while len(_kept) < _ENOUGH:
            _kept.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError:
        pass  # somebody else needs them; when they are given back is seen next time


@contextmanager
def lent() -> Iterator[None]:
    """Let what is done in this block, which waits for nothing, open that many at once."""
    while _kept:
        os.close(_kept.pop())
    try:
        yield
    finally:
        keep()
