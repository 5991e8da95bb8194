"""Turn a process into the shim: what ``start`` passes to it, and what it changes in itself.

The verb and the shim are two processes. The verb parses, writes files and creates the socket, then
answers and exits. The shim is forked from the fork server before the verb runs, and has written to
as little memory as possible when it gets the listener, because each page that it writes to is
copied.

The two share a socket pair. The verb sends the request and the listener. The waiting process reads
all of it and sends its pid. Then it waits until the verb sends ``GO``: a verb that has given up has
forked a shim itself, and two shims must not serve one socket. The waiting process exits when the
other end of the pair is closed.

Nothing may depend on whether the fork server or the verb has forked a shim. So this module sets
everything that a process inherits: process group, descriptors, signals, umask, working directory,
environment, OOM score, name.

Source: unix(7) SCM_RIGHTS, SOCK_SEQPACKET; containerd pkg/shim (the start of its own shims);
proc(5).
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
from typing import Final, NamedTuple, NoReturn

from api.errors import one_line, type_name
from shim import PROGRAM, bundle, forked, processes, sockets

GO: Final = b"!"

# Seconds for the waiting process to read the request, which takes less than a millisecond.
_PATIENCE: Final = 1.0
_LARGEST_REQUEST: Final = 1 << 18

_LISTENER: Final = 3

# systemd's value for services, and so that of runc and its hooks below containerd's own shim. Our
# own files have explicit modes instead.
UMASK: Final = 0o022


class ShimRequest(NamedTuple):
    """The properties of the shim to become."""

    bundle_path: str  # the first container's bundle, which becomes the working directory
    container_id: str  # the first container
    namespace: str  # containerd's namespace
    address: str  # containerd's gRPC address
    ttrpc_address: str  # where events are sent
    socket_path: str  # the file of the listening socket
    debug: bool  # whether to log each step
    oom_score_adj: int | None  # the shim's score; None for no change
    environment: dict[str, str]  # the shim's whole environment


def channel() -> tuple[socket.socket, socket.socket]:
    """Return the ends of a connection between a verb and the process that becomes its shim."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def offer(waiting: socket.socket, listener: int, request: ShimRequest) -> int:
    """Send a request to the waiting process.

    Args:
        waiting: the verb's end of the socket pair.
        listener: the listening socket.
        request: which shim to become.

    Returns:
        Its pid, while it waits for :func:`commit`; 0 if it is gone or does not answer.
    """
    try:
        waiting.settimeout(_PATIENCE)
        socket.send_fds(waiting, [json.dumps(request).encode()], [listener])
        return int(waiting.recv(16) or b"0")
    except (OSError, ValueError):
        return 0


def commit(waiting: socket.socket) -> bool:
    """Let the waiting process become the shim.

    Returns:
        Whether it still existed.
    """
    try:
        return waiting.send(GO) == len(GO)
    except OSError:
        return False


def accept(channel: socket.socket) -> tuple[int, ShimRequest] | None:
    """Wait for a request, in the process that becomes the shim.

    Returns:
        The listener and the request; None if none will come.
    """
    content, fds, _, _ = socket.recv_fds(channel, _LARGEST_REQUEST, 1, socket.MSG_CMSG_CLOEXEC)
    if not fds:
        return None
    channel.send(str(os.getpid()).encode())
    if channel.recv(len(GO)) != GO:
        return None
    return fds[0], ShimRequest(*json.loads(content))


def become_shim(listener_fd: int, request: ShimRequest) -> NoReturn:
    """Turn this newly forked process with a single thread into a shim.

    Args:
        listener_fd: the listening socket. All other descriptors are closed.
        request: the shim to become. Its bundle becomes the working directory, its environment ours.
    """
    try:
        # First, because containerd waits until all processes have closed the answer's pipe.
        _keep_only(listener_fd)
        forked.lead_group()
        os.umask(UMASK)
        os.chdir(request.bundle_path)
        if os.environ != request.environment:
            os.environ.clear()
            os.environ.update(request.environment)
        if request.oom_score_adj is not None:
            _set_oom_score_adj(request.oom_score_adj)
        names = ["-namespace", request.namespace, "-id", request.container_id]
        processes.set_command_line([PROGRAM, *names, "-address", request.address])
        # Imported here for processes not from a fork server: containerd already has its answer.
        from shim.pod.main import main  # noqa: PLC0415

        main(
            listener_fd=_LISTENER,
            container_id=request.container_id,
            namespace=request.namespace,
            ttrpc_address=request.ttrpc_address,
            socket_path=request.socket_path,
            debug=request.debug,
        )
    except BaseException as error:  # noqa: BLE001 - there is no caller to raise it to
        _report(request.bundle_path, error)
        path = request.socket_path
        sockets.retire(path, sockets.identity(path), regardless=True)
    os._exit(1)


def _keep_only(listener_fd: int) -> None:
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    # Duplicates above all targets, so that no step overwrites what a later one needs.
    null_high = fcntl.fcntl(null, fcntl.F_DUPFD_CLOEXEC, _LISTENER + 1)
    listener_high = fcntl.fcntl(listener_fd, fcntl.F_DUPFD_CLOEXEC, _LISTENER + 1)
    for standard in (0, 1, 2):
        os.dup2(null_high, standard)
    os.dup2(listener_high, _LISTENER, inheritable=False)
    forked.close_others({0, 1, 2, _LISTENER})


def _set_oom_score_adj(value: int) -> None:
    try:
        with open("/proc/self/oom_score_adj", "wb", buffering=0) as file:
            file.write(str(value).encode())
    except OSError:
        pass  # lowering it needs CAP_SYS_RESOURCE, which a user namespace does not have


def _report(bundle_path: str, error: BaseException) -> None:
    """Report to containerd's log, which reads the bundle's fifo, why there is no shim."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = f" at {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace else ""
    line = one_line(f"{type_name(error)}: {error}{where}").replace('"', "'")
    try:
        log = os.path.join(bundle_path, bundle.LOG)
        fd = os.open(log, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
        os.write(fd, f'level=error msg="the shim could not start: {line}"\n'.encode())
    except OSError:
        pass  # there is no reader
