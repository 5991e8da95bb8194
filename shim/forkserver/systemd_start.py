"""Start a fork server with the node, before the first shim.

systemd starts it (:file:`integration/systemd`) in its own cgroup and with its own limits. But its
shims need containerd's, like the shims of a cold ``start``. So this process asks the kernel which
process listens at containerd's address, and adopts that process's context, where possible. If a
difference remains, it reports it and exits. Otherwise it becomes a normal fork server, but stays
even without requests. If a cold start has left a fork server behind, it first waits for its exit.

Source: unix(7) SO_PEERCRED; cgroups(7); getrlimit(2), prlimit.
"""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import socket
from typing import NoReturn

from shim import sockets
from shim.cgroup import cgroup
from shim.errors import ContainerdNotFound, ProcessContextDiffers
from shim.verbs import warmstart
from shim.verbs.warmstart import explain_difference, process_context


def serve(containerd: str) -> NoReturn:
    """Become the fork server of a containerd.

    Args:
        containerd: the gRPC address of containerd.

    Raises:
        ContainerdNotFound: no process listens there.
        ProcessContextDiffers: shims would not have containerd's process context.
        SocketDirectoryUnusable: there is no directory for the socket.
        SocketPathTooLong: the path of the socket would be too long.
    """
    pid = _listener_of(containerd)
    _take_on_context_of(pid)
    path = warmstart.server_path(sockets.prepare_directory(), containerd)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    warmstart.become_fork_server(path, containerd, _locked(path), "-stay")


def _listener_of(containerd: str) -> int:
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(containerd)
            return warmstart.peer_process(probe)
    except OSError as error:
        raise ContainerdNotFound(
            f"containerd at {containerd or 'no address'}",
            found=os.strerror(error.errno or 0).lower(),
            do="start it first, or name its socket with -address",
        ) from error


def _take_on_context_of(pid: int) -> None:
    problem = ""
    try:
        cgroup.join_those_of(pid)
        for name in (name for name in dir(resource) if name.startswith("RLIMIT_")):
            number = getattr(resource, name)
            resource.setrlimit(number, resource.prlimit(pid, number))
        os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, pid))
    except (OSError, ValueError) as error:
        problem = f"; {error}"
    differs = explain_difference(process_context(pid), process_context())
    if differs:
        raise ProcessContextDiffers(
            f"a fork server like process {pid}, containerd",
            found=f"another process context ({differs}{problem})",
            do="start it as containerd is started: as the same user, without a sandbox of its own",
        )


def _locked(path: str) -> int:
    """Wait for the lock that keeps fork servers unique, and return it."""
    while True:
        lock = warmstart.open_lock(path)
        # Meanwhile SIGTERM may end the process, which leaves nothing behind.
        mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        fcntl.flock(lock, fcntl.LOCK_EX)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if sockets.identity(warmstart.lock_path(path)) == _identity(lock):
            return lock
        os.close(lock)  # its holder has removed it at its exit


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino
