"""System calls that Python's standard library lacks.

Each raises OSError with the kernel's errno.

Source: mount(2), umount(2), fsopen(2), open_tree(2), move_mount(2), mount_setattr(2), fstatfs(2),
prctl(2), unshare(2), setns(2), clone(2), pivot_root(2), seccomp(2), signal(2), inotify(7).
"""

from __future__ import annotations

import ctypes
import os
import signal
import stat
from typing import Final

MS_RDONLY: Final = 1
MS_NOSUID: Final = 1 << 1
MS_NODEV: Final = 1 << 2
MS_NOEXEC: Final = 1 << 3
MS_SYNCHRONOUS: Final = 1 << 4
MS_REMOUNT: Final = 1 << 5
MS_MANDLOCK: Final = 1 << 6
MS_DIRSYNC: Final = 1 << 7
MS_NOSYMFOLLOW: Final = 1 << 8
MS_NOATIME: Final = 1 << 10
MS_NODIRATIME: Final = 1 << 11
MS_BIND: Final = 1 << 12
MS_REC: Final = 1 << 14
MS_UNBINDABLE: Final = 1 << 17
MS_PRIVATE: Final = 1 << 18
MS_SLAVE: Final = 1 << 19
MS_SHARED: Final = 1 << 20
MS_RELATIME: Final = 1 << 21
MS_STRICTATIME: Final = 1 << 24

MNT_DETACH: Final = 2
MNT_EXPIRE: Final = 4
UMOUNT_NOFOLLOW: Final = 8

CLONE_FS: Final = 0x200
CLONE_FILES: Final = 0x400
CLONE_PARENT: Final = 0x8000
CLONE_NEWNS: Final = 0x20000
CLONE_NEWUTS: Final = 0x4000000
CLONE_NEWIPC: Final = 0x8000000
CLONE_NEWUSER: Final = 0x10000000
CLONE_NEWPID: Final = 0x20000000
CLONE_NEWNET: Final = 0x40000000

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_SECCOMP: Final = 22
_PR_SET_SECUREBITS: Final = 28
_PR_SET_CHILD_SUBREAPER: Final = 36
_PR_SET_NO_NEW_PRIVS: Final = 38
_PR_SCHED_CORE: Final = 62
_PR_SCHED_CORE_CREATE: Final = 1
_PIDTYPE_PGID: Final = 2
_SECCOMP_MODE_FILTER: Final = 2
_SIG_DFL, _SIG_IGN = ctypes.c_void_p(0), ctypes.c_void_p(1)
_SECBIT_NOROOT, _SECBIT_NOROOT_LOCKED = 1, 2
_SOCK_FILTER_SIZE: Final = 8

# IN_MODIFY, IN_ATTRIB, IN_CLOSE_WRITE, IN_MOVED_FROM, IN_MOVED_TO, IN_CREATE, IN_DELETE,
# IN_DELETE_SELF, IN_MOVE_SELF, IN_ONLYDIR
_IN_CHANGES: Final = 0x2 | 0x4 | 0x8 | 0x40 | 0x80 | 0x100 | 0x200 | 0x400 | 0x800 | 0x1000000
_IN_WRITTEN: Final = 0x2 | 0x8

# System calls without a function in libc, by machine.
_CLONE: Final = {"x86_64": 56, "aarch64": 220}
_PIVOT_ROOT: Final = {"x86_64": 155, "aarch64": 41}

# The newer ones have the same number on every machine.
_OPEN_TREE: Final = 428
_MOVE_MOUNT: Final = 429
_FSOPEN: Final = 430
_FSCONFIG: Final = 431
_FSMOUNT: Final = 432
_MOUNT_SETATTR: Final = 442

MOUNT_ATTR_RDONLY: Final = 0x1
MOUNT_ATTR_NOSUID: Final = 0x2
MOUNT_ATTR_NODEV: Final = 0x4
MOUNT_ATTR_NOEXEC: Final = 0x8
_MOUNT_ATTR_IDMAP: Final = 0x100000

PROC_SUPER_MAGIC: Final = 0x9FA0

