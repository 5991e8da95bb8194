"""Learning that a container has run out of memory, when it happens.

Rules
- What is told is that the kernel has killed a process of the container for want of memory (or,
  where the kernel is told not to kill, that its processes stand still): the counters say so. The
  kernel's signal is only the reason to look at them.
- Version 1 signals an eventfd *before* it kills, also for an ancestor's limit, and once more when
  the cgroup is removed. So a signal without a new kill means to look again a moment later, a few
  times; after that it was another container's, or the next look finds it.
- Version 2 marks memory.events as changed. Its open file is watched for that by an epoll of its
  own, which is readable to whoever watches many things. (An inotify would do it as well, but a
  user has 128 of them by default: as many as a node has pods.)
- The counters are looked at a last time when init has ended. If the cgroup has gone by then, as
  systemd removes it when it is empty: version 1 has counted its signals, and one of them was the
  removal; version 2 has counted the kill for the parent too, which still is there.
- A cgroup that is gone signals for ever, or never: it is not watched any more.

Source: kernel Documentation/admin-guide/cgroup-v1/memory.rst (9, 10), cgroup-v2.rst
(memory.events); epoll(7); kernel mm/memcontrol-v1.c, fs/kernfs/file.c.
"""

from __future__ import annotations

import errno
import itertools
import os
import select

from api import aio

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Final, Protocol

    from shim.cgroup import Cgroup
else:
    Protocol = object

_EVENTS: Final = "memory.events"
_CONTROL: Final = "memory.oom_control"
_KILLS: Final = "oom_kill"

_LIMIT: Final = 4096

# A container that may make cgroups of its own could make looking at them a long work.
_MOST_BELOW: Final = 500

# Seconds after a signal that came without a kill. The kernel has the victim by then, or its
# memory is being given back by others.
_AGAIN: Final = (0.02, 0.1, 0.5)


class OomWatch(Protocol):
    """Watches one container.

    Attributes:
        over: there is nothing to watch any more.
        unsure: there was a signal, and no kill yet that it could have been for.
    """

    over: bool
    unsure: bool

    def fileno(self) -> int:
        """What becomes readable when there is a reason to look."""

    def news(self, *, init_killed: bool = False) -> bool:
        """Look whether the container has run out of memory since the last look.

        Args:
            init_killed: its init was killed by SIGKILL, by whomever. Only then are the traces
                believed that a cgroup leaves when it has gone.
        """

    def forget(self) -> None:
        """The signals so far were for another container."""

    def close(self) -> None:
        """Stop watching. Looks are still answered."""


def watch(cgroup: Cgroup | None) -> OomWatch | None:
    """Begin to watch a container.

    Args:
        cgroup: the container's.

    Returns:
        The watch; None if the container's memory is not counted.

    Raises:
        OSError: the kernel refuses (no descriptor is free).
    """
    directory = cgroup.directory("memory") if cgroup is not None else None
    if cgroup is None or directory is None:
        return None
    try:
        return WatchV2(directory) if cgroup.is_v2 else WatchV1(directory)
    except FileNotFoundError:
        return None  # the controller is not enabled there, or init is gone already


async def follow(watch: OomWatch, tell: Callable[[], None]) -> None:
    """Tell each time that a container runs out of memory, until its cgroup goes; then close.

    Args:
        watch: the container's.
        tell: called when it has; for several kills at once, once.
    """
    try:
        while not watch.over:
            await aio.wait_readable(watch.fileno())
            if watch.news():
                tell()
            for pause in _AGAIN:
                if not watch.unsure:
                    break
                await aio.sleep(pause)
                if watch.news():
                    tell()
            if not watch.over:
                watch.forget()
    finally:
        watch.close()


class WatchV1:
    """A watch on cgroup version 1; see :class:`OomWatch`.

    Args:
        directory: the container's in the memory hierarchy.
    """

    def __init__(self, directory: str) -> None:
        self.over = False
        self.unsure = False
        self._directory = directory
        self._signals = 0
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            control = os.open(os.path.join(directory, _CONTROL), os.O_RDONLY | os.O_CLOEXEC)
            try:
                registration = os.path.join(directory, "cgroup.event_control")
                with open(registration, "wb", buffering=0) as file:
                    file.write(f"{self._fd} {control}".encode())
            finally:
                os.close(control)
            self._seen = self._kills() or 0
        except BaseException:
            self.close()
            raise

    def fileno(self) -> int:
        """The eventfd."""
        return self._fd

    def news(self, *, init_killed: bool = False) -> bool:
        """Look at the counter, and at how often the kernel has signalled."""
        self._signals += self._drain()
        try:
            own = _read_table(os.path.join(self._directory, _CONTROL))
            kills = self._kills() if own is not None else None
        except OSError:  # no descriptor is free: to be looked at again, not given up
            self.unsure = True
            return False
        if own is None or kills is None:
            self.over, self.unsure = True, False
            return init_killed and self._signals > 1
        # Before Linux 4.13 there is no counter, and the signal has to do.
        stuck = own.get("oom_kill_disable") == 1 or _KILLS not in own
        found = kills > self._seen or (stuck and self._signals > 0)
        self._seen = kills
        if found:
            self._signals = 0
        self.unsure = self._signals > 0
        return found

    def forget(self) -> None:
        """What was signalled so far was for another container."""
        self._signals = 0
        self.unsure = False

    def close(self) -> None:
        """Give the eventfd back; looks are still answered."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _drain(self) -> int:
        try:
            return os.eventfd_read(self._fd) if self._fd >= 0 else 0
        except BlockingIOError:
            return 0

    def _kills(self) -> int | None:
        """How many were killed in it and below: here a kill counts for the victim's cgroup alone.

        Returns:
            The sum; None if the cgroup is gone.

        Raises:
            OSError: it cannot be told.
        """
        folders = itertools.islice(os.walk(self._directory), _MOST_BELOW)
        tables = [_read_table(os.path.join(folder, _CONTROL)) for folder, _, _ in folders]
        counted = [table.get(_KILLS, 0) for table in tables if table is not None]
        return sum(counted) if counted else None


class WatchV2:
    """A watch on cgroup version 2; see :class:`OomWatch`.

    Args:
        directory: the container's cgroup.
    """

    def __init__(self, directory: str) -> None:
        self.over = False
        self.unsure = False
        self._parent = os.path.join(os.path.dirname(directory), _EVENTS)
        self._poll: select.epoll | None = None
        self._file = os.open(os.path.join(directory, _EVENTS), os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._poll = select.epoll()
            # A cgroup's file is always readable; PRI is that it has changed since it was read.
            self._poll.register(self._file, select.EPOLLPRI)
            self._seen = self._kills() or 0
            self._seen_of_parent = self._kills_of_parent()
        except BaseException:
            self.close()
            raise

    def fileno(self) -> int:
        """The epoll that watches the file."""
        return self._poll.fileno() if self._poll is not None else -1

    def news(self, *, init_killed: bool = False) -> bool:
        """Look at the counter; if it has gone, at the parent's."""
        kills, of_parent = self._kills(), self._kills_of_parent()
        if kills is None:
            self.over = True
            return init_killed and of_parent > self._seen_of_parent
        found = kills > self._seen
        self._seen, self._seen_of_parent = kills, of_parent
        return found

    def forget(self) -> None:
        """Nothing is kept: here a change comes after the kill."""

    def close(self) -> None:
        """Give both descriptors back; looks are still answered."""
        if self._poll is not None:
            self._poll.close()
            self._poll = None
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _kills(self) -> int | None:
        """How many were killed in it and below; None if the cgroup is gone.

        Reading from the start is also what makes the file unchanged again.
        """
        try:
            return _to_table(os.pread(self._file, _LIMIT, 0)).get(_KILLS, 0)
        except OSError:
            return None

    def _kills_of_parent(self) -> int:
        try:
            return (_read_table(self._parent) or {}).get(_KILLS, 0)
        except OSError:
            return 0


# A cgroup that is removed while its file is open answers ENODEV.
_GONE: Final = frozenset({errno.ENOENT, errno.ENODEV, errno.ENOTDIR})


def _read_table(path: str) -> dict[str, int] | None:
    """The counters in a file; None if its cgroup is gone."""
    try:
        with open(path, "rb", buffering=0) as file:
            return _to_table(file.read(_LIMIT) or b"")
    except OSError as error:
        if error.errno not in _GONE:
            raise
        return None


def _to_table(text: bytes) -> dict[str, int]:
    pairs = (line.split() for line in text.splitlines())
    return {p[0].decode(): int(p[1]) for p in pairs if len(p) == 2 and p[1].isdigit()}  # noqa: PLR2004
