"""Which agent has the node: a lock in its state directory, which ends with the process's life.

::

    STATE/node.lock   locked by the agent that keeps the node; has its process's number
    STATE/pods/UID    locked by the agent of that pod, once it keeps the node, or serves beside it

Rules
- Whoever only asks whether a lock is held has it for a moment, so it is tried for a second.
- A thread of its own holds each lock (:mod:`integration.node.private_file`): a thread that hangs in
  the kernel keeps a killed agent as a zombie, and must not keep its lock.
- Who waits for the lock does so in the kernel, in a thread that the process need not wait for.
- What agents that have ended left in ``pods`` is removed by the next that keeps the node.

Source: flock(2); proc_locks(5).
"""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Self

from integration.agent_errors import AgentRunning, AgentStateUnusable
from integration.agent_status import PODS, pod_path
from integration.detached import aside
from integration.node.private_file import keep_private
from integration.nvml.lock import locked
from shim.causes.agent import LOCK, is_locked

if TYPE_CHECKING:
    from collections.abc import Callable

    from hooks.config import Config

__all__ = ["NodeLock", "holds"]

_MODE: Final = 0o600
_DIRECTORY_MODE: Final = 0o711
# Seconds for one who asks for readiness.
_TO_ASK: Final = 1.0


def _lock_path(config: Config) -> str:
    """The file that an agent holds locked, and writes its pid into."""
    return os.path.join(config.state, LOCK)


def holds(pid: int, config: Config) -> bool:
    """Whether a process is the agent that has the node, as the kernel lists its locks.

    Args:
        pid: its number in our pid namespace.
    """
    try:
        inode = os.stat(_lock_path(config)).st_ino
        with open("/proc/locks", encoding="ascii") as file:
            # "1: FLOCK  ADVISORY  WRITE 4711 00:1a:99 0 EOF"; "->" before what waits for a lock
            rows = [line.split() for line in file]
    except OSError:
        return False
    return any(
        row[1:2] == ["FLOCK"] and row[4] == str(pid) and row[5].rpartition(":")[2] == str(inode)
        for row in rows
    )


class NodeLock:
    """The lock. To be entered; what it holds is let go at the end.

    Raises:
        AgentStateUnusable: there is no place for it.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._path = _lock_path(config)
        self._fd = -1
        self._let_go: Callable[[], None] | None = None
        self._pod: tuple[str, Callable[[], None]] | None = None

    def __enter__(self) -> Self:
        self._fd = _opened(self._path)
        return self

    def __exit__(self, *_: object) -> None:
        if self._pod is not None:
            path, let_go = self._pod
            with suppress(OSError):
                os.unlink(path)
            let_go()
        if self._let_go is None:
            os.close(self._fd)
        else:
            self._let_go()

    @property
    def holder(self) -> str:
        """The number of the process that has it; "unknown" if it does not say."""
        return os.pread(self._fd, 32, 0).decode(errors="replace").strip() or "unknown"

    def held(self) -> AgentRunning:
        """The error for who cannot have it."""
        return AgentRunning(
            "to keep this node's GPUs",
            found=f"another agent, process {self.holder}, holds {self._path}",
            do="stop it first; it may run in a pod",
        )

    def take(self) -> bool:
        """Take it; whether it was to be had."""
        if is_taken := locked(self._fd, fcntl.LOCK_EX, _TO_ASK):
            self._own()
        return is_taken

    async def wait(self) -> None:
        """Take it as soon as it is to be had."""
        await aside(fcntl.flock, self._fd, fcntl.LOCK_EX)
        self._own()

    def show_pod(self, uid: str) -> None:
        """Have it be seen that the agent of a pod does what it is there for.

        Args:
            uid: the pod's; "" for none.

        Raises:
            AgentStateUnusable: it cannot be.
        """
        path = pod_path(self._config, uid)
        while uid and self._pod is None:
            fd = _opened(path)
            locked(fd, fcntl.LOCK_EX, _TO_ASK)
            if _is_at(fd, path):
                self._pod = path, keep_private(fd)
            else:  # it was removed before it was locked
                os.close(fd)

    def _own(self) -> None:
        self._sign()
        self._let_go = keep_private(self._fd)

    def _sign(self) -> None:
        with suppress(OSError):  # a full disk: then it is not known which it is
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)
        pods = os.path.join(self._config.state, PODS)
        with suppress(OSError):  # there are none
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
            return os.open(path, os.O_RDONLY | flags)  # one that was made before can be locked
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
