"""The fork server, which forks the agent's children that open NVML. It is executed by its path.

    python3 -I -S fork_server.py MODULES

A child lives for one question, or until another process needs the GPUs. Starting Python and
importing pynvml for each child would cost ten times as much as a fork. This process imports
everything that a child needs, and forks for each request. It neither opens NVML nor loads the
driver's library, so the driver cannot block it, and it keeps no GPU open.

MODULES is the directory of pynvml. A request is a message on stdin, a SOCK_SEQPACKET socket::

    {"program": PATH, "arguments": [TEXT, …]}   with descriptors: stdin, stdout, status, and a lock
    {"kill": PID}

The answer to the first one is the child's pid, or a negative errno: ENOENT if PATH is not one of
:data:`_PROGRAMS`. The child has stdin, stdout and, if one was passed, the lock, and no other
descriptor. When it has exited, the server reaps it and writes its exit status to ``status``, as a
number that is negative for a signal. The server kills only children that were not reaped yet, so
the signal never hits a later process with the same pid. When the other end of the socket is closed,
the server exits, and its children with it.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import json
import os
import select
import signal
import socket
import sys
from typing import Any

_ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), os.pardir, os.pardir))
_PROGRAMS = ("hooks.node.nvml_probe", "integration.nvml.child")

_LONGEST = 1 << 16
_MOST_DESCRIPTORS = 4
# A child's descriptors: its streams, and the lock.
_LOCK, _REST = 3, 4
_ALL = 1 << 12
_PR_SET_PDEATHSIG = 1


def main(modules: str) -> None:
    """Fork children until the socket is closed. This function does not return."""
    programs = _load(modules)
    requests = socket.socket(fileno=os.dup(0))
    os.dup2(2, 0)
    ended, wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    poll = select.poll()
    poll.register(requests, select.POLLIN)
    poll.register(ended, select.POLLIN)
    statuses: dict[int, int] = {}
    while True:
        ready = {fd for fd, _ in poll.poll()}
        if ended in ready:
            os.read(ended, _LONGEST)
            _reap(statuses)
        if requests.fileno() in ready:
            message, descriptors, _, _ = socket.recv_fds(requests, _LONGEST, _MOST_DESCRIPTORS)
            if not message:
                os._exit(0)
            request = json.loads(message)
            if "kill" not in request:
                pid = _fork(programs, request, descriptors, statuses)
                requests.send(str(pid).encode())
            elif request["kill"] in statuses:
                os.kill(request["kill"], signal.SIGKILL)


def _load(modules: str) -> dict[str, Any]:
    """Import the programs; return their main functions by path."""
    sys.path += [modules, _ROOT]
    from importlib import import_module  # noqa: PLC0415 - found only with the path above

    from hooks.node.nvml_probe import import_pynvml  # noqa: PLC0415 - the same

    import_pynvml()
    programs = [import_module(name) for name in _PROGRAMS]
    for task in programs[-1].TASKS.values():
        import_module(task)
    gc.collect()
    gc.freeze()
    return {str(program.__file__): program.main for program in programs}


def _fork(
    programs: dict[str, Any],
    request: dict[str, Any],
    descriptors: list[int],
    statuses: dict[int, int],
) -> int:
    """Fork for a request; return the answer, and note where to write the exit status."""
    run = programs.get(request["program"])
    server = os.getpid()
    try:
        pid = os.fork() if run is not None else -errno.ENOENT
    except OSError as error:
        pid = -(error.errno or errno.EAGAIN)
    if run is not None and not pid:
        try:
            _become_child(server, descriptors)
            run(*request["arguments"])
        finally:
            os._exit(1)  # never return into the server's loop
    stdin, stdout, status, *lock = descriptors
    for descriptor in (stdin, stdout, *lock):
        os.close(descriptor)
    if pid > 0:
        statuses[pid] = status
    else:
        os.close(status)
    return pid


def _become_child(server: int, descriptors: list[int]) -> None:
    """Make this process look as if it had been executed, and end it with the server."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != server:
        os._exit(1)
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    stdin, stdout, _, *lock = descriptors
    os.dup2(stdin, 0)
    os.dup2(stdout, 1)
    if lock:
        os.dup2(lock[0], _LOCK)  # replaces a descriptor of the server
    os.closerange(_REST if lock else _LOCK, _ALL)


def _reap(statuses: dict[int, int]) -> None:
    """Reap the children that have ended, and report their exit statuses."""
    while statuses:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        pipe = statuses.pop(pid)
        try:
            os.write(pipe, str(os.waitstatus_to_exitcode(status)).encode())
        except BrokenPipeError:  # the client has dropped the child
            pass
        os.close(pipe)


if __name__ == "__main__":
    main(*sys.argv[1:])
