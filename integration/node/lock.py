"""The node lock: a lock file in the state directory that admits one agent per node.

::

    STATE/node.lock   locked by the agent that has the node; contains its process id
    STATE/pods/UID    locked by the agent of that pod once it has the node or stands by

Rules
- A readiness check holds a lock for a moment to test it, so the agent keeps trying for a second.
- A separate thread holds each lock (:mod:`integration.node.private_file`). If another thread hangs
  in the kernel, a killed agent stays as a zombie, but the lock is released.
- A detached thread waits for the lock in the kernel, so that the process can exit at any time.
- The agent that gets the node removes the files of exited agents in ``pods``.

Source: flock(2); proc_locks(5).
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Self

from hooks.config import Config
from integration.agent_errors import AgentRunning, AgentStateUnusable, NodeAgentError
from integration.agent_status import PODS, pod_path
from integration.detached import run_detached
from integration.files import flock_within
from integration.node.private_file import keep_private
from shim.causes.agent import LOCK, is_locked

__all__ = ["NodeLock", "holds"]

_MODE: Final = 0o600
_DIRECTORY_MODE: Final = 0o711
# Seconds after which a readiness check has surely released the lock.
_CHECK_TIME: Final = 1.0


def _lock_path(config: Config) -> str:
    """Return the path of the file that an agent locks, and writes its pid to."""
    return os.path.join(config.state, LOCK)


def holds(pid: int, config: Config) -> bool:
    """Return whether a process holds the node lock, by the kernel's list of locks.

    Args:
        pid: the process id in our pid namespace.
    """
    try:
        inode = os.stat(_lock_path(config)).st_ino
        with open("/proc/locks", encoding="ascii") as file:
            # "1: FLOCK  ADVISORY  WRITE 4711 00:1a:99 0 EOF"; "->" marks a waiting process
            rows = [line.split() for line in file]
    except OSError:
        return False
    return any(
        row[1:2] == ["FLOCK"] and row[4] == str(pid) and row[5].rpartition(":")[2] == str(inode)
        for row in rows
    )


class NodeLock:
    """The lock: a context manager that opens the file, and releases the locks at the end.

    Raises:
        AgentStateUnusable: the file cannot be opened.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._path = _lock_path(config)
        self._fd = -1
        self._release: Callable[[], None] | None = None
        self._pod: tuple[str, Callable[[], None]] | None = None

    def __enter__(self) -> Self:
        self._fd = _opened(self._path)
        return self

    def __exit__(self, *_: object) -> None:
        if self._pod is not None:
            path, release = self._pod
            with suppress(OSError):
                os.unlink(path)
            release()
        if self._release is None:
            os.close(self._fd)
        else:
            self._release()

    @property
    def holder(self) -> str:
        """The id of the process that holds the lock; "unknown" if the file has none."""
        return os.pread(self._fd, 32, 0).decode(errors="replace").strip() or "unknown"

    def held(self) -> NodeAgentError:
        """Return the error for an agent that cannot get the lock."""
        return AgentRunning(
            "to start the node agent",
            found=f"another agent, process {self.holder}, holds {self._path}",
            do="stop it first; it may run in a pod",
        )

    def take(self) -> bool:
        """Take the lock if it is free; return whether it was."""
        if is_taken := flock_within(self._fd, fcntl.LOCK_EX, _CHECK_TIME):
            self._own()
        return is_taken

    async def wait(self) -> None:
        """Wait until the lock is free, and take it."""
        await run_detached(fcntl.flock, self._fd, fcntl.LOCK_EX)
        self._own()

    def show_pod(self, uid: str) -> None:
        """Lock the file that marks an agent's pod as running.

        Args:
            uid: the UID of the pod; "" if the agent does not run in one.

        Raises:
            AgentStateUnusable: the file cannot be locked.
        """
        path = pod_path(self._config, uid)
        while uid and self._pod is None:
            fd = _opened(path)
            flock_within(fd, fcntl.LOCK_EX, _CHECK_TIME)
            if _is_at(fd, path):
                self._pod = path, keep_private(fd)
            else:  # another agent removed the file before it was locked
                os.close(fd)

    def _own(self) -> None:
        self._sign()
        self._release = keep_private(self._fd)

    def _sign(self) -> None:
        with suppress(OSError):  # the disk is full; the pid is informative only
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)
        pods = os.path.join(self._config.state, PODS)
        with suppress(OSError):  # no agent ran in a pod
            for name in os.listdir(pods):
                path = os.path.join(pods, name)
                if not is_locked(path):
                    os.unlink(path)


def _opened(path: str) -> int:
    try:
        os.makedirs(os.path.dirname(path), mode=_DIRECTORY_MODE, exist_ok=True)
        flags = os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT | flags, _MODE)
        except OSError as error:
            if error.errno != errno.EROFS:
                raise
            return os.open(path, os.O_RDONLY | flags)  # an existing file can be locked
    except OSError as error:
        is_denied = error.errno in {errno.EACCES, errno.EPERM}
        raise AgentStateUnusable(
            f"to lock {path}",
            found=str(error.strerror),
            do="run it as root" if is_denied else "make it writable, or free some space",
        ) from error


def _is_at(fd: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except OSError:
        return False
