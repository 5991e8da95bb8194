"""Let the kernel prepare to move a process between cgroups, before the runtime moves one.

runc and crun move each process that they start into the container's cgroup. The kernel first waits
for an RCU grace period, in which nothing else happens: 5 to 20 ms, a fifth of a container's start
on a small machine. It does not wait if another move has ended less than a grace period before. So
a thread of the shim makes a move that changes nothing, while the shim and the runtime still prepare
theirs.

- The thread moves only itself, to the cgroup that it is in. If another program has just moved the
  shim, the kernel refuses this (version 2), or it affects nothing but this thread, which ends.
- All hierarchies share the kernel's lock, so one of them is enough.
- Where cgroups are mounted with ``favordynmods``, the kernel never waits.

Source: kernel kernel/cgroup/cgroup.c cgroup_attach_lock, cgroup_attach_permissions;
kernel/rcu/sync.c; Documentation/admin-guide/cgroup-v2.rst favordynmods.
"""

from __future__ import annotations

import os
from _thread import allocate_lock, get_native_id, start_new_thread
from collections.abc import Callable

from shim.cgroup import cgroup


class ExpectedMoves:
    """The moves that the runtimes of a shim are about to make.

    Args:
        start: calls a function with arguments, in a new thread.
    """

    __slots__ = ("_expected", "_lock", "_prepares", "_start")

    def __init__(self, start: Callable[..., object] = start_new_thread) -> None:
        self._start = start
        self._lock = allocate_lock()
        self._expected = False
        self._prepares = False

    def expect(self) -> None:
        """Let the kernel prepare for a move in the next milliseconds; return at once.

        If the kernel already does so for an earlier call, it does it once more afterwards, because
        the effect lasts no longer than a grace period.
        """
        with self._lock:
            self._expected = True
            if self._prepares:
                return
            self._prepares = True
        try:
            # Not in the thread, because that would cost 60 KB for the life of the pod.
            if (path := cgroup.threads_file()) is not None:
                self._start(self._prepare, (path,))
                return
        except (OSError, RuntimeError):
            pass  # no descriptor or no thread is free: the runtime will wait
        self._prepares = False

    def _prepare(self, path: str) -> None:
        while self._next():
            try:
                _stay(path)
            except OSError:
                pass  # the cgroups are read-only: the runtime will wait

    def _next(self) -> bool:
        with self._lock:
            self._prepares = self._expected
            self._expected = False
            return self._prepares


def _stay(path: str) -> None:
    """Move this thread to its own cgroup.

    Args:
        path: the file with the cgroup's threads.

    Raises:
        OSError: the kernel refuses.
    """
    file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(file, str(get_native_id()).encode())
    finally:
        os.close(file)