_AT_FDCWD: Final = -100
_AT_SYMLINK_NOFOLLOW: Final = 0x100
_AT_EMPTY_PATH: Final = 0x1000
_AT_RECURSIVE: Final = 0x8000
_OPEN_TREE_CLONE: Final = 1
_FSOPEN_CLOEXEC, _FSMOUNT_CLOEXEC, _FSCONFIG_CMD_CREATE = 1, 1, 6
_NULL: Final = os.makedev(1, 3)
_MOVE_MOUNT_F_EMPTY_PATH, _MOVE_MOUNT_T_EMPTY_PATH = 0x4, 0x40
# struct statfs has 120 bytes on 64-bit machines, of which the first long is the type.
_STATFS_LONGS: Final = 32

_libc = ctypes.CDLL(None, use_errno=True)
# From malloc.h, and glibc's default, which it raises when a larger block is freed.
_M_MMAP_THRESHOLD: Final = -3
_LARGE_BLOCK: Final = 1 << 17
_M_ARENA_MAX: Final = -8

_libc.mount.argtypes = (
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_ulong,
    ctypes.c_char_p,
)
_libc.umount2.argtypes = (ctypes.c_char_p, ctypes.c_int)
_libc.prctl.argtypes = (ctypes.c_int, *(ctypes.c_ulong,) * 4)
_libc.unshare.argtypes = (ctypes.c_int,)
_libc.setns.argtypes = (ctypes.c_int, ctypes.c_int)
_libc.syscall.restype = ctypes.c_long


def give_back_large_blocks() -> None:
    """Make glibc return freed large blocks of memory to the kernel.

    By default, glibc allocates the next block of that size from its heap, and keeps it there. A
    long-lived process would keep twice the size of the largest spec that it has ever read.

    Source: mallopt(3).
    """
    _set_malloc(_M_MMAP_THRESHOLD, _LARGE_BLOCK)


def use_one_heap() -> None:
    """Make new threads use the heap of the first one.

    By default, glibc creates a heap for nearly each thread, up to eight per processor, and they
    cannot use each other's free memory.

    Source: mallopt(3).
    """
    _set_malloc(_M_ARENA_MAX, 1)


def _set_malloc(parameter: int, value: int) -> None:
    mallopt = getattr(_libc, "mallopt", None)
    if mallopt is not None:  # musl lacks it, and does not need it
        mallopt(parameter, value)


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    """Mount, remount, or change the propagation of a mount.

    Args:
        source: the source; "" where the kernel ignores it.
        target: the mount point; links are followed.
        kind: the file system's type; "" where the kernel ignores it.
        flags: the ``MS_…`` flags.
        data: the file system's own options, less than a page.
    """
    encoded = [os.fsencode(text) if text else None for text in (source, kind, data)]
    _check(_libc.mount(encoded[0], os.fsencode(target), encoded[1], flags, encoded[2]))


def umount(target: str, flags: int = UMOUNT_NOFOLLOW) -> None:
    """Unmount the topmost mount at a path.

    Args:
        target: the mount point.
        flags: ``MNT_DETACH``, ``MNT_EXPIRE``, ``UMOUNT_NOFOLLOW``.
    """
    _check(_libc.umount2(os.fsencode(target), flags))


def null_device() -> tuple[int, int]:
    """Create a private null device, on a tmpfs that is attached nowhere.

    Its owner and mode can be changed without effect on the host's /dev/null.

    Returns:
        A descriptor for reading, and one for writing. When their last copies are closed, everything
        is gone.
    """
    context = _call(_FSOPEN, ctypes.c_char_p(b"tmpfs"), ctypes.c_long(_FSOPEN_CLOEXEC))
    try:
        nothing = ctypes.c_void_p(None)
        create = ctypes.c_long(_FSCONFIG_CMD_CREATE)
        _call(_FSCONFIG, ctypes.c_long(context), create, nothing, nothing, ctypes.c_long(0))
        flags = ctypes.c_long(_FSMOUNT_CLOEXEC)
        root = _call(_FSMOUNT, ctypes.c_long(context), flags, ctypes.c_long(0))
    finally:
        os.close(context)
    try:
        os.mknod("null", stat.S_IFCHR | 0o600, _NULL, dir_fd=root)
        os.chmod("null", 0o666, dir_fd=root)  # noqa: S103 - as /dev/null; mknod has a umask
        reading = os.open("null", os.O_RDONLY | os.O_CLOEXEC, dir_fd=root)
        try:
            return reading, os.open("null", os.O_WRONLY | os.O_CLOEXEC, dir_fd=root)
        except OSError:
            os.close(reading)
            raise
    finally:
        os.close(root)


