"""The verb's side of the fork server: finding it, asking it for a shim, leaving one behind.

A Python process that has imported the server's modules can fork a shim in milliseconds, where
a cold one needs a hundred. :mod:`shim.forkserver` is that process; without it everything works,
only slower, and whatever goes wrong with it, the verb forks the shim itself.

Rules
- A shim must not differ by who forked it. What it would inherit (namespaces, cgroup, limits,
  capabilities, security context, scheduling) is part of the fork server's name, so a verb in
  other surroundings does not even find it. What can be set per shim is in the request.
- The forked child does nothing before the verb has heard of it and said "go": a verb that lost
  patience has started the shim by itself, and there must not be two on one socket.
- ``NVSHIM_FORK_SERVER=0`` in containerd's environment turns all of it off.

Source: unix(7) SCM_RIGHTS, SO_PEERCRED; proc(5).
"""

from __future__ import annotations

import _socket
import fcntl
import os
import struct
import sys

from shim.address import digest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final, NoReturn

# The C module under signal: the public one imports enum, which costs 6 ms.
if TYPE_CHECKING:
    import signal as _signal
else:
    import _signal

SWITCH: Final = "NVSHIM_FORK_SERVER"

# Seconds. A fork takes some milliseconds; this is for a machine that hardly moves.
_PATIENCE: Final = 1.0
# Until a connection is accepted; for that a fork server need not even fork.
_STEP: Final = 0.2
_LONGEST_PATH: Final = 106
_CREDENTIALS: Final = struct.Struct("iII")  # struct ucred: pid, uid, gid

LENGTH: Final = struct.Struct("=I")
FD_SIZE: Final = 4
ACCEPTED: Final = b","
GO: Final = b"!"

# The descriptor under which the fork server finds the lock that makes it the only one.
LOCK_FD: Final = 3

# The command line of a shim is written over that of the process it was forked from; ids of
# containers and namespaces may have 76 bytes each.
_ROOM_FOR_NAMES: Final = "-room=" + "." * 320

_NAMESPACES: Final = ("cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts")
_LINKS: Final = (*(f"ns/{name}" for name in _NAMESPACES), "root")
_CHUNK: Final = 1 << 13
_STATUS_LINES: Final = (
    b"Uid:", b"Gid:", b"Groups:", b"Cap", b"NoNewPrivs:", b"Seccomp", b"Cpus_allowed:",
    b"Mems_allowed:", b"THP_enabled:",
)  # fmt: skip


class Request:
    """What a shim has to know, as it crosses the socket.

    Attributes:
        bundle_path, container_id, namespace, address, ttrpc_address, socket_path, debug,
        oom_score_adj: as :func:`shim.detach.become_server` takes them.
        environment: the whole environment of the shim.
    """

    __slots__ = (
        "address",
        "bundle_path",
        "container_id",
        "debug",
        "environment",
        "namespace",
        "oom_score_adj",
        "socket_path",
        "ttrpc_address",
    )

    def __init__(
        self,
        *,
        bundle_path: str,
        container_id: str,
        namespace: str,
        address: str,
        ttrpc_address: str,
        socket_path: str,
        debug: bool,
        oom_score_adj: int | None,
        environment: dict[str, str],
    ) -> None:
        self.bundle_path = bundle_path
        self.container_id = container_id
        self.namespace = namespace
        self.address = address
        self.ttrpc_address = ttrpc_address
        self.socket_path = socket_path
        self.debug = debug
        self.oom_score_adj = oom_score_adj
        self.environment = environment

    def encode(self) -> bytes:
        """The request as bytes: texts with a zero between them, which none can contain."""
        texts = [
            self.bundle_path,
            self.container_id,
            self.namespace,
            self.address,
            self.ttrpc_address,
            self.socket_path,
            "1" if self.debug else "",
            "" if self.oom_score_adj is None else str(self.oom_score_adj),
            *(f"{name}={value}" for name, value in self.environment.items()),
        ]
        return b"\0".join(os.fsencode(text) for text in texts)

    @classmethod
    def decode(cls, content: bytes) -> Request:
        """The request from its bytes.

        Raises:
            ValueError: they are not what :meth:`encode` writes.
        """
        texts = [os.fsdecode(text) for text in content.split(b"\0")]
        bundle, container_id, namespace, address, ttrpc, path, debug, score, *variables = texts
        return cls(
            bundle_path=bundle,
            container_id=container_id,
            namespace=namespace,
            address=address,
            ttrpc_address=ttrpc,
            socket_path=path,
            debug=bool(debug),
            oom_score_adj=int(score) if score else None,
            environment=dict(variable.split("=", 1) for variable in variables),
        )


def enabled() -> bool:
    """Whether fork servers may be used at all."""
    return os.environ.get(SWITCH, "1") != "0"


def server_path(directory: str, address: str) -> str:
    """Where the fork server for our surroundings listens.

    Args:
        directory: the directory of sockets, which is ours alone.
        address: containerd's gRPC address.

    Returns:
        The path; empty if it would not fit a socket's address.
    """
    named = [os.fsencode(address), os.fsencode(os.path.abspath(sys.argv[0])), *surroundings()]
    path = os.path.join(directory, "f" + digest(b"\0".join(named))[:40])
    return path if len(os.fsencode(path)) <= _LONGEST_PATH else ""


