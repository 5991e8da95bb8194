"""Who waits for which descriptor.

Each wait is one system call: descriptors are registered with EPOLLONESHOT, which leaves them in
epoll when they were ready, but silent. What holds of them can change without a word from those who
close and open files, so nothing of what epoll was told is relied upon:

- A number that was closed and is another file now is unknown to epoll; it is registered anew.
- A description that somebody else still has open (a child, a duplicate) stays in epoll when its
  number here is closed. It can be ready once more, under a number that means something else by
  then: who waits for that may be woken for nothing, once, and the others not at all.

Source: epoll(7), "Will closing a file descriptor cause it to be removed from all epoll interest
lists?"; epoll_ctl(2).
"""

from __future__ import annotations

import select

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

    from api.aio.loop import Task

_READ: Final = select.EPOLLIN | select.EPOLLRDHUP
_WRITE: Final = select.EPOLLOUT
# An end and an error are news for both who would read and who would write.
_ENDS: Final = select.EPOLLHUP | select.EPOLLERR

# Seconds. Of more than 2**31 milliseconds epoll cannot be asked to wait.
_LONGEST: Final = 2e6


class _Waits:
    """Who waits for one of them."""

    __slots__ = ("reader", "writer")

    def __init__(self) -> None:
        self.reader: Task | None = None
        self.writer: Task | None = None


class Descriptors:
    """See the module."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._waits: dict[int, _Waits] = {}
        # The numbers that epoll has seen; perhaps as other files.
        self._seen: set[int] = set()

    def close(self) -> None:
        """Release what it has of the kernel."""
        self._epoll.close()

    def watch(self, fd: int) -> None:
        """Have :meth:`poll` tell of a descriptor whenever it can be read, whoever waits."""
        self._epoll.register(fd, select.EPOLLIN)

    def poll(self, patience: float | None) -> list[tuple[int, int]]:
        """Wait until some are ready.

        Args:
            patience: for how long, in seconds; None for as long as it takes. Much is cut short.

        Returns:
            Which, each with its events.
        """
        return self._epoll.poll(None if patience is None else min(patience, _LONGEST))

    def wait(self, fd: int, task: Task, *, writing: bool) -> None:
        """Have a task woken when a descriptor is ready.

        Raises:
            OSError: it is none, or (EPERM) one that is always ready: a regular file.
            RuntimeError: another task waits for the same.
            ValueError: it is negative, as that of a closed socket is.
        """
        if fd < 0:
            message = "to wait for a descriptor that is closed"
            raise ValueError(message)
        waits = self._waits.get(fd)
        if waits is None:
            waits = self._waits[fd] = _Waits()
        if (waits.writer if writing else waits.reader) is not None:
            message = f"two tasks wait for descriptor {fd}"
            raise RuntimeError(message)
        if writing:
            waits.writer = task
        else:
            waits.reader = task
        try:
            self._arm(fd, waits)
        except OSError:
            self._leave(fd, waits, writing=writing)
            raise

    def forget(self, fd: int, *, writing: bool) -> None:
        """Do not wake the task that waits for it."""
        waits = self._waits[fd]
        self._leave(fd, waits, writing=writing)
        try:
            if fd in self._waits:
                self._arm(fd, waits)
            else:
                self._seen.discard(fd)
                self._epoll.unregister(fd)
        except OSError:
            pass  # closed meanwhile

    def _leave(self, fd: int, waits: _Waits, *, writing: bool) -> None:
        if writing:
            waits.writer = None
        else:
            waits.reader = None
        if waits.reader is None and waits.writer is None:
            del self._waits[fd]

    def _arm(self, fd: int, waits: _Waits) -> None:
        wanted = select.EPOLLONESHOT
        if waits.reader is not None:
            wanted |= _READ
        if waits.writer is not None:
            wanted |= _WRITE
        if fd in self._seen:
            try:
                self._epoll.modify(fd, wanted)
            except FileNotFoundError:
                pass  # another file has the number now
            else:
                return
        try:
            self._epoll.register(fd, wanted)
        except FileExistsError:  # it was closed when it should have been taken out, and is back
            self._epoll.modify(fd, wanted)
        self._seen.add(fd)

    def ready(self, fd: int, events: int) -> list[Task]:
        """Take out those for whom an event of :meth:`poll` is news.

        Returns:
            Those to wake.
        """
        waits = self._waits.get(fd)
        if waits is None:
            return []
        woken = []
        if waits.reader is not None and events & (_READ | _ENDS):
            woken.append(waits.reader)
            waits.reader = None
        if waits.writer is not None and events & (_WRITE | _ENDS):
            woken.append(waits.writer)
            waits.writer = None
        left = waits.reader or waits.writer
        if left is not None:
            try:
                self._arm(fd, waits)
            except OSError:  # closed meanwhile: whoever is left finds out when it is tried
                woken.append(left)
                left = None
        if left is None:
            del self._waits[fd]
        return woken
