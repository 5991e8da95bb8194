"""Spare descriptors, so that a container can be killed when none is free.

To signal the processes of a cgroup takes two at once: a pidfd, and one to read /proc.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

_ENOUGH: Final = 2
_kept: list[int] = []


def keep() -> None:
    """Open as many as are needed, as far as there are any."""
    try:
        while len(_kept) < _ENOUGH:
            _kept.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError:
        pass  # none is free; tried again at the next use


@contextmanager
def lent() -> Iterator[None]:
    """Free them for the block, which must not wait for anything."""
    while _kept:
        os.close(_kept.pop())
    try:
        yield
    finally:
        keep()
