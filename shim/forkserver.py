"""The fork server: a process that has imported everything, and forks shims and verbs.

One runs for each containerd and each set of surroundings (:mod:`shim.warmstart` names it by
them). The first cold ``start`` leaves it behind. It is single-threaded and does nothing between
requests but wait in poll(2).

Rules
- It ends by itself when nobody has asked for long, and when a file that it has imported has
  changed: a shim must be of the version that is installed. SIGTERM ends it at any time. Shims
  are not its children, so nothing of this concerns them.
- A request that cannot be served is closed without an answer; the verb then forks by itself,
  the launcher becomes an interpreter.
- A shim is asked for by a verb in Python, with the listener; a verb by the launcher, with what
  :mod:`shim.warmverb` says. The first has found us by its surroundings; those of the second are
  compared here.
- What is imported is frozen out of the garbage collector's sight before the first fork, so
  that shims share its pages for as long as they live.

Source: fork(2), poll(2), unix(7).
"""

from __future__ import annotations

import contextlib
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
from shim.warmstart import (
    GO,
    LENGTH,
    Request,
    lock_path,
    peer_is_another,
    peer_process,
    server_path,
)
from shim.warmverb import VerbRequest, become_verb, link_name

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
        _serve_until_idle(path, address)
    except SystemExit:
        pass
    finally:
        _remove(lock_path(path))
        os._exit(0)


def _end(_: int, __: object) -> NoReturn:
    raise SystemExit


def _serve_until_idle(path: str, address: str) -> None:
    imported = _modules()
    listener_fd = sockets.listen(path)
    if listener_fd is None:
        return
    identity = sockets.identity(path)
    # Verbs that are forked are nobody's to wait for.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    link = _leave_link(path, address)
    try:
        listener = socket.socket(fileno=listener_fd)
        poll = select.poll()
        poll.register(listener_fd, select.POLLIN)
        while poll.poll(IDLE * 1000):
            connection, _ = listener.accept()
            with connection:
                if _modules() != imported:
                    return  # unanswered: the verb starts cold, and leaves our successor behind
                _serve(connection, path, address)
    finally:
        with contextlib.suppress(OSError):
            if os.readlink(link) == os.path.basename(path):
                os.unlink(link)
        sockets.remove_own(path, identity)


def _leave_link(path: str, address: str) -> str:
    """Let the launcher find the socket: it cannot take the digest that the name is made of."""
    link = os.path.join(os.path.dirname(path), link_name(address, os.path.abspath(sys.argv[0])))
    with contextlib.suppress(OSError):
        os.symlink(os.path.basename(path), f"{link}.{os.getpid()}")
        os.rename(f"{link}.{os.getpid()}", link)
    return link


def _serve(connection: socket.socket, path: str, address: str) -> None:
    """Fork one shim or one verb, if the request is one of ours."""
    connection.settimeout(_PATIENCE)
    fds: list[int] = []
    try:
        if peer_is_another(connection):
            return
        head, fds, flags, _ = socket.recv_fds(
            connection, LENGTH.size, 2, socket.MSG_CMSG_CLOEXEC | socket.MSG_WAITALL
        )
        if len(head) != LENGTH.size or flags & socket.MSG_CTRUNC:
            return
        (length,) = LENGTH.unpack(head)
        if length > _LONGEST_REQUEST:
            return
        content = _receive(connection, length)
        if len(fds) == 1:
            _fork_orphan(connection, fds[0], Request.decode(content))
        elif not fds and os.fork() == 0:
            _become_verb(connection, content, path, address)
    except (OSError, ValueError):
        return
    finally:
        for fd in fds:
            os.close(fd)


def _receive(connection: socket.socket, length: int) -> bytes:
    """The whole of a request; MSG_WAITALL means nothing on a socket with a timeout."""
    content = b""
    while len(content) < length:
        chunk = connection.recv(length - len(content))
        if not chunk:
            message = "the end of the connection in a request"
            raise ValueError(message)
        content += chunk
    return content


def _fork_orphan(connection: socket.socket, listener_fd: int, request: Request) -> None:
    """Fork a shim that is nobody's child, as one is that the verb forks and leaves."""
    if os.fork():
        return
    try:
        pid = os.fork()
        if pid:
            connection.send(str(pid).encode())
            os._exit(0)
        # However long it takes: a verb that has lost patience closes its end.
        connection.settimeout(None)
        if connection.recv(len(GO)) == GO:
            become_server(listener_fd, request)
    finally:
        os._exit(1)


def _become_verb(connection: socket.socket, content: bytes, path: str, address: str) -> NoReturn:
    # All that takes time is done here: a hundred may be waiting for the fork server.
    try:
        request = VerbRequest.decode(content)
        asker = peer_process(connection)
        alike = server_path(os.path.dirname(path), address, process=asker) == path
        if alike and request.program == os.path.abspath(sys.argv[0]):
            become_verb(connection, request, parent=_parent_of(asker))
    except (OSError, ValueError):
        pass  # unanswered, as all that cannot be served
    finally:
        os._exit(1)


def _parent_of(pid: int) -> int:
    with open(f"/proc/{pid}/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[1])


def _import_everything() -> None:
    gc.disable()
    import tomllib  # noqa: F401, PLC0415 - what a container with GPUs needs besides

    import hooks.config  # noqa: PLC0415
    import hooks.engine  # noqa: F401, PLC0415
    import shim.delete  # noqa: PLC0415
    import shim.proc_cover  # noqa: PLC0415
    import shim.server  # noqa: PLC0415
    import shim.start  # noqa: F401, PLC0415

    gc.collect()
    gc.freeze()


def _modules() -> Mapping[str, tuple[int, int, int]]:
    """The files of our own modules that are loaded, and what tells that they changed.

    The program is one: it says where the others are.
    """
    found = {}
    for name, module in sys.modules.items():
        file = getattr(module, "__file__", None)
        if file and name.partition(".")[0] in ("__main__", "api", "hooks", "shim"):
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
