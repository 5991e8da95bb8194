"""Reserved descriptors, so that a container can be killed even if no descriptor is free.

Signalling the processes of a cgroup takes two at once: a pidfd, and one to read /proc.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_ENOUGH: Final = 2
_kept: list[int] = []


def fill() -> None:
    """Open the needed descriptors; fewer if none is free."""
    try:
        while len(_kept) < _ENOUGH:
            _kept.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError:
        pass  # the next use tries again


@contextmanager
def released() -> Iterator[None]:
    """Close them during the block, which must not wait for anything."""
    while _kept:
        os.close(_kept.pop())
    try:
        yield
    finally:
        fill()
