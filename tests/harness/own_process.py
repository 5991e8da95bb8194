"""Detect what a test changes in its own process, which it shares with other tests.

:class:`Guard` looks at the process before the first fixture of a test is made and after the last
one is removed. If anything differs, that test fails, with a line for each difference. The guard
puts it back where it can, so that no other test fails for it. It waits a moment for threads,
children and descriptors that are about to end.

A test that has to change its process does it in a child, with ``monkeypatch`` or within
:func:`restored`. Fixtures of modules and sessions are made before the first look and removed after
the last. What outlives a test for another reason is made within :func:`outliving`.

A server that a module's tests share may answer other processes at any time, and opens threads and
descriptors for them. While one runs, threads, descriptors and children are not compared.

Source: proc_pid_status(5), prctl(2).
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import ctypes
import gc
import os
import re
import resource
import signal
import socket
import stat
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

from integration.timeouts import PATIENCE
from shim import syscalls
from shim.handlers import restore_handlers

# Seconds to wait for parts that end by themselves.
_TO_END: Final = 5.0
_POLL: Final = 0.01

_PR_GET_PDEATHSIG: Final = 2
_PR_GET_CHILD_SUBREAPER: Final = 37
_libc: Final = ctypes.CDLL(None)

_SIGNALS: Final = sorted(map(int, signal.valid_signals()))
_LIMITS: Final = {
    name: getattr(resource, name)
    for name in dir(resource)
    if name.startswith("RLIMIT_") and name != "RLIMIT_OFILE"  # the same as RLIMIT_NOFILE
}
# Without an enum lookup for each handler.
_getsignal: Final = _signal.getsignal
_TIMERS: Final = {"real": 0, "virtual": 1, "profiling": 2}
_SOCKET: Final = "a socket"
_KERNEL_OBJECT: Final = "an object of the kernel without a file, as epoll and eventfd"
_NAMESPACES: Final = ("mnt", "net", "uts")
# pytest sets it in each phase of a test.
_OF_PYTEST: Final = b"PYTEST_CURRENT_TEST"

_STATUS: Final = re.compile(
    rb"^(Name|Umask|Uid|Gid|Groups|NSpgid|NSsid|SigPnd|ShdPnd|SigBlk|CapInh|CapPrm|CapEff|CapBnd"
    rb"|CapAmb|NoNewPrivs|Seccomp|Cpus_allowed):\t(.*)$",
    re.MULTILINE,
)


Values = dict[Any, Any]
State = dict[str, Values]


def _nothing(_: Values) -> None:
    """Do nothing: this aspect cannot be restored."""


@dataclass(frozen=True, slots=True)
class Aspect:
    """A part of a process that a test leaves as it was.

    Attributes:
        look: returns the current values of its parts, by name.
        put_back: restores parts; called with the old values of changed parts, None for new parts.
        waits: whether to wait for it to return to its old state by itself.
        may_go: whether a part with this value may disappear.
        may_be_another: whether another part with the same value may replace one, such as a daemon
            of the session that a test has restarted.
        is_cheap: whether to look before each test, too, and not only after it. pytest and its
            plugins change some of these between tests.
    """

    name: str
    look: Callable[[], Values]
    put_back: Callable[[Values], object] = _nothing
    waits: bool = False
    may_go: Callable[[Any], bool] = lambda _: False
    may_be_another: bool = False
    is_cheap: bool = False


def _read(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 1 << 16)
    finally:
        os.close(fd)


def _flag(option: int) -> int:
    value = ctypes.c_int()
    _libc.prctl(option, ctypes.byref(value), 0, 0, 0)
    return value.value


def _wakeup_fd() -> int:
    fd = _signal.set_wakeup_fd(-1)
    if fd >= 0:
        try:
            _signal.set_wakeup_fd(fd, warn_on_full_buffer=False)
        except (OSError, ValueError):
            pass  # it was closed, and is reported
    return int(fd)


# The paths of all files that were ever seen, for messages.
_paths: dict[tuple[int, int], str] = {}


def _files() -> Values:
    found: dict[Any, Any] = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            status = os.fstat(int(name))
        except OSError:
            continue  # the descriptor of the listing itself
        if stat.S_ISSOCK(status.st_mode):
            found[int(name)] = _SOCKET
        elif not stat.S_IFMT(status.st_mode):
            found[int(name)] = _KERNEL_OBJECT
        else:
            found[int(name)] = which = (status.st_dev, status.st_ino)
            if which not in _paths:
                with suppress(OSError):
                    _paths[which] = os.readlink(f"/proc/self/fd/{name}")
    return found


_names: dict[int, str] = {}


def children() -> Values:
    """Return the names of this process' children by their pids, zombies included."""
    words: list[bytes] = []
    for task in os.listdir("/proc/self/task"):
        try:
            words += _read(f"/proc/self/task/{task}/children").split()
        except OSError:
            continue  # the thread has ended
    found = {}
    for pid in map(int, words):
        if pid not in _names:
            try:
                _names[pid] = _read(f"/proc/{pid}/comm").decode(errors="replace").strip()
            except OSError:
                continue  # it has been reaped
        found[pid] = _names[pid]
    _names.clear()  # a pid may be another's later
    _names.update(found)
    return found


