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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from integration.watcher import Watcher

_KOBJECT_UEVENT: Final = 15
_KERNEL: Final = 1  # the group that the kernel speaks to; udev's is another
_LONGEST: Final = 1 << 16

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


@contextmanager
def announced(
    watcher: Watcher, listen: Callable[[], socket.socket] = _kernels_announcements
) -> Iterator[str]:
    """Have a watcher hear what the kernel announces, as long as this lasts.

    Args:
        listen: opens a socket of the kernel's announcements, which does not block.

    Returns:
        Why that cannot be heard; "" if it is.
    """
    try:
        uevents = listen()
    except OSError as error:
        yield str(error.strerror)
        return
    with uevents:
        watcher.add(uevents.fileno(), partial(_read, uevents))
        yield ""


def _read(uevents: socket.socket) -> bool:
    """Take what was announced; whether any of it matters."""
    matters = False
    while True:
        try:
            matters |= concerns_gpus(uevents.recv(_LONGEST))
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
