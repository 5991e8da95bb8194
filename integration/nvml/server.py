"""What forks the agent's children that open NVML: a program of its own, run by path.

    python3 -I -S server.py MODULES

A process that opens NVML lives for one question, or until the GPUs are needed by somebody else; to
start it and import pynvml costs ten times what a fork does. This one has imported all that such a
program needs, and forks for each call. It never opens NVML, nor loads the driver's library, so
nothing of the driver's holds it up, and no GPU is open because of it.

MODULES is the directory where pynvml is. A call is a message on stdin, which is a socket
(SOCK_SEQPACKET)::

    {"program": PATH, "words": [WORD, …]}     with descriptors: stdin, stdout, status, and a lock
    {"kill": PID}

The first is answered with the pid of the program, or the negative errno of why there is none:
ENOENT if it is none of :data:`_PROGRAMS`. It has those two descriptors, the lock if there is one,
and nothing else. When it has ended, its exit status is written to ``status`` as a number, negative
for a signal; nobody else reaps it, so that a pid means nobody else until then. With the socket's
other end the server ends, and with that all that it has forked.
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
_PROGRAMS = (
    "hooks.node.nvml_probe",
    "integration.nvml.query_child",
    "integration.nvml.monitor_child",
)
# What they import once they run.
_LATER = (
    "pynvml",
    "integration.nvml.sampler_child",
    "integration.nvml.watcher_child",
)

_LONGEST = 1 << 16
_MOST_DESCRIPTORS = 4
# Descriptors of a program of ours: its streams, and the lock.
_LOCK, _REST = 3, 4
_ALL = 1 << 12
_PR_SET_PDEATHSIG = 1


def main(modules: str) -> None:
    """Forks until nobody is left to call. Does not return."""
    programs = _load(modules)
    calls = socket.socket(fileno=os.dup(0))
    os.dup2(2, 0)
    ended, tell_ended = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(tell_ended, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    poll = select.poll()
    poll.register(calls, select.POLLIN)
    poll.register(ended, select.POLLIN)
    statuses: dict[int, int] = {}
    while True:
        ready = {fd for fd, _ in poll.poll()}
        if ended in ready:
            os.read(ended, _LONGEST)
            _reap(statuses)
        if calls.fileno() in ready:
            message, descriptors, _, _ = socket.recv_fds(calls, _LONGEST, _MOST_DESCRIPTORS)
            if not message:
                os._exit(0)
            call = json.loads(message)
            if "kill" not in call:
                calls.send(str(_fork(programs, call, descriptors, statuses)).encode())
            elif call["kill"] in statuses:
                os.kill(call["kill"], signal.SIGKILL)


def _load(modules: str) -> dict[str, Any]:
    """The programs, by their paths."""
    sys.path += [modules, _ROOT]
    from importlib import import_module  # noqa: PLC0415 - what is imported is found only now

    from hooks.node.nvml_probe import import_pynvml  # noqa: PLC0415 - likewise

    import_pynvml()
    programs = [import_module(name) for name in _PROGRAMS]
    for name in _LATER:
        import_module(name)
    gc.collect()
    gc.freeze()
    return {str(program.__file__): program.main for program in programs}


def _fork(
    programs: dict[str, Any], call: dict[str, Any], descriptors: list[int], statuses: dict[int, int]
) -> int:
    """Fork for a call, and remember where the exit status is to be told; returns the answer."""
    run = programs.get(call["program"])
    server = os.getpid()
    try:
        pid = os.fork() if run is not None else -errno.ENOENT
    except OSError as error:
        pid = -(error.errno or errno.EAGAIN)
    if run is not None and not pid:
        try:
            _become(server, descriptors)
            run(*call["words"])
        finally:
            os._exit(1)  # not what is above us
    stdin, stdout, status, *lock = descriptors
    for descriptor in (stdin, stdout, *lock):
        os.close(descriptor)
    if pid > 0:
        statuses[pid] = status
    else:
        os.close(status)
    return pid


def _become(server: int, descriptors: list[int]) -> None:
    """Be a process as if it had been started, and end with the server."""
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
        # The lowest that are free belong to the server.
        os.dup2(lock[0], _LOCK)
    os.closerange(_REST if lock else _LOCK, _ALL)


def _reap(statuses: dict[int, int]) -> None:
    """Tell of those that have ended."""
    while statuses:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        told = statuses.pop(pid)
        try:
            os.write(told, str(os.waitstatus_to_exitcode(status)).encode())
        except BrokenPipeError:  # nobody wants to know
            pass
        os.close(told)


if __name__ == "__main__":
    main(*sys.argv[1:])
