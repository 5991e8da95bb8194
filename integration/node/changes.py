"""Hearing that the node's GPUs or their driver may have changed.

Rules
- What is heard is a reason to look, never what is believed: the inventory is compared with the
  node itself (:func:`hooks.engine.load_inventory`), however one came to look.
- The kernel announces devices and modules that come and go (uevents). Files of the driver and
  device nodes that are made by hand it tells by inotify, of their directories. MIG devices it does
  not announce, only the nodes that are made for them: for those, and for all that was missed, one
  looks again every now and then.
- Changes come in swarms (a driver's installation writes three hundred files). So the end of a
  swarm is waited for, but not for ever.
- A socket or a watch that cannot be had (a container without the host's network, a limit of
  inotify) leaves the slow look, and that is said; the watch is tried again after each look.

Source: netlink(7), NETLINK_KOBJECT_UEVENT; kernel lib/kobject_uevent.c; inotify(7).
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from typing import TYPE_CHECKING, Final, Self

import anyio

from integration.node import inotify
from shim import syscalls

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping
    from types import TracebackType

__all__ = ["Changes", "concerns_gpus"]

_KOBJECT_UEVENT: Final = 15
_KERNEL: Final = 1  # the group that the kernel speaks to; udev's is another
_LONGEST: Final = 1 << 16

# Seconds of silence after which a swarm is over, and how long one may last.
_QUIET: Final = 0.3
_LONGEST_SWARM: Final = 5.0

# Seconds in which what does not matter gathers: each container that begins or ends is announced a
# dozen times, by its network devices. There has to be room for it.
_BATCH: Final = 0.1
_ROOM: Final = 1 << 20


class Changes:
    """What has been heard. To be entered; then :meth:`wait` as often as one likes."""

    def __init__(self) -> None:
        self._deaf: dict[str, str] = {}
        self._uevents: socket.socket | None = None
        self._watch = -1
        self._watched: dict[str, tuple[int, int]] = {}

    def __enter__(self) -> Self:
        try:
            self._uevents = socket.socket(
                socket.AF_NETLINK,
                socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC,
                _KOBJECT_UEVENT,
            )
            self._uevents.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _ROOM)
            self._uevents.bind((0, _KERNEL))
        except OSError as error:
            self._deaf["announcements"] = str(error.strerror)
            self._close_uevents()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close_uevents()
        self._close_watch()

    @property
    def deaf(self) -> Mapping[str, str]:
        """What cannot be heard, and why."""
        return self._deaf

    def listen_to(self, directories: Iterable[str], nodes: Collection[str]) -> bool:
        """Hear of files that come, go or change in directories.

        Args:
            directories: all that matter now, in place of those before; one that is not there is
                left out.
            nodes: the directories of device nodes, where what is written does not matter.

        Returns:
            Whether one of them was not heard until now: what has happened there is to be looked
            for once more.
        """
        there = _identities((*directories, *nodes))
        if there == self._watched:
            return False
        self._close_watch()
        self._deaf.pop("files", None)
        try:
            self._watch = syscalls.inotify_init()
            for path, it in there.items():
                with contextlib.suppress(FileNotFoundError):
                    syscalls.inotify_watch_changes(self._watch, path, content=path not in nodes)
                    self._watched[path] = it
        except OSError as error:
            self._deaf["files"] = str(error.strerror)
            self._close_watch()
        return self._watch >= 0

    async def wait(self, seconds: float) -> bool:
        """Wait for a change, and until the swarm that it came in is over.

        Args:
            seconds: to wait at most for its first.

        Returns:
            Whether there was one; False when the time is up.
        """
        if not await self._one(seconds):
            return False
        with anyio.move_on_after(_LONGEST_SWARM):
            while await self._one(_QUIET):
                pass
        return True

    async def _one(self, seconds: float) -> bool:
        """Wait for something that matters; whether it came."""
        with anyio.move_on_after(seconds) as limit:
            heard = False
            while not heard:
                async with anyio.create_task_group() as tasks:
                    if self._uevents is not None:
                        tasks.start_soon(self._until_readable, self._uevents, tasks.cancel_scope)
                    if self._watch >= 0:
                        tasks.start_soon(self._until_readable, self._watch, tasks.cancel_scope)
                    if self._uevents is None and self._watch < 0:
                        await anyio.sleep_forever()
                heard = self._read()
                if not heard:
                    await anyio.sleep(_BATCH)
        return not limit.cancelled_caught

    @staticmethod
    async def _until_readable(what: socket.socket | int, scope: anyio.CancelScope) -> None:
        await anyio.wait_readable(what)
        scope.cancel()

    def _read(self) -> bool:
        """Take what was told; whether any of it matters."""
        matters = False
        while self._uevents is not None:
            try:
                message = self._uevents.recv(_LONGEST)
            except BlockingIOError:
                break
            except OSError:  # more was told than it could hold: something of it may have mattered
                matters = True
                continue
            matters = matters or concerns_gpus(message)
        if self._watch >= 0:
            for event in inotify.drain(self._watch):
                matters = True
                if event.ends:  # what is there now may have the same number
                    self._watched = {}
        return matters

    def _close_uevents(self) -> None:
        if self._uevents is not None:
            self._uevents.close()
            self._uevents = None

    def _close_watch(self) -> None:
        if self._watch >= 0:
            os.close(self._watch)
        self._watch = -1
        self._watched = {}


def _identities(directories: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Those that are there, and which they are: one that was replaced is another."""
    found = {}
    for path in directories:
        with contextlib.suppress(OSError):
            seen = os.stat(path)
            if stat.S_ISDIR(seen.st_mode):
                found[path] = (seen.st_dev, seen.st_ino)
    return found


_WORDS: Final = (b"nvidia", b"DRIVER=nouveau", b"PCI_CLASS=3", b"\0SUBSYSTEM=drm\0")


def concerns_gpus(message: bytes) -> bool:
    """Whether an announcement of the kernel's may be of a GPU or of its driver.

    Args:
        message: ``ACTION@DEVPATH`` and KEY=VALUE strings, each ended by a zero byte.
    """
    return any(word in message for word in _WORDS)
