"""How a forked process becomes the shim.

Nothing that anyone can observe of a shim may depend on who forked it, so everything that is
inherited is set here: process group, descriptors, signals, umask, working directory,
environment, standing with the OOM killer, name. The parent is the ``start`` verb, or the fork
server (:mod:`shim.forkserver`).

Source: containerd pkg/shim (what its own shims are started with); proc(5).
"""

from __future__ import annotations

import fcntl
import gc
import os

import api
from api.errors import one_line
from shim import bundle, sockets

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final, NoReturn

    from shim.warmstart import Request

# The C module under signal: the public one imports enum, which costs 6 ms.
if TYPE_CHECKING:
    import signal as _signal
else:
    import _signal

PROGRAM: Final = "containerd-shim-nvidia-v1"

_LISTENER: Final = 3
_LOCK: Final = 3  # of a fork server: LOCK_FD of shim.warmstart

# What services get from systemd, hence what runc and its hooks meet in containerd's own shim.
# Files of ours have their modes named, and do not depend on it.
_UMASK: Final = 0o022

_HIGHEST_OOM_SCORE_ADJ: Final = 1000

# Fields of /proc/PID/stat, counted from the one after the program's name, which may itself
# contain spaces and parentheses.
_ARG_START, _ARG_END = 45, 46


def become_server(listener_fd: int, request: Request) -> NoReturn:
    """Turn this process, just forked and with a single thread, into a shim.

    Args:
        listener_fd: the listening socket. Every other descriptor is closed.
        request: which shim. Its bundle becomes the working directory, its environment ours.
    """
    try:
        # First of all: whoever holds the answer's pipe keeps containerd waiting for its end.
        _keep_only(listener_fd)
        os.setpgid(0, 0)
        _reset_signals()
        _signal.pthread_sigmask(_signal.SIG_SETMASK, ())
        os.umask(_UMASK)
        os.chdir(request.bundle_path)
        if os.environ != request.environment:
            os.environ.clear()
            os.environ.update(request.environment)
        if request.oom_score_adj is not None:
            _set_oom_score_adj(request.oom_score_adj)
        names = ["-namespace", request.namespace, "-id", request.container_id]
        _set_command_line([PROGRAM, *names, "-address", request.address])
        # What is imported stays; looking for garbage among it costs a tenth of the time.
        gc.disable()
        api.alone = True
        from shim.server import main  # noqa: PLC0415 - after containerd has its answer

        gc.freeze()
        gc.enable()

        main(
            listener_fd=_LISTENER,
            container_id=request.container_id,
            namespace=request.namespace,
            ttrpc_address=request.ttrpc_address,
            socket_path=request.socket_path,
            debug=request.debug,
        )
    except BaseException as error:  # noqa: BLE001 - there is nobody above to raise it to
        _report(request.bundle_path, error)
        path = request.socket_path
        sockets.retire(path, sockets.identity(path), regardless=True)
    os._exit(1)


def prepare_fork_server(address: str) -> None:
    """Make this process one that shims can be forked from.

    Its descriptors are 0, 1, 2 and 3 (its lock); it is in nobody's directory. Signals that
    are blocked stay so.

    Args:
        address: containerd's gRPC address, shown in the command line.
    """
    _close_above(_LOCK)
    try:
        os.set_inheritable(_LOCK, False)  # or each runtime that a verb calls would hold the lock
    except OSError:
        pass  # started by hand, without one
    _reset_signals()
    os.umask(_UMASK)
    os.chdir("/")
    _set_command_line([PROGRAM, "-address", address, "fork-server"])


def prepare_orphan(address: str, mask: set[int]) -> None:
    """Make this process, just forked from a fork server, one of its own.

    Args:
        address: containerd's gRPC address, shown in the command line.
        mask: the signals that are blocked.
    """
    os.setpgid(0, 0)
    for number in (_signal.SIGTERM, _signal.SIGCHLD):
        _signal.signal(number, _signal.SIG_DFL)
    _signal.pthread_sigmask(_signal.SIG_SETMASK, mask)
    _set_command_line([PROGRAM, "-address", address, "-spare", "fork-server"])


def oom_score_adj_below(pid: int) -> int | None:
    """The score that makes a process die before another one does.

    Args:
        pid: the other one: containerd, which must outlive its shims.

    Returns:
        One more than its own, at most 1000; None if that cannot be read.
    """
    try:
        with open(f"/proc/{pid}/oom_score_adj", "rb") as file:
            return min(int(file.read()) + 1, _HIGHEST_OOM_SCORE_ADJ)
    except (OSError, ValueError):
        return None


def _keep_only(listener_fd: int) -> None:
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    # Duplicates above all targets, so that no step overwrites what a later one needs.
    null_high = fcntl.fcntl(null, fcntl.F_DUPFD_CLOEXEC, _LISTENER + 1)
    listener_high = fcntl.fcntl(listener_fd, fcntl.F_DUPFD_CLOEXEC, _LISTENER + 1)
    for standard in (0, 1, 2):
        os.dup2(null_high, standard)
    os.dup2(listener_high, _LISTENER, inheritable=False)
    _close_above(_LISTENER)


def _close_above(highest: int) -> None:
    # Not closerange: without close_range(2) it tries every number up to the limit, which
    # for containerd can be a million.
    for name in os.listdir("/proc/self/fd"):
        if int(name) > highest:
            try:
                os.close(int(name))
            except OSError:
                pass  # the descriptor that listed them


def _reset_signals() -> None:
    _signal.set_wakeup_fd(-1)
    for number in _signal.valid_signals():
        try:
            _signal.signal(number, _signal.SIG_DFL)
        except (OSError, ValueError):
            continue  # KILL, STOP, and those that libc keeps for itself
    # A peer that hangs up is an error code to the server, not its end.
    _signal.signal(_signal.SIGPIPE, _signal.SIG_IGN)


def _set_oom_score_adj(value: int) -> None:
    try:
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write(str(value))
    except OSError:
        pass  # lowering it needs CAP_SYS_RESOURCE, which a user namespace does not have


def _set_command_line(words: list[str]) -> None:
    """Let ``ps`` show what this process is, in place of the verb that it was forked from.

    The kernel shows the memory that the arguments lay in at exec; it is ours to write to.
    """
    text = b"\0".join(os.fsencode(word) for word in words)
    try:
        with open("/proc/self/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
        with open("/proc/self/mem", "r+b", buffering=0) as memory:
            memory.seek(start)
            # Never a byte beyond: the environment follows. A zero has to end it.
            memory.write(text[: end - start - 1].ljust(end - start, b"\0"))
        with open("/proc/self/comm", "wb", buffering=0) as file:
            file.write(os.fsencode(words[0]))  # the kernel keeps 15 bytes
    except (OSError, IndexError, ValueError):
        pass  # a hardened kernel forbids it; the shim works under its old name


def _report(bundle_path: str, error: BaseException) -> None:
    """Tell containerd's log why there is no shim: it reads the bundle's fifo."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = f" at {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace else ""
    line = one_line(f"{type(error).__name__}: {error}{where}").replace('"', "'")
    try:
        log = os.path.join(bundle_path, bundle.LOG)
        fd = os.open(log, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
        os.write(fd, f'level=error msg="the shim could not start: {line}"\n'.encode())
    except OSError:
        pass  # nobody reads
