"""Hearing that containers come, go, are made or end, without asking again and again.

Rules
- What is heard is a reason to look, never what is believed.
- inotify tells of namespaces and bundles that are made and removed below containerd's state, and
  of the two files of a bundle that matter: what was injected, and the pid of init. Other files of a
  bundle change with each exec, and wake nobody.
- A state directory that is not there is waited for where it will be: by the name of its next part
  in the nearest directory that is there.
- A pidfd tells when the init of a container that holds a device has ended: its bundle may stay.
- Changes come in swarms, whose end is waited for, but not for ever. What cannot be watched (a limit
  of inotify) is left to the slow look, said for as long as it lasts, and tried again each time.

Source: inotify(7), pidfd_open(2), epoll(7).
"""

from __future__ import annotations

import contextlib
import os
import select
from typing import TYPE_CHECKING, Final, Self, TypeAlias

import anyio

from integration.inspection.bundles import TASKS
from integration.node import inotify
from shim import bundle as bundle_files
from shim import syscalls

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

__all__ = ["Watching"]

_QUIET: Final = 0.2
_LONGEST_SWARM: Final = 2.0

_OF_A_BUNDLE: Final = frozenset({bundle_files.RECORD, bundle_files.INIT_PID})

_Names: TypeAlias = "frozenset[str] | None"


class Watching:
    """What has been heard. To be entered; then :meth:`follow` and :meth:`wait` by turns."""

    def __init__(self) -> None:
        self.deaf = ""
        """Why not all is heard; "" if all is."""
        self._inotify = -1
        self._epoll = select.epoll()
        self._watched: dict[str, tuple[tuple[int, int], _Names]] = {}
        self._paths: dict[int, str] = {}
        self._pids: dict[int, int] = {}
        self._ended: set[int] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close_inotify()
        for fd in self._pids.values():
            os.close(fd)
        self._pids = {}
        self._epoll.close()

    def follow(self, states: Iterable[str], pids: Iterable[int]) -> bool:
        """Hear of these from now on, in place of those before.

        Args:
            states: containerd's state directories, whether they are there or not.
            pids: init processes whose end matters.

        Returns:
            Whether something is heard that was not until now: what has happened there is to be
            looked for once more.
        """
        ended = self._follow_pids(frozenset(pids))
        there = _identities(states)
        # A watch of what is gone has gone with it; one that is not wanted any more has not.
        unwanted = any(os.path.lexists(path) for path in self._watched.keys() - there.keys())
        if unwanted:
            self._close_inotify()
        self._watched = {path: it for path, it in self._watched.items() if there.get(path) == it}
        before = len(self._watched)
        self.deaf = ""
        try:
            if self._inotify < 0:
                self._inotify = syscalls.inotify_init()
                self._epoll.register(self._inotify, select.EPOLLIN)
            for path in there.keys() - self._watched.keys():
                self._watch(path, there[path])
        except OSError as error:
            self.deaf = str(error.strerror)
        return ended or len(self._watched) > before

    def _watch(self, path: str, it: tuple[tuple[int, int], _Names]) -> None:
        with contextlib.suppress(FileNotFoundError):  # it has just gone, and is told of above it
            watch = syscalls.inotify_watch_changes(self._inotify, path, content=False)
            self._watched[path], self._paths[watch] = it, path

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
        with anyio.move_on_after(seconds):
            while True:
                await anyio.wait_readable(self._epoll.fileno())
                if self._read():
                    return True
        return False

    def _read(self) -> bool:
        """Take what was told; whether any of it matters."""
        readable = {fd for fd, _ in self._epoll.poll(0)}
        ended = [pid for pid, fd in self._pids.items() if fd in readable]
        for pid in ended:
            os.close(self._pids.pop(pid))
        self._ended.update(ended)
        return self._read_inotify() or bool(ended)

    def _read_inotify(self) -> bool:
        if self._inotify < 0:
            return False
        matters = False
        for event in inotify.drain(self._inotify):
            _, names = self._watched.get(self._paths.get(event.watch, ""), (None, None))
            matters |= event.ends or names is None or event.name in names
            if event.ends:
                self._watched.pop(self._paths.pop(event.watch, ""), None)
                if event.watch < 0:
                    self._close_inotify()
                    break
        return matters

    def _follow_pids(self, pids: frozenset[int]) -> bool:
        for pid in self._pids.keys() - pids:
            os.close(self._pids.pop(pid))
        self._ended &= pids  # one that has ended is not watched until the ledger is without it
        ended = False
        for pid in sorted(pids - self._pids.keys() - self._ended):
            try:
                fd = os.pidfd_open(pid)
            except ProcessLookupError:
                ended = True
                continue
            except OSError:
                continue  # too many open files: then the slow look tells
            self._epoll.register(fd, select.EPOLLIN)
            self._pids[pid] = fd
        return ended

    def _close_inotify(self) -> None:
        if self._inotify >= 0:
            os.close(self._inotify)
        self._inotify = -1
        self._watched = {}
        self._paths = {}


def _identities(states: Iterable[str]) -> dict[str, tuple[tuple[int, int], _Names]]:
    """The directories to watch: which each is (one that was replaced is another), and for what."""
    found: dict[str, tuple[tuple[int, int], _Names]] = {}
    for state in states:
        tasks = os.path.join(state, TASKS)
        if not _put(found, tasks, None):
            _put_nearest(found, tasks)
            continue
        for namespace in _directories(tasks):
            _put(found, namespace, None)
            for bundle in _directories(namespace):
                _put(found, bundle, _OF_A_BUNDLE)
    return found


def _put_nearest(found: dict[str, tuple[tuple[int, int], _Names]], path: str) -> None:
    """Watch for what is not there, where it will be."""
    while path != "/":
        path, _, name = path.rpartition("/")
        path = path or "/"
        known = found.get(path)
        names = None if known is not None and known[1] is None else frozenset({name})
        if names is not None and known is not None and known[1] is not None:
            names |= known[1]
        if _put(found, path, names):
            return


def _put(found: dict[str, tuple[tuple[int, int], _Names]], path: str, names: _Names) -> bool:
    try:
        seen = os.stat(path)
    except OSError:
        return False
    found[path] = ((seen.st_dev, seen.st_ino), names)
    return True


def _directories(path: str) -> list[str]:
    try:
        with os.scandir(path) as entries:
            return [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []
