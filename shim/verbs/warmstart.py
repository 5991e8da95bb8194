"""The protocol between the fork server, its client and a cold ``start``; starting a fork server.

A process forked from one with all imports executes a verb in a few milliseconds; a cold one needs a
hundred. :mod:`shim.forkserver` is that server. Its client is :file:`launcher.c`, which starts no
interpreter. If that cannot help, the Python program executes the verb, cold.

The client sends a length, then texts, each followed by a zero byte: the Python program that would
otherwise execute the verb, the number of words, the words, the environment. The fork server sends
``ACCEPTED`` as soon as it has the connection. The process for the verb sends ``READY``, and waits
for ``GO``, which comes with four descriptors (directory, 0, 1, 2). At the end it sends a byte, the
verb's status, and exits.

Rules
- A shim must not inherit from the fork server what it cannot, or should not, change later:
  namespaces, cgroup, limits, capabilities, security context and scheduling. So the caller's process
  context, which comprises these, is part of the fork server's name.
- Without the native launcher a fork server would have no clients, so none is started.
- ``NVSHIM_FORK_SERVER=0`` in containerd's environment turns all of this off.

Source: unix(7) SCM_RIGHTS, SO_PEERCRED; proc(5), namespaces(7), sched(7).
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import struct
import sys
import time
from typing import Final, NoReturn

from shim import files, forked, sockets
from shim.errors import ShimError

SWITCH: Final = "NVSHIM_FORK_SERVER"

# The end of the Python program's name, if the native launcher is next to it.
SUFFIX: Final = ".py"

_CREDENTIALS: Final = struct.Struct("iII")  # struct ucred: pid, uid, gid

LENGTH: Final = struct.Struct("=I")
LARGEST_REQUEST: Final = 1 << 18
ACCEPTED: Final = b","
READY: Final = b"."

READY_LINK: Final = "l"
STARTING_LINK: Final = "s"
"""The first letters of links to a ready fork server, and to one that still imports.

