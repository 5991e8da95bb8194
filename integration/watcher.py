"""Waiting for files, processes and announcements, without asking again and again.

Rules
- What is heard is a reason to look, never what is believed. After each new watch one looks once
  more, since what happened before it was not heard.
- A directory that is missing is waited for in the nearest one that is there, by the next part of
  its path.
- A watch ends with its directory, and the kernel says so. A directory that is made in its place may
  have its path and its number, so nothing else tells that it is not watched. After more events than
  the queue holds, any watch may have ended.
- Changes come in swarms (a driver's installation writes three hundred files). The end of a swarm is
  waited for, but not for ever.
- Where the kernel refuses (a limit of inotify), :attr:`Watcher.deaf` says why; it is tried again
  with each :meth:`Watcher.follow`, and until then one looks every moment.

Source: inotify(7), epoll(7), pidfd_open(2).
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import struct
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final, NamedTuple, Self

import anyio

from shim import syscalls

# struct inotify_event: wd, mask, cookie, len; then the name.
_EVENT: Final = struct.Struct("iIII")
_OVERFLOW: Final = 0x4000
_IGNORED: Final = 0x8000
_LONGEST_READ: Final = 1 << 16

# Seconds between two looks while the kernel tells nothing: a kubelet that restarts does not wait.
_UNHEARD: Final = 0.25

# Seconds in which events that do not matter gather, so that many of them wake nobody often.
_BATCH: Final = 0.1
_LONGEST_SWARM: Final = 5.0


class Interest(NamedTuple):
    """What matters in a directory."""

    names: frozenset[str] | None = None  # of files; None for all
    # whether it matters that a file is written. Where device nodes are, that happens with every
    # line for /dev/null.
    content: bool = True


ANY: Final = Interest()


class Watcher:
    """Hears of changes. To be entered; then :meth:`follow` and :meth:`wait` by turns.

    Args:
        quiet: seconds without a change after which a swarm is over; 0 not to wait for that.
        longest: seconds that a swarm is waited for at most.
    """

    def __init__(self, quiet: float, longest: float = _LONGEST_SWARM) -> None:
        self.deaf = ""
        """Why files are not watched; "" if they are."""
        self._quiet, self._longest = quiet, longest
        self._epoll = select.epoll()
        self._readers: dict[int, Callable[[], bool]] = {}
        self._inotify = -1
        self._watched: dict[str, tuple[tuple[int, int], Interest]] = {}
        self._paths: dict[int, str] = {}
        self._pids: dict[int, int] = {}
        self._ended: set[int] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close_inotify()
        for pid in tuple(self._pids):
            self._close_process(pid)
        self._epoll.close()

    def add(self, fd: int, read: Callable[[], bool]) -> None:
        """Hear another descriptor, until its owner closes it, or this is left.

        Args:
            fd: becomes readable when there is something.
            read: reads all of that; returns whether any of it matters.
        """
        self._epoll.register(fd, select.EPOLLIN)
        self._readers[fd] = read

    def follow(self, wanted: Mapping[str, Interest]) -> bool:
        """Hear of directories from now on, in place of those before.

        Args:
            wanted: what matters in each, whether it is there or not.

        Returns:
            Whether something is watched that was not until now: what has happened there is to be
            looked for once more.
        """
        there = _resolved(wanted)
        # A watch of what is gone has gone with it; one that is not wanted any more has not.
        if any(os.path.lexists(path) for path in self._watched.keys() - there.keys()):
            self._close_inotify()
        self._watched = {path: it for path, it in self._watched.items() if there.get(path) == it}
        before = len(self._watched)
        self.deaf = ""
        try:
            if self._inotify < 0:
                self._inotify = syscalls.inotify_init()
                self.add(self._inotify, self._read_inotify)
            # Those above first: where there is room for some only, they tell of what comes below.
            for path in sorted(there.keys() - self._watched.keys()):
                with contextlib.suppress(FileNotFoundError):  # the directory above tells
                    content = there[path][1].content
                    watch = syscalls.inotify_watch_changes(self._inotify, path, content=content)
                    self._watched[path], self._paths[watch] = there[path], path
        except OSError as error:
            self.deaf = str(error.strerror)
        return len(self._watched) > before

    def follow_processes(self, pids: Iterable[int]) -> bool:
        """Hear of the end of processes from now on, in place of those before. Each is told once.

        Returns:
            Whether one of them had ended before it was followed.
        """
        wanted = frozenset(pids)
        for pid in self._pids.keys() - wanted:
            self._close_process(pid)
        self._ended &= wanted
        ended = False
        for pid in sorted(wanted - self._pids.keys() - self._ended):
            try:
                fd = os.pidfd_open(pid)
            except ProcessLookupError:
                ended = True
                continue
            except OSError:
                continue  # too many open files: then the slow look tells
            self._pids[pid] = fd
            self.add(fd, partial(self._end_of, pid))
        return ended

    async def wait(self, seconds: float = math.inf) -> bool:
        """Wait for a change, and until the swarm that it came in is over.

        Args:
            seconds: to wait at most for its first.

        Returns:
            Whether there was one; False when the time is up.
        """
        if not await self._one(seconds):
            return False
        if self._quiet:
            with anyio.move_on_after(self._longest):
                while await self._one(self._quiet):
                    pass
        return True

    async def change(self, wanted: Mapping[str, Interest]) -> None:
        """Wait until there is a reason to look at directories: at once if one was not watched.

        Args:
            wanted: as :meth:`follow` has it.
        """
        if not self.follow(wanted):
            await self.wait(_UNHEARD if self.deaf else math.inf)

    async def _one(self, seconds: float) -> bool:
        """Wait for something that matters; whether it came."""
        with anyio.move_on_after(seconds):
            while True:
                await anyio.wait_readable(self._epoll.fileno())
                if self._read():
                    return True
                await anyio.sleep(_BATCH)
        return False

    def _read(self) -> bool:
        matters = False
        for fd, _ in self._epoll.poll(0):
            matters |= self._readers[fd]()
        return matters

    def _close_process(self, pid: int) -> None:
        fd = self._pids.pop(pid)
        del self._readers[fd]
        os.close(fd)

    def _end_of(self, pid: int) -> bool:
        self._close_process(pid)
        self._ended.add(pid)
        return True

    def _read_inotify(self) -> bool:
        matters = False
        for watch, name, ends in _drain(self._inotify):
            it = self._watched.get(self._paths.get(watch, ""))
            matters |= ends or it is None or it[1].names is None or name in it[1].names
            if ends:
                self._watched.pop(self._paths.pop(watch, ""), None)
                if watch < 0:
                    self._close_inotify()
                    break
        return matters

    def _close_inotify(self) -> None:
        if self._inotify >= 0:
            del self._readers[self._inotify]
            os.close(self._inotify)
        self._inotify = -1
        self._watched = {}
        self._paths = {}


def _drain(fd: int) -> list[tuple[int, str, bool]]:
    """What inotify has told: the watch (-1 if events were lost), the name, whether it has ended."""
    events = []
    with contextlib.suppress(BlockingIOError):
        while told := os.read(fd, _LONGEST_READ):
            at = 0
            while at + _EVENT.size <= len(told):
                watch, mask, _, length = _EVENT.unpack_from(told, at)
                at += _EVENT.size
                name = os.fsdecode(told[at : at + length].rstrip(b"\0"))
                events.append((watch, name, bool(mask & (_OVERFLOW | _IGNORED))))
                at += length
    return events


def _resolved(wanted: Mapping[str, Interest]) -> dict[str, tuple[tuple[int, int], Interest]]:
    """The directories to watch: which each is (one that was replaced is another), and for what."""
    found: dict[str, tuple[tuple[int, int], Interest]] = {}
    for path, interest in wanted.items():
        place, what = os.path.abspath(path), interest
        while True:
            with contextlib.suppress(OSError):
                seen = os.stat(f"{place}/")
                before = found.get(place)
                found[place] = (seen.st_dev, seen.st_ino), _both(before and before[1], what)
                break
            if place == "/":
                break
            place, _, name = place.rpartition("/")
            place, what = place or "/", Interest(frozenset({name}), content=False)
    return found


def _both(one: Interest | None, other: Interest) -> Interest:
    if one is None:
        return other
    all_names = one.names is None or other.names is None
    names = None if all_names else (one.names or frozenset()) | (other.names or frozenset())
    return Interest(names, one.content or other.content)


async def first_of(*waits: Callable[[], Awaitable[Any]]) -> tuple[int, Any]:
    """Wait for the first of several things, and for no other any more.

    Args:
        waits: each waits for one of them.

    Returns:
        Which it was, and what that returned. What it raises is raised.
    """
    found: list[tuple[int, Any]] = []
    failed: list[Exception] = []

    async def run(number: int, wait: Callable[[], Awaitable[Any]]) -> None:
        try:
            found.append((number, await wait()))
        except Exception as error:  # noqa: BLE001 - it is raised outside of the group
            failed.append(error)
        tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        for number, wait in enumerate(waits):
            tasks.start_soon(run, number, wait)
    if not found:
        raise failed[0]
    return found[0]
