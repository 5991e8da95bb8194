"""Covering files of a container's procfs with another content, before it starts.

A low-level runtime refuses mounts below /proc, rightly: it resolves paths that the image may have
had a hand in. And a hook is a program of ours in the container's surroundings, of which there
is none. But between ``create`` and ``start`` the container is complete, and nothing of it runs:
its init waits in its own mount namespace. So a process forked from the shim joins that
namespace and mounts there, without executing or believing anything in it:

- What is mounted is cloned from the staged file before, outside: read-only, without
  set-user-id, devices and programs, private.
- /proc has to be a procfs, seen by its own type and root inode, and not behind a link. What is
  covered has to be a regular file of that same mount; a file on which something is mounted
  already is left to whoever did that.
- The container's /proc is made private first: with shared propagation, a mount below it would
  appear wherever else that mount is, the host included.
- A container in the host's mount namespace is left alone.
- The process has a time limit, as a hostile file system may hold up whoever looks at it.

What could not be covered is told, and is no error: the container's own device rules keep it from
every GPU that is not granted.

CRIU refuses to save a mount that it did not see made, so the files are uncovered for a checkpoint
and covered again after it. A restored container has run for some milliseconds when its files are
covered; who reads them does so when it first opens a GPU.

Source: mount_namespaces(7), setns(2), open_tree(2), move_mount(2), mount_setattr(2), openat2(2).
"""

from __future__ import annotations

import errno
import os
import signal
import stat
import sys
from typing import TYPE_CHECKING, Final, NoReturn

import anyio

from api.errors import one_line
from hooks.openat2 import open_without_links
from shim import forked, syscalls

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shim.reaper import Child, Reaper

    # By the file's path: the mount to attach there, or None to detach the one that is there.
    Tasks = Mapping[str, int | None]

COVERED: Final = "covered"
UNCOVERED: Final = "uncovered"

# Seconds that it may take; it takes some milliseconds.
_TIMEOUT: Final = 5.0
_LONGEST_REPORT: Final = 1 << 16
_PROC: Final = "/proc/"
_PROC_ROOT_INODE: Final = 1
_ATTRIBUTES: Final = (
    syscalls.MOUNT_ATTR_RDONLY
    | syscalls.MOUNT_ATTR_NOSUID
    | syscalls.MOUNT_ATTR_NODEV
    | syscalls.MOUNT_ATTR_NOEXEC
)


async def cover(reaper: Reaper, pid: int, files: Mapping[str, str]) -> dict[str, str]:
    """Cover files of a container's procfs.

    Args:
        reaper: who waits for the forked process.
        pid: the container's init; a child of ours that is not reaped.
        files: the host's path of each content, by the path that it is to have inside.

    Returns:
        What came of each: :data:`COVERED`, or why it is not.
    """
    mounts: dict[str, int | None] = {}
    states: dict[str, str] = {}
    try:
        for path, source in files.items():
            try:
                mount = syscalls.clone_mount(source)
                mounts[path] = mount
                syscalls.set_mount_attributes(mount, _ATTRIBUTES, syscalls.MS_PRIVATE)
            except OSError as error:
                states[path] = f"to mount {source}: {forked.reason(error)}"
        ready = {path: mount for path, mount in mounts.items() if path not in states}
        return states | await _in_container(reaper, pid, ready, COVERED)
    finally:
        for fd in mounts.values():
            if fd is not None:
                os.close(fd)


async def uncover(reaper: Reaper, pid: int, paths: Sequence[str]) -> dict[str, str]:
    """Take away what :func:`cover` has mounted.

    Args:
        reaper: who waits for the forked process.
        pid: the container's init; a child of ours that is not reaped.
        paths: of files that are covered.

    Returns:
        What came of each: :data:`UNCOVERED`, or why it is not.
    """
    return await _in_container(reaper, pid, dict.fromkeys(paths), UNCOVERED)


