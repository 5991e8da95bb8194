"""Cover files of a container's procfs with other content, before the container starts.

A low-level runtime rightly refuses mounts below /proc, because the image may influence the paths
that it resolves. An OCI hook would be a program of ours inside the container, which we avoid. But
between ``create`` and ``start`` the container is complete while none of its code runs: its init
waits in its own mount namespace. So a thread of the shim briefly joins that namespace and mounts
there (:func:`in_container`). It executes nothing in it and trusts nothing in it:

- A container in the host's mount namespace stays unchanged.
- The thread imports nothing, and then ends. It has its own root and working directory, so other
  threads are not affected. (A forked process would cost ten times as much, because the shim is
  large.) The shim waits at most :data:`_TIMEOUT` for it, since a hostile file system may block it.
- The staged file is first cloned as a mount outside of the container: private, read-only, without
  set-user-id, devices and programs.
- /proc must be a procfs by the container's mount table, its type and its root inode, and not behind
  a link. The covered path must be a regular file on the same mount. A file with a mount on it stays
  unchanged.
- The container's /proc is made private first. With shared propagation, a mount below it would
  appear wherever else /proc is mounted, including the host.

A file that cannot be covered is reported, but is not an error: the container's device rules still
deny it every GPU that it was not granted.

CRIU refuses to save mounts that the runtime did not make, so the files are uncovered for a
checkpoint and covered again afterwards. A restored container runs for some milliseconds before its
files are covered; drivers read them when they first open a GPU.

Source: mount_namespaces(7), setns(2), unshare(2) CLONE_FS, open_tree(2), move_mount(2),
mount_setattr(2), openat2(2), proc_pid_mountinfo(5).
"""

from __future__ import annotations

import _thread
import errno
import os
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from api.errors import one_line
from hooks.image.openat2 import open_without_links
from shim import forked, syscalls

# By path: the mount to attach, or None to detach the present one.
Tasks = Mapping[str, int | None]
# Takes a list for the descriptors that it opens; returns each task's result.
Work = Callable[[list[int]], dict[str, str]]

COVERED: Final = "covered"
UNCOVERED: Final = "uncovered"

_PROC: Final = "/proc/"
_PROC_ROOT_INODE: Final = 1
_ATTRIBUTES: Final = (
    syscalls.MOUNT_ATTR_RDONLY
    | syscalls.MOUNT_ATTR_NOSUID
    | syscalls.MOUNT_ATTR_NODEV
    | syscalls.MOUNT_ATTR_NOEXEC
)
_ABSENT: Final = "its procfs does not have the file"
_NO_PROC: Final = "its /proc is not a procfs"

# Seconds for the thread, which takes a millisecond.
_TIMEOUT: Final = 5.0


async def cover(pid: int, files: Mapping[str, str]) -> dict[str, str]:
    """Cover files of a container's procfs.

    Args:
        pid: the pid of the container's init, a child of ours that is not reaped.
        files: for each path inside the container, the path of its new content on the host.

    Returns:
        For each path :data:`COVERED`, or the reason against it.
    """
    mounts, states = _prepare(files)
    return states | await _in_container(pid, mounts, COVERED)


def _prepare(files: Mapping[str, str]) -> tuple[dict[str, int], dict[str, str]]:
    """Return the mounts to attach, by path, and the reasons of files without one."""
    mounts: dict[str, int] = {}
    states: dict[str, str] = {}
    for path, source in files.items():
        # All procfs mounts of a kernel have the same files, except those of processes.
        if path.startswith(_PROC) and not os.path.lexists(path):
            states[path] = _ABSENT
            continue
        try:
            mounts[path] = _clone(source)
        except OSError as error:
            states[path] = f"to mount {source}: {forked.reason(error)}"
    return mounts, states


def _clone(source: str) -> int:
    mount = syscalls.clone_mount(source)
    try:
        syscalls.set_mount_attributes(mount, _ATTRIBUTES, syscalls.MS_PRIVATE)
    except OSError:
        os.close(mount)
        raise
    return mount


async def uncover(pid: int, paths: Sequence[str]) -> dict[str, str]:
    """Undo :func:`cover`.

    Args:
        pid: the pid of the container's init, a child of ours that is not reaped.
        paths: the covered paths.

    Returns:
        For each path :data:`UNCOVERED`, or the reason against it.
    """
    return await _in_container(pid, dict.fromkeys(paths), UNCOVERED)


