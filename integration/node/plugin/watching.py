"""Hearing that something of a directory has changed, also of one that is not there yet.

Rules
- Of a directory that is missing, the nearest that is there is watched, until the next part of the
  path appears. So nothing is looked at every so often.
- What is heard is a reason to look; whoever waits looks once more after each new watch, since what
  has happened before it was not heard.
- Without inotify (its limits are used up) one looks every moment: a kubelet that restarts does not
  wait.

Source: inotify(7).
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING, Final, Self

import anyio

from integration.node import inotify
from shim import syscalls

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Directory", "socket_identity"]

_UNHEARD: Final = 0.25

# Events come in swarms, which are one reason to look.
_SWARM: Final = 0.05
_LONGEST_SWARM: Final = 1.0


class Directory:
    """A directory that is watched. To be entered; then :meth:`change` as often as one likes.

    Args:
        path: of it; it need not be there.
        quiet: seconds without a change, after one, until it is told of; 0 to be told at once.
    """

    def __init__(self, path: str, *, quiet: float = _SWARM) -> None:
        self._path = os.path.abspath(path)
        self._quiet = quiet
        self._watch = -1
        self._watched: tuple[int, int] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    async def change(self) -> None:
        """Wait until there is a reason to look."""
        if self._arm():
            return
        if self._watch < 0:
            await anyio.sleep(_UNHEARD)
            return
        await anyio.wait_readable(self._watch)
        begun = anyio.current_time()
        heard = self._drain()
        while self._quiet and heard and anyio.current_time() - begun < _LONGEST_SWARM:
            await anyio.sleep(self._quiet)
            heard = self._drain()

    def _drain(self) -> bool:
        """Take what was told; whether there was anything."""
        events = inotify.drain(self._watch)
        if any(event.ends for event in events):  # what is there now may have the same number
            self._watched = None
        return bool(events)

    def listen(self) -> None:
        """Begin to hear, so that :meth:`change` tells of what happens from now on."""
        self._arm()

    def _arm(self) -> bool:
        """Watch the directory, or what there is of its path; whether it was not watched so far."""
        place = self._path
        while True:
            try:
                seen = os.stat(place)
                if stat.S_ISDIR(seen.st_mode):
                    break
            except OSError:
                pass
            if place == "/":
                return False
            place = os.path.dirname(place)
        identity = (seen.st_dev, seen.st_ino)
        if identity == self._watched:
            return False
        self._close()
        try:
            self._watch = syscalls.inotify_init()
            syscalls.inotify_watch_changes(self._watch, place)
        except OSError:
            self._close()
            return False
        self._watched = identity
        return True

    def _close(self) -> None:
        if self._watch >= 0:
            os.close(self._watch)
        self._watch = -1
        self._watched = None


def socket_identity(path: str) -> tuple[int, int, int] | None:
    """Which socket is at a path: one that was made anew is another; None if none is there."""
    try:
        seen = os.stat(path)
    except OSError:
        return None
    if not stat.S_ISSOCK(seen.st_mode):
        return None
    # The number of a file that is gone may be that of the next.
    return seen.st_dev, seen.st_ino, seen.st_ctime_ns
