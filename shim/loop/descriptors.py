"""Which task waits for which descriptor, and which function is called for which.

A task waits once: its descriptor is registered with EPOLLONESHOT, which leaves it in epoll but
silent afterwards. A watched descriptor stays armed, level-triggered, until it is unwatched; its
owner unwatches it before closing it.

Descriptors that tasks wait for may be closed and reused by other code without notice, so what
epoll was told about them is never trusted:

- A number that was closed and is another file now is unknown to epoll; it is registered anew.
- A description that another process or a duplicate keeps open stays in epoll when its number is
  closed here. It may fire once more under a number that means another file by then: a task that
  waits for that file may be woken once without cause.

Source: epoll(7), "Will closing a file descriptor cause it to be removed from all epoll interest
lists?"; epoll_ctl(2).
"""

from __future__ import annotations

import select
from typing import TYPE_CHECKING, Final, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

Waiter = TypeVar("Waiter")

READ: Final = select.EPOLLIN | select.EPOLLRDHUP
WRITE: Final = select.EPOLLOUT
# An end of file and an error wake readers and writers alike.
ENDS: Final = select.EPOLLHUP | select.EPOLLERR

# Seconds. epoll takes a timeout of at most 2**31 milliseconds.
_LONGEST: Final = 2e6


class _Waits(Generic[Waiter]):
    """The waiters of one descriptor."""

    __slots__ = ("reader", "writer")

    def __init__(self) -> None:
        self.reader: Waiter | None = None
        self.writer: Waiter | None = None


class Descriptors(Generic[Waiter]):
    """See the module."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._waits: dict[int, _Waits[Waiter]] = {}
        # The numbers that epoll has seen; perhaps as other files.
        self._seen: set[int] = set()
        self.watched: dict[int, Callable[[int], object]] = {}

    def close(self) -> None:
        """Close the epoll descriptor."""
        self._epoll.close()

    def watch(self, fd: int, function: Callable[[int], object], events: int = READ) -> None:
        """Call a function with the events whenever a descriptor is ready.

        Args:
            fd: the descriptor. If it is watched already, the function and the events change.
            function: called once per turn while the descriptor is ready.
            events: of epoll. Errors and hangups are always among them.

        Raises:
            OSError: it cannot be polled.
        """
        if fd in self.watched:
            self._epoll.modify(fd, events)
        else:
            self._epoll.register(fd, events)
        self.watched[fd] = function

    def unwatch(self, fd: int) -> None:
        """Stop calling the function. Call this before closing the descriptor."""
        if self.watched.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def poll(self, patience: float | None) -> list[tuple[int, int]]:
        """Wait until some descriptors are ready.

        Args:
            patience: the timeout in seconds; None for no timeout. Very long ones are cut short.

        Returns:
            Pairs of descriptor and events.
        """
        return self._epoll.poll(None if patience is None else min(patience, _LONGEST))

    def wait(self, fd: int, waiter: Waiter, *, writing: bool) -> None:
        """Have :meth:`ready` return a waiter once when a descriptor is ready.

        Raises:
            OSError: it is closed, or (EPERM) a regular file, which is always ready.
            RuntimeError: another task waits for the same side.
            ValueError: it is negative, as that of a closed socket is.
        """
        if fd < 0:
            message = "wait for a descriptor that is closed"
            raise ValueError(message)
        waits = self._waits.get(fd)
        if waits is None:
            waits = self._waits[fd] = _Waits()
        if (waits.writer if writing else waits.reader) is not None:
            message = f"two tasks wait for descriptor {fd}"
            raise RuntimeError(message)
        if writing:
            waits.writer = waiter
        else:
            waits.reader = waiter
        try:
            self._arm(fd, waits)
        except OSError:
            self._remove(fd, waits, writing=writing)
            raise

    def forget(self, fd: int, *, writing: bool) -> None:
        """Remove the waiter of one side."""
        waits = self._waits[fd]
        self._remove(fd, waits, writing=writing)
        try:
            if fd in self._waits:
                self._arm(fd, waits)
            else:
                self._seen.discard(fd)
                self._epoll.unregister(fd)
        except OSError:
            pass  # closed meanwhile

    def _remove(self, fd: int, waits: _Waits[Waiter], *, writing: bool) -> None:
        if writing:
            waits.writer = None
        else:
            waits.reader = None
        if waits.reader is None and waits.writer is None:
            del self._waits[fd]

    def _arm(self, fd: int, waits: _Waits[Waiter]) -> None:
        wanted = select.EPOLLONESHOT
        if waits.reader is not None:
            wanted |= READ
        if waits.writer is not None:
            wanted |= WRITE
        if fd in self._seen:
            try:
                self._epoll.modify(fd, wanted)
            except FileNotFoundError:
                pass  # another file has the number now
            else:
                return
        try:
            self._epoll.register(fd, wanted)
        except FileExistsError:  # closed without being unregistered, and open again
            self._epoll.modify(fd, wanted)
        self._seen.add(fd)

    def ready(self, fd: int, events: int) -> list[Waiter]:
        """Remove and return the waiters that an event of :meth:`poll` wakes."""
        waits = self._waits.get(fd)
        if waits is None:
            return []
        woken = []
        if waits.reader is not None and events & (READ | ENDS):
            woken.append(waits.reader)
            waits.reader = None
        if waits.writer is not None and events & (WRITE | ENDS):
            woken.append(waits.writer)
            waits.writer = None
        left = waits.reader or waits.writer
        if left is not None:
            try:
                self._arm(fd, waits)
            except OSError:  # closed meanwhile: the waiter finds out when it tries
                woken.append(left)
                left = None
        if left is None:
            del self._waits[fd]
        return woken