The launcher waits less for the second.
"""

_FNV_OFFSET: Final = 0xCBF29CE484222325
_FNV_PRIME: Final = 0x100000001B3

# The fork server's descriptor of the lock that makes it the only one.
LOCK_FD: Final = 3

# Seconds that it waits before its work, because a starting shim comes first.
_COURTESY: Final = 0.3

# A shim's command line overwrites that of the process that forked it. Ids of containers and
# namespaces may have 76 bytes each.
_ROOM_FOR_NAMES: Final = "-room=" + "." * 320

# The parts of a process' context, by their names in /proc/PID.
_NAMESPACES: Final = ("cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts")
_LINKS: Final = (*(f"ns/{name}" for name in _NAMESPACES), "root")
_FILES: Final = ("cgroup", "limits", "attr/current")
_STATUS_LINES: Final = (
    b"Uid:", b"Gid:", b"Groups:", b"Cap", b"NoNewPrivs:", b"Seccomp", b"Cpus_allowed:",
    b"Mems_allowed:", b"THP_enabled:",
)  # fmt: skip
_CHUNK: Final = 1 << 13


def server_path(directory: str, containerd: str) -> str:
    """Return the path of the socket of the fork server for our process context.

    Args:
        directory: the directory of sockets, which only we can write.
        containerd: containerd's gRPC address.

    Raises:
        SocketPathTooLong: the path does not fit into a socket's address.
    """
    program = os.path.abspath(sys.argv[0])
    named = [os.fsencode(containerd), os.fsencode(program), *process_context()]
    return sockets.path_of(directory, "f" + files.digest(b"\0".join(named))[:40])


def link_name(containerd: str, program: str, kind: str = READY_LINK) -> str:
    """Return the name of the link by which the launcher finds the fork server, next to its socket.

    Args:
        containerd: containerd's gRPC address.
        program: the Python program next to the launcher.
        kind: :data:`READY_LINK` or :data:`STARTING_LINK`.
    """
    value = _FNV_OFFSET
    for text in (containerd, program, os.readlink("/proc/self/ns/mnt")):
        for byte in (*os.fsencode(text), 0):
            value = (value ^ byte) * _FNV_PRIME & 0xFFFFFFFFFFFFFFFF
    return f"{kind}{value:016x}"


def peer_is_another(connection: socket.socket) -> bool:
    """Whether the process at the other end has a different uid or gid."""
    _, uid, gid = _peer(connection)
    return (uid, gid) != (os.geteuid(), os.getegid())


def peer_process(connection: socket.socket) -> int:
    """Return the pid of the process at the other end."""
    return _peer(connection)[0]


def _peer(connection: socket.socket) -> tuple[int, int, int]:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(raw)
    return pid, uid, gid


def leave_behind(containerd: str) -> None:
    """Start a fork server for the next verb, unless one runs or is starting.

    Args:
        containerd: containerd's gRPC address.
    """
    if os.environ.get(SWITCH, "1") == "0" or not sys.argv[0].endswith(SUFFIX):
        return
    if os.environ.get("SCHED_CORE"):
        return  # others' shims must not inherit this process' core-scheduling cookie
    try:
        path = server_path(sockets.prepare_directory(), containerd)
        lock = open_lock(path)
    except (ShimError, OSError):
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Blocked until it can remove its files on SIGTERM.
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))
        if os.fork() == 0:
            become_fork_server(path, containerd, lock, after=_COURTESY)
    except OSError:
        return  # another process has the lock, or no process can be created


def become_fork_server(
    path: str, containerd: str, lock: int, *flags: str, after: float = 0
) -> NoReturn:
    """Execute the fork server in this process, which blocks SIGTERM.

    Args:
        path: its socket.
        containerd: its gRPC address, shown in the command line.
        lock: the descriptor of the locked file next to the socket.
        flags: more flags for it.
        after: seconds to wait first, without the caller's descriptors and directory.
    """
    # A new interpreter: shims will share its memory, which must have nothing of this verb.
    try:
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        # A duplicate above all targets, so that no step overwrites what a later one needs.
        high = fcntl.fcntl(lock, fcntl.F_DUPFD_CLOEXEC, 10)
        for standard in (0, 1, 2):
            os.dup2(null, standard)
        os.dup2(high, LOCK_FD)
        os.setpgid(0, 0)
        program = os.path.abspath(sys.argv[0])
        if after:
            forked.close_others({0, 1, 2, LOCK_FD})
            os.chdir("/")
            time.sleep(after)
        words = ["-address", containerd, "-socket", path, *flags, _ROOM_FOR_NAMES, "fork-server"]
        # With this interpreter, which the program's first line cannot name in a self-contained
        # tree.
        argv = [sys.executable, "-IS", program, *words]
        os.execv(sys.executable, argv)  # noqa: S606 - our own program, and no shell
    finally:
        try:
            os.unlink(lock_path(path))
        finally:
            os._exit(1)


def open_lock(path: str) -> int:
    """Open the file whose lock a fork server holds.

    Raises:
        OSError: the file cannot be created.
    """
    return os.open(lock_path(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def lock_path(path: str) -> str:
    """Return the path of the file whose lock a fork server holds while it lives."""
    return f"{path}.lock"


def process_context(process: int = 0) -> list[bytes]:
    """Return the context of a process, for comparison with another.

    Args:
        process: the pid of the process; 0 for this one.
    """
    folder = f"/proc/{process or 'self'}"
    parts = [_link(f"{folder}/{name}") for name in _LINKS]
    parts += [_content(f"{folder}/{name}") for name in _FILES]
    status = _content(f"{folder}/status").splitlines()
    parts += [line for line in status if line.startswith(_STATUS_LINES)]
    scheduling = os.sched_getscheduler(process), os.getpriority(os.PRIO_PROCESS, process)
    parts.append("{} {}".format(*scheduling).encode())
    return parts


def explain_difference(one: list[bytes], other: list[bytes]) -> str:
    """Return the parts that differ between two contexts, by their names in /proc/PID."""
    names = [*_LINKS, *_FILES]
    lines = {line.partition(b":")[0].decode() for line in set(one) ^ set(other) if b":\t" in line}
    differing = [name for name, a, b in zip(names, one, other, strict=False) if a != b]
    return ", ".join([*differing, *sorted(lines)]) or ("scheduling" if one != other else "")


def _link(path: str) -> bytes:
    try:
        return os.fsencode(os.readlink(path))
    except OSError:
        return b""


def _content(path: str) -> bytes:
    """Return the content of a file in /proc; empty if this kernel has no such file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        found = b""
        while chunk := os.read(fd, _CHUNK):
            found += chunk
    except OSError:
        return b""
    finally:
        os.close(fd)
    return found
