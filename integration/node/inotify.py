"""What inotify has told: each event, and what it means for the watches.

A watch ends with its directory, and the kernel says so (``IN_IGNORED``). A directory that is made
in its place may have its path and its number, so nothing else tells that it is not watched. After
more events than the queue holds, that may have been among those that were lost.

Source: inotify(7).
"""

from __future__ import annotations

import contextlib
import os
import struct
from typing import Final, NamedTuple

__all__ = ["Event", "drain"]

# struct inotify_event: wd, mask, cookie, len; then the name.
_EVENT: Final = struct.Struct("iIII")
_OVERFLOW: Final = 0x4000
_IGNORED: Final = 0x8000
_LONGEST: Final = 1 << 16


class Event(NamedTuple):
    """Something that has happened.

    Attributes:
        watch: of which directory; -1 if events were lost.
        name: of the file in it; "" for the directory itself.
        ends: whether the watch is no more, or, if events were lost, any may be.
    """

    watch: int
    name: str
    ends: bool


def drain(fd: int) -> list[Event]:
    """Everything that was told until now.

    Args:
        fd: of inotify; it does not block.
    """
    events = []
    with contextlib.suppress(BlockingIOError):
        while told := os.read(fd, _LONGEST):
            at = 0
            while at + _EVENT.size <= len(told):
                watch, mask, _, length = _EVENT.unpack_from(told, at)
                at += _EVENT.size
                name = os.fsdecode(told[at : at + length].rstrip(b"\0"))
                events.append(Event(watch, name, bool(mask & (_OVERFLOW | _IGNORED))))
                at += length
    return events