def _threads() -> Values:
    # Those that wait for a next call end; the next test starts its own.
    idle = getattr(sys.modules.get("integration.detached"), "_idle", ())
    while idle:
        idle.pop().end()
    return dict.fromkeys(sys._current_frames(), "")


def _interpreter() -> Values:
    return {
        "sys.path": tuple(sys.path),
        "sys.argv": tuple(sys.argv),
        "sys.excepthook": sys.excepthook,
        "sys.unraisablehook": sys.unraisablehook,
        "threading.excepthook": threading.excepthook,
        "recursion limit": sys.getrecursionlimit(),
        "switch interval": sys.getswitchinterval(),
        "gc": (gc.isenabled(), gc.get_threshold()),
        "default timeout of sockets": socket.getdefaulttimeout(),
        "time zone": time.tzname,
    }


def _attributes() -> Values:
    return {
        "subreaper": _flag(_PR_GET_CHILD_SUBREAPER),
        "signal at the parent's death": _flag(_PR_GET_PDEATHSIG),
        "working directory": os.readlink("/proc/self/cwd"),
        "root directory": os.readlink("/proc/self/root"),
        "oom_score_adj": _read("/proc/self/oom_score_adj"),
        "nice value": os.getpriority(os.PRIO_PROCESS, 0),
        "wakeup descriptor": _wakeup_fd(),
    }


def _set_attributes(before: Values) -> None:
    for name, value in before.items():
        match name:
            case "subreaper":
                syscalls.set_child_subreaper(enabled=bool(value))
            case "working directory":
                os.chdir(value)
            case "oom_score_adj":
                with open("/proc/self/oom_score_adj", "wb", buffering=0) as file:
                    file.write(value)
            case "wakeup descriptor":
                _signal.set_wakeup_fd(value)


def _set_status(before: Values) -> None:
    if b"Umask" in before:
        os.umask(int(before[b"Umask"], 8))
    if b"SigBlk" in before:
        # A pending signal would end this process, or reach a handler of another test.
        while signal.sigtimedwait(signal.sigpending(), 0):
            pass
        mask = int(before[b"SigBlk"], 16)
        blocked = [number for number in _SIGNALS if mask >> (number - 1) & 1]
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _handlers() -> Values:
    return {number: _getsignal(number) for number in _SIGNALS}


def _timers() -> Values:
    """Return which timers run; the time that they have left depends on the test's duration."""
    return {name: any(_signal.getitimer(timer)) for name, timer in _TIMERS.items()}


def _environment() -> Values:
    found = dict(os.environ._data)  # type: ignore[attr-defined]
    found.pop(_OF_PYTEST, None)
    return found


def _set_environment(before: Values) -> None:
    for name, value in before.items():
        if value is None:
            os.environb.pop(name, None)
        else:
            os.environb[name] = value


def _set_limits(before: Values) -> None:
    for name, value in before.items():
        resource.setrlimit(_LIMITS[name], value)


_ASPECTS: Final = (
    # First, because looking at the other aspects opens descriptors.
    Aspect("limit", lambda: {n: resource.getrlimit(r) for n, r in _LIMITS.items()}, _set_limits),
    Aspect("handler of signal", _handlers, restore_handlers, is_cheap=True),
    Aspect("status", lambda: dict(_STATUS.findall(_read("/proc/self/status"))), _set_status),
    Aspect("environment", _environment, _set_environment, is_cheap=True),
    Aspect("process", _attributes, _set_attributes),
    Aspect("timer", _timers, is_cheap=True),
    Aspect("namespace", lambda: {n: os.readlink(f"/proc/self/ns/{n}") for n in _NAMESPACES}),
    Aspect("interpreter", _interpreter, is_cheap=True),
    Aspect("child", children, waits=True, may_go=lambda _: True, may_be_another=True),
    Aspect("thread", _threads, waits=True, may_go=lambda _: True, is_cheap=True),
    # A library with a connection for the session, such as gRPC, reopens it by itself. A thread
    # closes its epoll and eventfd some time after the last user has gone.
    Aspect(
        "descriptor",
        _files,
        waits=True,
        may_go=lambda value: value in {_SOCKET, _KERNEL_OBJECT},
        may_be_another=True,
    ),
)


_OF_SERVERS: Final = frozenset({"child", "thread", "descriptor"})

# The threads of servers that several tests share.
_servers: Final[set[threading.Thread]] = set()

# What the last test has left, unless other code may have changed it since.
_known: State = {}


def look_again() -> None:
    """Look at everything again before the next test: code outside of tests changes the process."""
    _known.clear()


