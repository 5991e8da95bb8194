"""Hearing that the node's GPUs or their driver may have changed.

Rules
- What is heard is a reason to look, never what is believed: the inventory is compared with the
  node itself (:func:`hooks.engine.load_inventory`), however one came to look.
- The kernel announces devices and modules that come and go (uevents). Files of the driver and
  device nodes that are made by hand it tells by inotify, of their directories. MIG devices it does
  not announce, only the nodes that are made for them: for those, and for all that was missed, one
  looks again every now and then.
- A socket or a watch that cannot be had (a container without the host's network, a limit of
  inotify) leaves the slow look, and that is said.

Source: netlink(7), NETLINK_KOBJECT_UEVENT; kernel lib/kobject_uevent.c.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Final, Self

from integration.node.watcher import ANY, Interest, Watcher

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from types import TracebackType

_KOBJECT_UEVENT: Final = 15
_KERNEL: Final = 1  # the group that the kernel speaks to; udev's is another
_LONGEST: Final = 1 << 16

_QUIET: Final = 0.3

# Each container that starts or stops is announced a dozen times, by its network devices.
_ROOM: Final = 1 << 20


def _kernels_announcements() -> socket.socket:
    kind = socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
    uevents = socket.socket(socket.AF_NETLINK, kind, _KOBJECT_UEVENT)
    try:
        uevents.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _ROOM)
        uevents.bind((0, _KERNEL))
    except OSError:
        uevents.close()
        raise
    return uevents


class Changes:
    """What is heard of the node. To be entered; then :meth:`wait` as often as one likes.

    Args:
        announcements: opens a socket of the kernel's announcements, which does not block.
    """

    def __init__(self, announcements: Callable[[], socket.socket] = _kernels_announcements) -> None:
        self._open = announcements
        self._watcher = Watcher(_QUIET)
        self._uevents: socket.socket | None = None
        self._unannounced = ""

    def __enter__(self) -> Self:
        try:
            self._uevents = self._open()
        except OSError as error:
            self._unannounced = str(error.strerror)
        else:
            self._watcher.add(self._uevents.fileno(), self._read)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._watcher.__exit__(kind, error, traceback)
        if self._uevents is not None:
            self._uevents.close()

    @property
    def deaf(self) -> Mapping[str, str]:
        """What cannot be heard, and why."""
        why = {"announcements": self._unannounced, "files": self._watcher.deaf}
        return {what: line for what, line in why.items() if line}

    def listen_to(self, directories: Iterable[str], nodes: Iterable[str]) -> bool:
        """Hear of files that come, go or change in directories.

        Args:
            directories: all that matter now, in place of those before.
            nodes: the directories of device nodes, where what is written does not matter.

        Returns:
            Whether one of them was not heard until now: what has happened there is to be looked
            for once more.
        """
        wanted = dict.fromkeys(directories, ANY)
        return self._watcher.follow(wanted | dict.fromkeys(nodes, Interest(content=False)))

    async def wait(self, seconds: float) -> bool:
        """Wait for a change, and until the swarm that it came in is over.

        Args:
            seconds: to wait at most for its first.

        Returns:
            Whether there was one; False when the time is up.
        """
        return await self._watcher.wait(seconds)

    def _read(self) -> bool:
        """Take what was announced; whether any of it matters."""
        assert self._uevents is not None  # noqa: S101 - it is heard
        matters = False
        while True:
            try:
                matters |= concerns_gpus(self._uevents.recv(_LONGEST))
            except BlockingIOError:
                return matters
            except OSError:  # more was told than it could hold: something of it may have mattered
                matters = True


_WORDS: Final = (b"nvidia", b"DRIVER=nouveau", b"PCI_CLASS=3", b"\0SUBSYSTEM=drm\0")


def concerns_gpus(message: bytes) -> bool:
    """Whether an announcement of the kernel's may be of a GPU or of its driver.

    Args:
        message: ``ACTION@DEVPATH`` and KEY=VALUE strings, each ended by a zero byte.
    """
    return any(word in message for word in _WORDS)
