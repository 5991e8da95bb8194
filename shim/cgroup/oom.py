"""Detect that a container runs out of memory, as soon as it happens.

Rules
- A container has run out of memory when the kernel's counters show that one of its processes was
  killed for it (or, without the OOM killer, that its processes are stopped). The kernel's signal is
  only a reason to read the counters.
- Version 1 signals an eventfd *before* it kills, even for an ancestor's limit, and when the cgroup
  is removed. After a signal without a new kill, the counters are read again a few times. If there
  is still none, the kill was in another container, or the next signal will reveal it.
- Version 2 marks memory.events as changed. A separate epoll watches the open file for that, and the
  loop watches the epoll. (inotify would work as well, but by default a user may have only 128
  instances: as many as a node has pods.)
- The counters are read a last time after init's end. By then, systemd may have removed the empty
  cgroup. On version 1 the signals were counted, one of them for the removal. Version 2 also counts
  the kill for the parent, which still exists.
- A removed cgroup signals either for ever or never, so it is no longer watched.

Source: kernel Documentation/admin-guide/cgroup-v1/memory.rst (9, 10), cgroup-v2.rst
(memory.events); epoll(7); kernel mm/memcontrol-v1.c, fs/kernfs/file.c.
"""

from __future__ import annotations

import errno
import itertools
import os
import select
from collections.abc import Callable
from typing import Final, TypeAlias

from shim import loop
from shim.cgroup.cgroup import Cgroup

_EVENTS: Final = "memory.events"
_CONTROL: Final = "memory.oom_control"
_KILLS: Final = "oom_kill"

_LIMIT: Final = 4096

# A bound for containers that may create their own cgroups.
_MOST_BELOW: Final = 500

# Seconds of each wait after a signal without a kill, until the kernel has killed a process, or
# others have freed memory.
_AGAIN: Final = (0.02, 0.1, 0.5)


def watch(cgroup: Cgroup | None) -> OomWatch | None:
    """Start to watch a container.

    Args:
        cgroup: the container's cgroup.

    Returns:
        The watch; None without memory accounting for the container.

    Raises:
        OSError: the kernel refuses (no descriptor is free).
    """
    directory = cgroup.directory("memory") if cgroup is not None else None
    if cgroup is None or directory is None:
        return None
    try:
        return WatchV2(directory) if cgroup.is_v2 else WatchV1(directory)
    except FileNotFoundError:
        return None  # the controller is not enabled, or init is already gone


async def follow(watch: OomWatch, tell: Callable[[], None]) -> None:
    """Report each time a container runs out of memory; close the watch when its cgroup is gone.

    Args:
        watch: the watch on the container.
        tell: called once for each event; several kills may be one event.
    """
    try:
        while not watch.over:
            await loop.wait_readable(watch.fileno())
            if watch.news():
                tell()
            for pause in _AGAIN:
                if not watch.unsure:
                    break
                await loop.sleep(pause)
                if watch.news():
                    tell()
            if not watch.over:
                watch.forget()
    finally:
        watch.close()


class WatchV1:
    """A watch on one container, on cgroup version 1.

    Args:
        directory: the container's directory in the memory hierarchy.

    Attributes:
        over: whether the cgroup is gone.
        unsure: whether a signal has come that no kill explains yet.
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
        """Return a descriptor that becomes readable when the counters should be read."""
        return self._fd

    def news(self, *, init_killed: bool = False) -> bool:
        """Whether the container has run out of memory since the last call.

        Args:
            init_killed: whether the kernel or a process killed init by SIGKILL. Only then do the
                traces of a removed cgroup count.
        """
        self._signals += self._drain()
        try:
            own = _read_table(os.path.join(self._directory, _CONTROL))
            kills = self._kills() if own is not None else None
        except OSError:  # no descriptor is free; read it again later
            self.unsure = True
            return False
        if own is None or kills is None:
            self.over, self.unsure = True, False
            return init_killed and self._signals > 1
        # Before Linux 4.13 there is only the signal, no counter.
        stuck = own.get("oom_kill_disable") == 1 or _KILLS not in own
        found = kills > self._seen or (stuck and self._signals > 0)
        self._seen = kills
        if found:
            self._signals = 0
        self.unsure = self._signals > 0
        return found

    def forget(self) -> None:
        """Attribute the signals so far to another container."""
        self._signals = 0
        self.unsure = False

    def close(self) -> None:
        """Stop watching. :meth:`news` still works."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _drain(self) -> int:
        try:
            return os.eventfd_read(self._fd) if self._fd >= 0 else 0
        except BlockingIOError:
            return 0

    def _kills(self) -> int | None:
        """Return the kills in it and below, since a kill counts only for the victim's cgroup.

        Returns:
            The sum; None if the cgroup is gone.

        Raises:
            OSError: the counters cannot be read.
        """
        folders = itertools.islice(os.walk(self._directory), _MOST_BELOW)
        tables = [_read_table(os.path.join(folder, _CONTROL)) for folder, _, _ in folders]
        counted = [table.get(_KILLS, 0) for table in tables if table is not None]
        return sum(counted) if counted else None


class WatchV2:
    """A watch on cgroup version 2; see :class:`WatchV1`.

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
            # A cgroup's file is always readable; PRI means that it has changed since the last read.
            self._poll.register(self._file, select.EPOLLPRI)
            self._seen = self._kills() or 0
            self._seen_of_parent = self._kills_of_parent()
        except BaseException:
            self.close()
            raise

    def fileno(self) -> int:
        """Return the epoll that watches the file."""
        return self._poll.fileno() if self._poll is not None else -1

    def news(self, *, init_killed: bool = False) -> bool:
        """Read the counter or, if it is gone, the parent's."""
        kills, of_parent = self._kills(), self._kills_of_parent()
        if kills is None:
            self.over = True
            return init_killed and of_parent > self._seen_of_parent
        found = kills > self._seen
        self._seen, self._seen_of_parent = kills, of_parent
        return found

    def forget(self) -> None:
        """Do nothing: version 2 signals after the kill."""

    def close(self) -> None:
        """Close both descriptors."""
        if self._poll is not None:
            self._poll.close()
            self._poll = None
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _kills(self) -> int | None:
        """Return the kills in it and below; None if the cgroup is gone.

        Reading from the start also marks the file as unchanged.
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


OomWatch: TypeAlias = WatchV1 | WatchV2


# Reading the open file of a removed cgroup gives ENODEV.
_GONE: Final = frozenset({errno.ENOENT, errno.ENODEV, errno.ENOTDIR})


def _read_table(path: str) -> dict[str, int] | None:
    """Return the counters in a file; None if its cgroup is gone."""
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