class Guard:
    """Checks that a test leaves its process unchanged."""

    def __init__(self) -> None:
        self._before = {
            aspect.name: aspect.look()
            if aspect.is_cheap or aspect.name not in _known
            else _known[aspect.name]
            for aspect in _ASPECTS
        }
        # What a thread of a library has open for a moment is there in one of two looks.
        there, known = _files(), self._before["descriptor"]
        self._before["descriptor"] = {
            fd: which
            for fd, which in known.items()
            if there.get(fd) == which or not isinstance(which, tuple)
        }

    def accept(self, before: State, after: State) -> None:
        """Accept changes inside the block, which are not the test's fault."""
        for name in self._before:
            self._before[name] = own = dict(self._before[name])
            for key in _changed(before[name], after[name]):
                own.pop(key, None)
                if key in after[name]:
                    own[key] = after[name][key]

    def differences(self) -> list[str]:
        """Return a line for each difference, and restore the old values where possible."""
        lines = []
        left_out = _OF_SERVERS if any(each.is_alive() for each in _servers) else frozenset[str]()
        for aspect in _ASPECTS:
            if aspect.name in left_out:
                _known.pop(aspect.name, None)
                continue
            before, after = self._before[aspect.name], aspect.look()
            if before != after:
                lines += _check(aspect, before, after)
                after = aspect.look()
            _known[aspect.name] = after
        return lines


def _check(aspect: Aspect, before: Values, after: Values) -> list[str]:
    faults = _faults(aspect, before, after)
    if faults and aspect.waits:
        deadline = time.monotonic() + _TO_END * PATIENCE
        time.sleep(_POLL)
        if faults := _faults(aspect, before, after := aspect.look()):
            gc.collect()  # it is slow, and errors in finalizers belong to this test
        while (faults := _faults(aspect, before, after := aspect.look())) and (
            time.monotonic() < deadline
        ):
            time.sleep(_POLL)
    lines = [
        f"{aspect.name} {_text(key)}: {_show(aspect, key, before)} before, "
        f"{_show(aspect, key, after, is_now=True)} after"
        for key in faults
    ]
    if faults:
        with suppress(OSError, ValueError):  # it is reported
            aspect.put_back({key: before.get(key) for key in faults})
    return lines


def _changed(before: Values, after: Values) -> list[Any]:
    if before == after:
        return []
    return [key for key in {**before, **after} if before.get(key) != after.get(key)]


def _faults(aspect: Aspect, before: Values, after: Values) -> list[Any]:
    """Return the keys of the changes that are a test's fault."""
    changed = _changed(before, after)
    if not aspect.waits:
        return changed
    gone = Counter(before[key] for key in changed if key in before)
    new = Counter(after[key] for key in changed if key in after)
    if aspect.may_be_another:
        gone, new = gone - new, new - gone
    return [
        key
        for key in changed
        if (key in after and new[after[key]])
        or (key in before and gone[before[key]] and not aspect.may_go(before[key]))
    ]


def _path(value: Any) -> str:
    return value if isinstance(value, str) else _paths.get(value, "another file")


def _text(key: Any) -> str:
    return key.decode() if isinstance(key, bytes) else str(key)


def _show(aspect: Aspect, key: Any, values: Values, *, is_now: bool = False) -> str:
    """Format a value for a message."""
    if key not in values:
        return "none"
    match aspect.name:
        case "descriptor":
            try:
                return os.readlink(f"/proc/self/fd/{key}") if is_now else _path(values[key])
            except OSError:
                return "open"
        case "child" if is_now:
            with suppress(OSError):
                state = _read(f"/proc/{key}/stat").rpartition(b")")[2].split()[0].decode()
                return f"{values[key]!r} ({state})"
        case "thread":
            return next((repr(t.name) for t in threading.enumerate() if t.ident == key), "runs")
    return repr(values[key])


@contextmanager
def restored() -> Iterator[None]:
    """Restore this process at the end of the block. For its main thread.

    This covers limits, signal handlers, the signal mask, umask, environment, working directory,
    subreaper, OOM score and wakeup descriptor; not children, threads or descriptors.
    """
    aspects = [aspect for aspect in _ASPECTS if aspect.put_back is not _nothing]
    before = {aspect.name: aspect.look() for aspect in aspects}
    try:
        yield
    finally:
        for aspect in aspects:
            own = before[aspect.name]
            if changed := _changed(own, aspect.look()):
                aspect.put_back({key: own.get(key) for key in changed})


_guard: Guard | None = None


@contextmanager
def guarded() -> Iterator[Guard]:
    """Guard this process during a test."""
    global _guard  # noqa: PLW0603 - a process has one test at a time
    _guard = Guard()
    try:
        yield _guard
    finally:
        _guard = None


@contextmanager
def outliving(*, serves: bool = False) -> Iterator[None]:
    """Allow the block to create things that outlive the test.

    Args:
        serves: whether the threads that it starts are those of a server for other processes.
    """
    guard, threads = _guard, set(threading.enumerate()) if serves else set()
    before = {} if guard is None else {aspect.name: aspect.look() for aspect in _ASPECTS}
    try:
        yield
    finally:
        if serves:
            _servers.intersection_update(threading.enumerate())
            _servers.update(set(threading.enumerate()) - threads)
        if guard is not None:
            guard.accept(before, {aspect.name: aspect.look() for aspect in _ASPECTS})