def clone_mount(path: str, *, recursive: bool = False, follow: bool = False) -> int:
    """Return an unattached mount of a file or directory.

    Args:
        path: the file or directory.
        recursive: whether to include mounts below it.
        follow: whether to follow a link at the end of the path.

    Returns:
        A descriptor. Closing it before attaching the mount removes the mount.
    """
    flags = _OPEN_TREE_CLONE | os.O_CLOEXEC
    flags |= (_AT_RECURSIVE if recursive else 0) | (0 if follow else _AT_SYMLINK_NOFOLLOW)
    encoded = ctypes.c_char_p(os.fsencode(path))
    return _call(_OPEN_TREE, ctypes.c_long(_AT_FDCWD), encoded, ctypes.c_long(flags))


def set_mount_attributes(fd: int, attributes: int, propagation: int, *, clear: int = 0) -> None:
    """Change a mount.

    Args:
        fd: the root of the mount.
        attributes: the ``MOUNT_ATTR_…`` flags to set.
        propagation: the ``MS_…`` flag of propagation; 0 to leave it unchanged.
        clear: the ``MOUNT_ATTR_…`` flags to clear.
    """
    _set_mount_attributes(fd, attributes, propagation, 0, clear)


def map_ids(fd: int, users: int) -> None:
    """Map the ids of a mount's files by those of a user namespace.

    Args:
        fd: the root of an unattached mount.
        users: a descriptor of the user namespace.
    """
    _set_mount_attributes(fd, _MOUNT_ATTR_IDMAP, 0, users, 0)


def _set_mount_attributes(
    fd: int, attributes: int, propagation: int, users: int, clear: int
) -> None:
    # struct mount_attr: set, clear, propagation, user namespace
    attr = (ctypes.c_uint64 * 4)(attributes, clear, propagation, users)
    size = ctypes.c_size_t(ctypes.sizeof(attr))
    flags = ctypes.c_long(_AT_EMPTY_PATH)
    empty = ctypes.c_char_p(b"")
    _call(_MOUNT_SETATTR, ctypes.c_long(fd), empty, flags, ctypes.byref(attr), size)


def attach_mount(mount: int, target: int) -> None:
    """Attach a mount from :func:`clone_mount`.

    Args:
        mount: the descriptor of the mount.
        target: an open file or directory to mount it on.
    """
    flags = ctypes.c_long(_MOVE_MOUNT_F_EMPTY_PATH | _MOVE_MOUNT_T_EMPTY_PATH)
    empty = ctypes.c_char_p(b"")
    _call(_MOVE_MOUNT, ctypes.c_long(mount), empty, ctypes.c_long(target), empty, flags)


def file_system_type(fd: int) -> int:
    """Return the magic number of an open file's file system."""
    buffer = (ctypes.c_long * _STATFS_LONGS)()
    _check(_libc.fstatfs(fd, ctypes.byref(buffer)))
    return buffer[0]


def sync_file_system(fd: int) -> None:
    """Write a file system's pending data to its disk.

    Args:
        fd: an open file on that file system.
    """
    _check(_libc.syncfs(fd))


def unshare(flags: int) -> None:
    """Give the calling thread its own copy of shared state.

    Args:
        flags: ``CLONE_FS`` (working directory, root, umask), ``CLONE_FILES`` (descriptors),
            ``CLONE_NEW…`` (namespaces).
    """
    _check(_libc.unshare(flags))


def set_child_subreaper(*, enabled: bool = True) -> None:
    """Start or stop being the parent of orphans among our descendants."""
    _check(_libc.prctl(_PR_SET_CHILD_SUBREAPER, int(enabled), 0, 0, 0))


