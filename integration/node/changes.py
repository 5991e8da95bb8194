"""Receive uevents, by which the kernel announces that GPUs or their driver may have changed.

Rules
- A uevent is only a reason to read the node again. In each round the agent compares the inventory
  with the node itself (:func:`hooks.engine.load_inventory`).
- The kernel announces devices and modules that appear and disappear. inotify reports changes of the
  driver's files, and device nodes that were created by hand. MIG devices cause no uevents, only
  their device nodes do. For MIG devices, and because events may get lost, the agent also reads the
  node at intervals.
- If the socket or a watch is not available (a container without the host's network, inotify's
  limit), the agent only polls, and logs that.

Source: netlink(7), NETLINK_KOBJECT_UEVENT; kernel lib/kobject_uevent.c.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final

from integration.watcher import Watcher

_KOBJECT_UEVENT: Final = 15
_KERNEL: Final = 1  # the multicast group of the kernel; udev has another
_LONGEST: Final = 1 << 16

# Bytes. Each container that starts or stops causes a dozen uevents, by its network devices.
_ROOM: Final = 1 << 20


def _uevent_socket() -> socket.socket:
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
    watcher: Watcher, listen: Callable[[], socket.socket] = _uevent_socket
) -> Iterator[str]:
    """Wake a watcher on uevents until the context ends.

    Args:
        listen: opens a non-blocking socket that receives uevents.

    Returns:
        Why uevents are not available; "" if they are.
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
    """Read all waiting uevents, and return whether any concerns GPUs."""
    matters = False
    while True:
        try:
            matters |= concerns_gpus(uevents.recv(_LONGEST))
        except BlockingIOError:
            return matters
        except OSError:  # the buffer overflowed, and a lost uevent may have mattered
            matters = True


_WORDS: Final = (b"nvidia", b"DRIVER=nouveau", b"PCI_CLASS=3", b"\0SUBSYSTEM=drm\0")


def concerns_gpus(message: bytes) -> bool:
    """Return whether a uevent may be about a GPU or its driver.

    Args:
        message: ``ACTION@DEVPATH`` and KEY=VALUE strings, each followed by a zero byte.
    """
    return any(word in message for word in _WORDS)
