"""Work in a container's mount namespace, in a thread that joins it for a moment.

- A container in the host's mount namespace is left alone.
- The thread imports nothing, and ends. It has its own root and working directory, so no other
  thread notices. (A forked process would cost ten times as much: the shim is large.) It is not
  waited for longer than :data:`_TIMEOUT`: a hostile file system may block it.

Source: mount_namespaces(7), setns(2), unshare(2) CLONE_FS.
"""

from __future__ import annotations

import _thread
import os
from typing import TYPE_CHECKING, Final

from api.errors import one_line
from shim import forked, syscalls

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    # By the path: the mount to attach there, or None to detach the one that is there.
    Tasks = Mapping[str, int | None]
    # Given a list for the descriptors that it opens, what came of each task.
    Work = Callable[[list[int]], dict[str, str]]

# Seconds to wait for the thread, which takes a millisecond.
_TIMEOUT: Final = 5.0


async def in_container(
    pid: int, tasks: Tasks, work: Work, refuse: Callable[[], str] = str
) -> dict[str, str]:
    """Work in a container's mount namespace.

    Args:
        pid: the container's init; a child of ours that is not reaped.
        tasks: what is to be done; the descriptors in it are closed here.
        work: what does it. It is called in a thread; its paths are the container's.
        refuse: says why it is not to be done after all; "" if it is.

    Returns:
        For each path what the work said, or why there was none.
    """
    if not tasks:
        return {}
    namespace, why = _open_namespace(pid)
    why = why or refuse()
    if namespace is None or why:
        _close(fd for fd in (namespace, *tasks.values()))
        return dict.fromkeys(tasks, why)
    ends: tuple[int, ...] = ()
    try:
        ends = reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        _thread.start_new_thread(_enter, (namespace, tasks, work, writing))
    except (OSError, RuntimeError) as error:
        # The shim's cgroup may have no room for a thread.
        _close((namespace, *tasks.values(), *ends))
        return dict.fromkeys(tasks, forked.reason(error))
    try:
        report, _ = await forked.read_report(reading, timeout=_TIMEOUT)
    finally:
        os.close(reading)
    states = dict(
        line.split("\t", 1) for line in report.decode(errors="replace").splitlines() if "\t" in line
    )
    return {path: states.get(path, f"it was not done after {_TIMEOUT} s") for path in tasks}


def _open_namespace(pid: int) -> tuple[int | None, str]:
    """A container's mount namespace, or why it cannot be entered."""
    try:
        namespace = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        return None, f"its mount namespace: {forked.reason(error)}"
    is_ours = os.fstat(namespace).st_ino == os.stat("/proc/self/ns/mnt").st_ino
    return namespace, "it has no mount namespace of its own" if is_ours else ""


def _enter(namespace: int, tasks: Tasks, work: Work, report: int) -> None:
    opened: list[int] = [namespace, *(fd for fd in tasks.values() if fd is not None)]
    try:
        states = _do(namespace, tasks, work, opened)
        for path, state in states.items():
            os.write(report, f"{path}\t{one_line(state)}\n".encode())
    except OSError:
        pass  # the shim has stopped waiting
    finally:
        _close((report, *opened))


def _do(namespace: int, tasks: Tasks, work: Work, opened: list[int]) -> dict[str, str]:
    try:
        # With a root of its own, the thread alone changes its namespace.
        syscalls.unshare(syscalls.CLONE_FS)
        syscalls.setns(namespace, syscalls.CLONE_NEWNS)
        return work(opened)
    except OSError as error:
        return dict.fromkeys(tasks, forked.reason(error))


def _close(fds: Iterable[int | None]) -> None:
    for fd in fds:
        if fd is not None:
            os.close(fd)