async def _in_container(pid: int, tasks: Tasks, done: str) -> dict[str, str]:
    """Execute tasks in the container's mount namespace, and close their descriptors."""

    def work(opened: list[int]) -> dict[str, str]:
        proc = _open_proc(opened)
        return {path: _attempt(proc, path, mount, done, opened) for path, mount in tasks.items()}

    return await in_container(pid, tasks, work, lambda: _refusal(pid))


async def in_container(
    pid: int, tasks: Tasks, work: Work, refuse: Callable[[], str] = str
) -> dict[str, str]:
    """Work in a container's mount namespace.

    Args:
        pid: the pid of the container's init, a child of ours that is not reaped.
        tasks: the tasks, whose descriptors are closed here.
        work: executes them in a thread, where paths are the container's.
        refuse: returns a reason against it; "" for none.

    Returns:
        For each path the result of ``work``, or the reason why there is none.
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
        # The shim's cgroup may allow no more threads.
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
    """Return a container's mount namespace, or why it cannot be entered."""
    try:
        namespace = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        return None, f"its mount namespace: {forked.reason(error)}"
    is_ours = os.fstat(namespace).st_ino == os.stat("/proc/self/ns/mnt").st_ino
    return namespace, "it has no mount namespace of its own" if is_ours else ""


def _refusal(pid: int) -> str:
    """Return the reason not to change a container's procfs; "" for none."""
    try:
        return "" if _has_procfs(pid) else _NO_PROC
    except OSError as error:
        return f"its mounts: {forked.reason(error)}"


def _has_procfs(pid: int) -> bool:
    """Whether a process sees a procfs at /proc, and not another program's file system."""
    last = (b"", b"")
    # Read bytes: a mount point may contain a carriage return.
    with open(f"/proc/{pid}/mountinfo", "rb") as file:
        for line in file:
            of_mount, _, of_system = line.partition(b" - ")
            words = of_mount.split(b" ")
            if words[4] == b"/proc":
                last = (words[3], of_system.split(b" ", 1)[0])
    return last == (b"/", b"proc")


# -- in the thread ---------------------------------------------------------------------------


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
        # With its own root, the thread alone changes its namespace.
        syscalls.unshare(syscalls.CLONE_FS)
        syscalls.setns(namespace, syscalls.CLONE_NEWNS)
        return work(opened)
    except OSError as error:
        return dict.fromkeys(tasks, forked.reason(error))


def _close(fds: Iterable[int | None]) -> None:
    for fd in fds:
        if fd is not None:
            os.close(fd)


def _open_proc(opened: list[int]) -> int:
    """Return the container's /proc, after checking that it is a procfs."""
    # Joining the namespace has moved us to its root.
    root = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    opened.append(root)
    proc = open_without_links(root, "proc", os.O_PATH | os.O_DIRECTORY)
    opened.append(proc)
    if not _is_proc(proc) or os.fstat(proc).st_ino != _PROC_ROOT_INODE:
        raise OSError(0, _NO_PROC)
    return proc


def _attempt(proc: int, path: str, mount: int | None, done: str, opened: list[int]) -> str:
    if not path.startswith(_PROC):
        return "not a file of procfs"
    name = path.removeprefix(_PROC)
    try:
        if mount is None:
            _detach(proc, name, opened)
        else:
            _attach(proc, name, mount, opened)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return _ABSENT
        if error.errno == errno.EXDEV:
            return "something is mounted there already"
        return forked.reason(error)
    return done


def _attach(proc: int, name: str, mount: int, opened: list[int]) -> None:
    target = open_without_links(proc, name, os.O_PATH, one_mount=True)
    opened.append(target)
    if not _is_proc(target) or not stat.S_ISREG(os.fstat(target).st_mode):
        raise OSError(0, "it is not a regular file of procfs")
    syscalls.set_mount_attributes(proc, 0, syscalls.MS_PRIVATE)
    syscalls.attach_mount(mount, target)


def _detach(proc: int, name: str, opened: list[int]) -> None:
    above, _, last = name.rpartition("/")
    directory = open_without_links(proc, above or ".", os.O_PATH | os.O_DIRECTORY, one_mount=True)
    opened.append(directory)
    os.fchdir(directory)
    syscalls.umount(last, syscalls.UMOUNT_NOFOLLOW | syscalls.MNT_DETACH)


def _is_proc(fd: int) -> bool:
    return syscalls.file_system_type(fd) == syscalls.PROC_SUPER_MAGIC
