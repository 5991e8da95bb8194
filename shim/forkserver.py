"""The fork server: a process that has imported everything, and forks shims.

One runs for each containerd and each set of surroundings (:mod:`shim.warmstart` names it by
them). The first cold ``start`` leaves it behind. It is single-threaded and does nothing between
requests but wait in poll(2).

Rules
- It ends by itself when nobody has asked for long, and when a file that it has imported has
  changed: a shim must be of the version that is installed. SIGTERM ends it at any time. Shims
  are not its children, so nothing of this concerns them.
- A request that cannot be served is closed without an answer; the verb then forks by itself.
- What is imported is frozen out of the garbage collector's sight before the first fork, so
  that shims share its pages for as long as they live.

Source: fork(2), poll(2), unix(7).
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING, Final, NoReturn

from shim import sockets
from shim.detach import become_server, prepare_fork_server
from shim.warmstart import GO, LENGTH, Request, lock_path, peer_is_another

if TYPE_CHECKING:
    from collections.abc import Mapping

# Seconds without a request after which it ends.
IDLE: Final = 600.0

# Seconds that it lets pass before it imports: the shim that is started meanwhile comes first.
_COURTESY: Final = 0.3
_PATIENCE: Final = 1.0
_LONGEST_REQUEST: Final = 1 << 18


def main(path: str, address: str) -> NoReturn:
    """Serve until nobody asks any more.

    Args:
        path: where to listen. The lock beside it is held by the caller's descriptor.
        address: containerd's gRPC address, shown in the command line.
    """
    prepare_fork_server(address)
    signal.signal(signal.SIGTERM, _end)
    try:
        # Blocked since before exec, so that it never ends us without what follows.
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        time.sleep(_COURTESY)
        _import_everything()
        _serve_until_idle(path)
    except SystemExit:
        pass
    finally:
        _remove(lock_path(path))
        os._exit(0)


def _end(_: int, __: object) -> NoReturn:
    raise SystemExit


def _serve_until_idle(path: str) -> None:
    imported = _modules()
    listener_fd = sockets.listen(path)
    if listener_fd is None:
        return
    identity = sockets.identity(path)
    try:
        listener = socket.socket(fileno=listener_fd)
        poll = select.poll()
        poll.register(listener_fd, select.POLLIN)
        while poll.poll(IDLE * 1000):
            connection, _ = listener.accept()
            with connection:
                if _modules() != imported:
                    return  # unanswered: the verb starts cold, and leaves our successor behind
                _serve(connection)
    finally:
        sockets.remove_own(path, identity)


def _serve(connection: socket.socket) -> None:
    """Fork one shim, if the request is one of ours."""
    connection.settimeout(_PATIENCE)
    fds: list[int] = []
    try:
        if peer_is_another(connection):
            return
        head, fds, flags, _ = socket.recv_fds(
            connection, LENGTH.size, 2, socket.MSG_CMSG_CLOEXEC | socket.MSG_WAITALL
        )
        if len(fds) != 1 or len(head) != LENGTH.size or flags & socket.MSG_CTRUNC:
            return
        (length,) = LENGTH.unpack(head)
        if length <= _LONGEST_REQUEST:
            content = connection.recv(length, socket.MSG_WAITALL)
            _fork_orphan(connection, fds[0], Request.decode(content))
    except (OSError, ValueError):
        return
    finally:
        for fd in fds:
            os.close(fd)


def _fork_orphan(connection: socket.socket, listener_fd: int, request: Request) -> None:
    """Fork a shim that is nobody's child, as one is that the verb forks and leaves."""
    middle = os.fork()
    if middle:
        os.waitpid(middle, 0)
        return
    try:
        pid = os.fork()
        if pid:
            connection.send(str(pid).encode())
            os._exit(0)
        if connection.recv(len(GO)) == GO:
            become_server(listener_fd, request)
    finally:
        os._exit(1)


def _import_everything() -> None:
    gc.disable()
    import tomllib  # noqa: F401, PLC0415 - what a container with GPUs needs besides

    import anyio._backends._asyncio  # noqa: F401, PLC0415

    import hooks.config  # noqa: PLC0415
    import hooks.engine  # noqa: F401, PLC0415
    import shim.server  # noqa: F401, PLC0415

    gc.collect()
    gc.freeze()


def _modules() -> Mapping[str, tuple[int, int, int]]:
    """The files of our own modules that are loaded, and what tells that they changed."""
    found = {}
    for name, module in sys.modules.items():
        file = getattr(module, "__file__", None)
        if file and name.partition(".")[0] in ("api", "hooks", "shim"):
            try:
                status = os.stat(file)
            except OSError:
                found[name] = (0, 0, 0)
            else:
                found[name] = (status.st_dev, status.st_ino, status.st_mtime_ns)
    return found


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