async def _in_container(reaper: Reaper, pid: int, tasks: Tasks, done: str) -> dict[str, str]:
    if not tasks:
        return {}
    try:
        namespace = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        return dict.fromkeys(tasks, f"its mount namespace: {forked.reason(error)}")
    try:
        if os.fstat(namespace).st_ino == os.stat("/proc/self/ns/mnt").st_ino:
            return dict.fromkeys(tasks, "it has no mount namespace of its own")
        report = await _ask_child(reaper, namespace, tasks, done)
    finally:
        os.close(namespace)
    told = dict(
        line.split("\t", 1) for line in report.decode(errors="replace").splitlines() if "\t" in line
    )
    return {path: told.get(path, "the process that was to do it ended without a word")
            for path in tasks}  # fmt: skip


async def _ask_child(reaper: Reaper, namespace: int, tasks: Tasks, done: str) -> bytes:
    reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    child: Child | None = None
    shim = os.getpid()
    report = bytearray()
    try:
        try:
            forked_pid = forked.fork(lambda: _be_child(shim, namespace, tasks, done, writing))
            child = reaper.register(forked_pid)
        finally:
            os.close(writing)
        with anyio.move_on_after(_TIMEOUT):
            while len(report) < _LONGEST_REPORT:
                try:
                    chunk = os.read(reading, _LONGEST_REPORT)
                except BlockingIOError:
                    await anyio.wait_readable(reading)
                    continue
                if not chunk:
                    await child.wait()
                    break
                report += chunk
    finally:
        os.close(reading)
        if child is not None and child.exit is None:
            os.kill(child.pid, signal.SIGKILL)  # not reaped, so the pid is still its own
    return bytes(report)


# -- in the child ----------------------------------------------------------------------------


def _be_child(shim: int, namespace: int, tasks: Tasks, done: str, report: int) -> NoReturn:
    try:
        mounts = {fd for fd in tasks.values() if fd is not None}
        forked.begin(shim, {report, namespace, *mounts})
        os.set_blocking(report, True)
        # From here on every path is the container's: nothing may be imported any more.
        sys.meta_path.clear()
        syscalls.setns(namespace, syscalls.CLONE_NEWNS)
        proc = _open_proc()
        for path, mount in tasks.items():
            state = _attempt(proc, path, mount, done)
            os.write(report, f"{path}\t{one_line(state)}\n".encode())
    except BaseException as error:  # noqa: BLE001 - there is nobody above to raise it to
        for path in tasks:
            os.write(report, f"{path}\t{one_line(forked.reason(error))}\n".encode())
    os._exit(0)


def _open_proc() -> int:
    """The container's /proc, which is a procfs, and from now on private."""
    # Joining the namespace has moved us to its root.
    root = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    proc = open_without_links(root, "proc", os.O_PATH | os.O_DIRECTORY)
    if not _is_proc(proc) or os.fstat(proc).st_ino != _PROC_ROOT_INODE:
        raise OSError(0, "its /proc is no procfs")
    return proc


def _attempt(proc: int, path: str, mount: int | None, done: str) -> str:
    try:
        if not path.startswith(_PROC):
            return "no file of procfs"
        name = path.removeprefix(_PROC)
        if mount is None:
            _detach(proc, name)
        else:
            _attach(proc, name, mount)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return "its procfs does not have the file"
        if error.errno == errno.EXDEV:
            return "something is mounted there already"
        return forked.reason(error)
    return done


def _attach(proc: int, name: str, mount: int) -> None:
    target = open_without_links(proc, name, os.O_PATH, one_mount=True)
    if not _is_proc(target) or not stat.S_ISREG(os.fstat(target).st_mode):
        raise OSError(0, "it is no regular file of procfs")
    syscalls.set_mount_attributes(proc, 0, syscalls.MS_PRIVATE)
    syscalls.attach_mount(mount, target)


def _detach(proc: int, name: str) -> None:
    above, _, last = name.rpartition("/")
    directory = open_without_links(proc, above or ".", os.O_PATH | os.O_DIRECTORY, one_mount=True)
    os.fchdir(directory)
    syscalls.umount(last, syscalls.UMOUNT_NOFOLLOW | syscalls.MNT_DETACH)


def _is_proc(fd: int) -> bool:
    return syscalls.file_system_type(fd) == syscalls.PROC_SUPER_MAGIC
