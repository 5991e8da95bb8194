"""The server of :class:`tests.harness.warm.Warm`: it forks a process for each call.

The forked process is a child of the test's own process (CLONE_PARENT). It has the call's arguments,
environment and streams, runs the module as ``python -m`` does, and exits as the program does.
``/proc`` shows its arguments and environment like those of any other process.

Source: clone(2), prctl(2) PR_SET_MM_MAP, CPython's ``os.fork`` (Modules/posixmodule.c), runpy.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import pkgutil
import runpy
import signal
import socket
import struct
import sys
import threading
from collections.abc import Sequence
from typing import Any, Final, NoReturn, TextIO

import api
import hooks
import integration
from tests.harness.warm import LONGEST, PROGRAM

# Standard input, output and error come with a call.
_STREAMS: Final = 3

# Commands and agents import these modules, many of them lazily.
_PACKAGES: Final = (api, hooks, integration)
_OF_OTHERS: Final = (
    "anyio._backends._asyncio",
    "grpc.aio",
    "prometheus_client",
    "rich.table",
    "structlog",
)

_SYS_CLONE, _SYS_BRK = {"x86_64": (56, 12), "aarch64": (220, 214)}[os.uname().machine]
_CLONE_PARENT: Final = 0x00008000
_PR_SET_MM: Final = 35
_PR_SET_MM_MAP: Final = 14

# The GIL is held across the system call, as in os.fork.
_libc: Final = ctypes.PyDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def _serve() -> str | None:
    """Fork for each call until all callers are gone; in the child, return the module to run."""
    calls = socket.socket(fileno=os.dup(0))
    os.close(0)
    os.open(os.devnull, os.O_RDONLY)  # it gets the lowest number that is free
    while True:
        message, streams, _, _ = socket.recv_fds(calls, LONGEST, _STREAMS)
        if not message:
            return None
        pid = _fork_beside()
        if not pid:
            calls.close()
            return _become(json.loads(message), streams)
        for stream in streams:
            os.close(stream)
        calls.send(str(pid).encode())


def _fork_beside() -> int:
    """Like ``os.fork``, but this process' parent becomes the child's parent."""
    ctypes.pythonapi.PyOS_BeforeFork()
    pid = int(_libc.syscall(_SYS_CLONE, _CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0))
    if pid:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
    else:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    if pid < 0:
        raise OSError(ctypes.get_errno(), "clone")
    return pid


def _become(call: dict[str, Any], streams: Sequence[int]) -> str:
    """Become the process of a call, as if it had just been started."""
    argv, environment = call["argv"], call["env"]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if call["session"]:
        os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(environment)
    _show(argv, [f"{key}={value}" for key, value in environment.items()])
    buffered = not environment.get("PYTHONUNBUFFERED")
    sys.stdin = sys.__stdin__ = _stream(0, "r", sys.stdin, buffered=buffered)  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = _stream(1, "w", sys.stdout, buffered=buffered)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _stream(2, "w", sys.stderr, buffered=buffered)  # type: ignore[misc]
    sys.orig_argv[:] = argv
    sys.argv[1:] = argv[len(PROGRAM) + 1 :]
    return str(argv[len(PROGRAM)])


def _stream(number: int, mode: str, like: TextIO, *, buffered: bool) -> Any:
    """Make a standard stream from a descriptor as the interpreter does (create_stdio)."""
    stream: Any = open(number, mode, encoding=like.encoding, errors=like.errors, closefd=False)  # noqa: SIM115 - the process's own
    by_lines = buffered and (number == _STREAMS - 1 or stream.isatty())
    stream.reconfigure(line_buffering=by_lines, write_through=not buffered)
    return stream


_shown: Final[list[Any]] = []


def _show(argv: Sequence[str], environment: Sequence[str]) -> None:
    """Make /proc show these arguments and this environment; the rest stays as it is."""
    bounds: list[int] = []
    for words in (argv, environment):
        text = b"".join(os.fsencode(word) + b"\0" for word in words)
        _shown.append(buffer := ctypes.create_string_buffer(text, len(text)))
        bounds += (ctypes.addressof(buffer), ctypes.addressof(buffer) + len(text))
    with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
        # By the numbers of proc_pid_stat(5), from 1 on; a name may contain spaces.
        told = ["", "", "", *file.read().rpartition(")")[2].split()]
    code, stack, data = told[26:28], told[28], told[45:48]
    heap = _libc.syscall(_SYS_BRK, 0)
    # Keep auxv and the executable's file.
    places = (*map(int, (*code, *data)), heap, int(stack), *bounds, 0)
    table = struct.pack("=12QIi", *places, 0, -1)
    if _libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, table, len(table), 0):
        raise OSError(ctypes.get_errno(), "PR_SET_MM_MAP")


def _run(module: str) -> NoReturn:
    """Run a module until it exits, and let the kernel free what was loaded."""
    status: Any = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        status = ended.code or 0
    if not isinstance(status, int):
        sys.exit(status)  # the interpreter says what it is
    threading._shutdown()  # type: ignore[attr-defined] # it waits for threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(status & 0xFF)


def _load() -> None:
    for package in _PACKAGES:
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    for name in _OF_OTHERS:
        importlib.import_module(name)
    # The server must have no threads, which a forked child would lack.
    assert os.listdir("/proc/self/task") == [str(os.getpid())]
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the test's process
    _load()
    if _name := _serve():
        _run(_name)