def ask(path: str, listener: int, request: Request) -> int:
    """Have a shim forked by the fork server.

    Args:
        path: where the fork server listens.
        listener: the socket that the shim is to serve.
        request: everything else.

    Returns:
        The shim's pid; 0 if there is no fork server, or it did not do it.
    """
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
    try:
        connection.settimeout(_PATIENCE)
        connection.connect(path)
        if peer_is_another(connection):
            return 0
        content = request.encode()
        rights = listener.to_bytes(FD_SIZE, sys.byteorder)
        # The descriptor travels with the first byte.
        connection.sendmsg(
            [LENGTH.pack(len(content))], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)]
        )
        connection.sendall(content)
        if not _accepted(connection):
            return 0
        connection.settimeout(_PATIENCE)
        pid = int(connection.recv(16) or b"0")
        if pid > 0:
            connection.sendall(GO)
    except (OSError, ValueError):
        return 0
    else:
        return pid
    finally:
        connection.close()


def explain_difference(one: list[bytes], other: list[bytes]) -> str:
    """What of two processes' surroundings differs, by its name in /proc/PID; empty if nothing."""
    names = [*_LINKS, "cgroup", "limits", "attr/current"]
    lines = {line.partition(b":")[0].decode() for line in set(one) ^ set(other) if b":\t" in line}
    differing = [name for name, a, b in zip(names, one, other, strict=False) if a != b]
    return ", ".join([*differing, *sorted(lines)]) or ("scheduling" if one != other else "")


def _accepted(connection: _socket.socket) -> bool:
    """Whether a connection is taken; one that is frozen does not, and is not waited for."""
    connection.settimeout(_STEP)
    for _ in range(round(_PATIENCE / _STEP)):
        try:
            return connection.recv(len(ACCEPTED)) == ACCEPTED
        except TimeoutError:
            state = _content(f"/proc/{peer_process(connection)}/stat").rpartition(b")")[2]
            if not state.startswith(b" R"):
                return False
    return False


def peer_is_another(connection: _socket.socket) -> bool:
    """Whether who is at the other end has another uid or gid than we."""
    _, uid, gid = _peer(connection)
    return (uid, gid) != (os.geteuid(), os.getegid())


def peer_process(connection: _socket.socket) -> int:
    """The pid of who is at the other end."""
    return _peer(connection)[0]


def _peer(connection: _socket.socket) -> tuple[int, int, int]:
    raw = connection.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(raw)
    return pid, uid, gid


def leave_behind(path: str, address: str) -> None:
    """Start a fork server for the next verb, unless one is there or on its way.

    Args:
        path: where it is to listen.
        address: containerd's gRPC address, for whoever looks at the process.
    """
    try:
        lock = open_lock(path)
    except OSError:
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Until it can remove its files when it is told to end.
        _signal.pthread_sigmask(_signal.SIG_BLOCK, (_signal.SIGTERM,))
        if os.fork() == 0:
            become_fork_server(path, address, lock)
    except OSError:
        return  # another one is there, or there is no room for a process: nobody needs it


def become_fork_server(path: str, address: str, lock: int, *flags: str) -> NoReturn:
    """Execute the fork server in this process, which blocks SIGTERM.

    Args:
        path: where it is to listen.
        address: containerd's gRPC address, for whoever looks at the process.
        lock: the descriptor of the locked file beside the path.
        flags: more of its flags.
    """
    # An interpreter of its own: nothing of this verb is in the memory that shims will share.
    try:
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        # A duplicate above all targets, so that no step overwrites what a later one needs.
        high = fcntl.fcntl(lock, fcntl.F_DUPFD_CLOEXEC, 10)
        for standard in (0, 1, 2):
            os.dup2(null, standard)
        os.dup2(high, LOCK_FD)
        os.setpgid(0, 0)
        program = os.path.abspath(sys.argv[0])
        words = ["-address", address, "-socket", path, *flags, _ROOM_FOR_NAMES, "fork-server"]
        # By this interpreter: in a self-contained tree the program's first line cannot name it.
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
        OSError: it cannot be made.
    """
    return os.open(lock_path(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def lock_path(path: str) -> str:
    """The file whose lock a fork server holds while it lives."""
    return f"{path}.lock"


def surroundings(process: int = 0) -> list[bytes]:
    """What a process hands on to its children and cannot, or should not, change for them.

    Args:
        process: its pid; 0 for this one.
    """
    folder = f"/proc/{process or 'self'}"
    parts = [_link(f"{folder}/{name}") for name in _LINKS]
    parts += [_content(f"{folder}/{name}") for name in ("cgroup", "limits", "attr/current")]
    status = _content(f"{folder}/status").splitlines()
    parts += [line for line in status if line.startswith(_STATUS_LINES)]
    scheduling = os.sched_getscheduler(process), os.getpriority(os.PRIO_PROCESS, process)
    parts.append("{} {}".format(*scheduling).encode())
    return parts


def _link(path: str) -> bytes:
    try:
        return os.fsencode(os.readlink(path))
    except OSError:
        return b""


def _content(path: str) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""  # this kernel has no such file
    try:
        content = b""
        while chunk := os.read(fd, _CHUNK):
            content += chunk
    except OSError:
        return b""
    finally:
        os.close(fd)
    return content