def stop_catching(number: int, *, ignore: bool = False) -> None:
    """Let the kernel handle a signal. The interpreter's own table stays unchanged.

    Args:
        number: the signal's number.
        ignore: whether to ignore the signal, instead of the default action.
    """
    _libc.signal(number, _SIG_IGN if ignore else _SIG_DFL)


def create_core_scheduling_domain() -> None:
    """Let our process group share hyper-threads only with itself."""
    _check(_libc.prctl(_PR_SCHED_CORE, _PR_SCHED_CORE_CREATE, 0, _PIDTYPE_PGID, 0))


def setns(fd: int, kind: int) -> None:
    """Join a namespace.

    Args:
        fd: an open file of the namespace.
        kind: the ``CLONE_NEW…`` flag of its required kind.
    """
    _check(_libc.setns(fd, kind))


def pivot_root_here() -> None:
    """Make the working directory, a mount point, the root, and detach the old root."""
    here = ctypes.c_char_p(b".")
    _check(_libc.syscall(ctypes.c_long(_PIVOT_ROOT[os.uname().machine]), here, here))
    # Both are now mounted at the same place, the old one on top.
    _check(_libc.umount2(b".", MNT_DETACH))
    os.chdir("/")


def clone_sibling() -> int:
    """Fork a child of our parent, in the namespaces unshared for children.

    The interpreter does not know of the fork: the child must do little, and end with execve(2) or
    ``os._exit``.

    Returns:
        The child's pid, or 0 in the child.
    """
    return _clone(CLONE_PARENT | signal.SIGCHLD)


def clone_and_end(flags: int) -> int:
    """Fork a child that exits at once, without sending a signal.

    Args:
        flags: the ``CLONE_NEW…`` flags of the child's namespaces. They can be opened below /proc
            until the child is reaped, with ``__WALL``.

    Returns:
        The child's pid.
    """
    pid = _clone(flags)
    if pid == 0:
        os._exit(0)
    return pid


def _clone(flags: int) -> int:
    # Use a handle that keeps the interpreter's lock, which the child could not acquire again.
    call = ctypes.PyDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    zeros = (ctypes.c_long(0),) * 4
    return _check(call(ctypes.c_long(_CLONE[os.uname().machine]), ctypes.c_long(flags), *zeros))


def inotify_init() -> int:
    """Open a descriptor that reports changes; it is not inherited, and never blocks."""
    return _check(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))


def inotify_watch_changes(fd: int, directory: str, *, content: bool = True) -> int:
    """Watch a directory for files that are created, written, changed, moved or removed.

    Args:
        fd: the result of :func:`inotify_init`.
        directory: the path of the directory, whose own move or removal is also reported.
        content: whether to report writes to files. In a directory of device nodes, each write to
            /dev/null would count.

    Returns:
        The watch number in its events.
    """
    mask = _IN_CHANGES if content else _IN_CHANGES & ~_IN_WRITTEN
    return _check(_libc.inotify_add_watch(fd, os.fsencode(directory), mask))


def die_with_parent(signum: int) -> None:
    """Get a signal when our parent thread ends."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0))


def deprive_root() -> None:
    """Irreversibly deny capabilities to programs that root executes."""
    _check(_libc.prctl(_PR_SET_SECUREBITS, _SECBIT_NOROOT | _SECBIT_NOROOT_LOCKED, 0, 0, 0))


def set_no_new_privileges() -> None:
    """Never gain a privilege by executing a file."""
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))


def filter_system_calls(instructions: bytes) -> None:
    """Apply a filter to every system call from now on.

    Args:
        instructions: an array of ``struct sock_filter``.
    """
    code = ctypes.create_string_buffer(instructions, len(instructions))
    length = len(instructions) // _SOCK_FILTER_SIZE
    # struct sock_fprog
    array = (ctypes.c_size_t * 2)(length, ctypes.addressof(code))
    _check(_libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(array), 0, 0))


def _call(number: int, *arguments: object) -> int:
    return _check(_libc.syscall(ctypes.c_long(number), *arguments))


def _check(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
