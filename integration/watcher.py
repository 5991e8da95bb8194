"""Wait for changes of files, ends of processes and other descriptors, without polling.

Rules
- An event is only a reason to look. After each new watch the caller must look again, since earlier
  changes caused no event.
- If a directory is missing, the nearest existing parent is watched for the next part of its path.
- A watch ends with its directory, and the kernel reports that. A new directory may have the same
  path and inode, so nothing else shows that it is not being watched. After the event queue has
  overflowed, any watch may have ended.
- Changes come in bursts (installing a driver writes three hundred files). The watcher waits for the
  end of a burst, but not for ever.
- If the kernel refuses a watch (inotify has limits), :attr:`Watcher.deaf` has the reason. Each
  :meth:`Watcher.follow` tries again, and until it succeeds the caller polls.

Source: inotify(7), epoll(7), pidfd_open(2).
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import struct
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final, NamedTuple, Self

import anyio

from integration.detached import run_detached
from shim import syscalls

# struct inotify_event: wd, mask, cookie, len; then the name.
_EVENT: Final = struct.Struct("iIII")
_OVERFLOW: Final = 0x4000
_IGNORED: Final = 0x8000
_LONGEST_READ: Final = 1 << 16

# Seconds between two looks without watches: a kubelet that restarts does not wait.
_UNHEARD: Final = 0.25

# Seconds in which irrelevant events gather, so that many of them cause few wake-ups.
_BATCH: Final = 0.1
_LONGEST_SWARM: Final = 5.0


class Interest(NamedTuple):
    """What matters in a directory."""

    names: frozenset[str] | None = None  # of files; None for all
    # whether writes to files matter; among device nodes, every write to /dev/null is one
    content: bool = True


ANY: Final = Interest()


class Watcher:
    """Waits for changes. Enter it, and then call :meth:`follow` and :meth:`wait` in turn.

    Args:
        quiet: seconds without a change that end a burst; 0 to return at once.
        longest: the maximum seconds to wait for the end of a burst.
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
        self._following = threading.Lock()
        self._is_left = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_left = True
        if self._following.acquire(blocking=False):
            self._following.release()
            self._close()
        # else a thread still follows; it closes the descriptors afterwards

    def _close(self) -> None:
        with self._following:
            self._close_inotify()
            for pid in tuple(self._pids):
                self._close_process(pid)
            self._epoll.close()

    def add(self, fd: int, read: Callable[[], bool]) -> None:
        """Watch another descriptor until its owner closes it, or the watcher is left.

        Args:
            fd: becomes readable on an event.
            read: reads all events; returns whether any is relevant.
        """
        self._epoll.register(fd, select.EPOLLIN)
        self._readers[fd] = read

    def follow(self, wanted: Mapping[str, Interest]) -> bool:
        """Watch these directories from now on, and no others.

        Args:
            wanted: which changes matter in each, whether it exists or not.

        Returns:
            Whether there is a new watch, so that the caller has to look again.
        """
        with self._following:
            # A thread may start only after the watcher was left.
            is_new = not self._is_left and self._follow(wanted)
        if self._is_left:
            self._close()
        return is_new

    async def follow_detached(self, wanted: Mapping[str, Interest]) -> bool:
        """Do the same in a thread: a directory may be on a file system that does not answer.

        After a cancellation the watcher must be left.
        """
        return await run_detached(self.follow, wanted)

    def _follow(self, wanted: Mapping[str, Interest]) -> bool:
        there = _resolved(wanted)
        # The kernel has ended the watch of a removed directory, but not of one that is unwanted.
        if any(os.path.lexists(path) for path in self._watched.keys() - there.keys()):
            self._close_inotify()
        self._watched = {path: it for path, it in self._watched.items() if there.get(path) == it}
        before = len(self._watched)
        self.deaf = ""
        try:
            if self._inotify < 0:
                self._inotify = syscalls.inotify_init()
                self.add(self._inotify, self._read_inotify)
            # Parents first: if there is room for few watches, theirs report what appears below.
            for path in sorted(there.keys() - self._watched.keys()):
                with contextlib.suppress(FileNotFoundError):  # its parent is watched
                    content = there[path][1].content
                    watch = syscalls.inotify_watch_changes(self._inotify, path, content=content)
                    self._watched[path], self._paths[watch] = there[path], path
        except OSError as error:
            self.deaf = str(error.strerror)
        return len(self._watched) > before

    def follow_processes(self, pids: Iterable[int]) -> bool:
        """Watch for the exit of these processes from now on, and no others; each is reported once.

        Returns:
            Whether one of them had already exited.
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
                continue  # too many open files: the caller's periodic look finds it
            self._pids[pid] = fd
            self.add(fd, partial(self._end_of, pid))
        return ended

    async def wait(self, seconds: float = math.inf) -> bool:
        """Wait for a change, and for the end of its burst.

        Args:
            seconds: the time limit for the first change.

        Returns:
            Whether a change came in time.
        """
        if not await self._one(seconds):
            return False
        if self._quiet:
            with anyio.move_on_after(self._longest):
                while await self._one(self._quiet):
                    pass
        return True

    async def change(self, wanted: Mapping[str, Interest], *, may_hang: bool = False) -> None:
        """Wait until there is a reason to look; return at once after a new watch.

        Args:
            wanted: as for :meth:`follow`.
            may_hang: whether a directory may be on a file system that does not answer. Then only
                this call waits.
        """
        is_new = await self.follow_detached(wanted) if may_hang else self.follow(wanted)
        if not is_new:
            await self.wait(_UNHEARD if self.deaf else math.inf)

    async def _one(self, seconds: float) -> bool:
        """Wait for a relevant event; return whether it came."""
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
    """Read inotify's events: the watch (-1 if events were lost), the name, whether it has ended."""
    events = []
    with contextlib.suppress(BlockingIOError):
        while chunk := os.read(fd, _LONGEST_READ):
            at = 0
            while at + _EVENT.size <= len(chunk):
                watch, mask, _, length = _EVENT.unpack_from(chunk, at)
                at += _EVENT.size
                name = os.fsdecode(chunk[at : at + length].rstrip(b"\0"))
                events.append((watch, name, bool(mask & (_OVERFLOW | _IGNORED))))
                at += length
    return events


def _resolved(wanted: Mapping[str, Interest]) -> dict[str, tuple[tuple[int, int], Interest]]:
    """Return the directories to watch: device and inode, and the interest in each."""
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
    """Run several functions until the first returns, and cancel the others.

    Args:
        waits: the functions.

    Returns:
        The index of the first to return, and its result. Its exception is raised.
    """
    found: list[tuple[int, Any]] = []
    failed: list[Exception] = []

    async def run(number: int, wait: Callable[[], Awaitable[Any]]) -> None:
        try:
            found.append((number, await wait()))
        except Exception as error:  # noqa: BLE001 - raised outside the group
            failed.append(error)
        tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        for number, wait in enumerate(waits):
            tasks.start_soon(run, number, wait)
    if not found:
        raise failed[0]
    return found[0]
