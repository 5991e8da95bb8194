"""The fork server: a process that has imported everything, and forks shims and verbs.

One runs for each containerd and each set of surroundings (:mod:`shim.warmstart` names it by
them). The first cold ``start`` leaves it behind, or systemd starts it (:mod:`shim.standing`). It
is single-threaded and does nothing between requests but wait in poll(2).

Rules
- It ends by itself when nobody has asked for long, and when a file that it has imported has
  changed: a shim must be of the version that is installed. SIGTERM ends it at any time. Shims
  are not its children, so nothing of this concerns them.
- It reads nothing of what is asked: a connection is handed to a process that is forked for it
  (:mod:`shim.orphans`), so that nobody who is slow, or stopped, holds up others.
- A request that cannot be served is closed without an answer; the verb then forks by itself,
  the launcher becomes an interpreter.
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
from typing import TYPE_CHECKING, Final

import api
from shim import sockets
from shim.detach import prepare_fork_server
from shim.installation import Installation
from shim.orphans import Spare, fork_orphan, serve
from shim.warmstart import ACCEPTED, lock_path, peer_is_another
from shim.warmverb import link_name

if TYPE_CHECKING:
    from typing import NoReturn

# Seconds without a request after which it ends.
IDLE: Final = 600.0

# Seconds that it lets pass before it imports: the shim that is started meanwhile comes first.
_COURTESY: Final = 0.3
# Seconds without a request after which a spare is forked: who has just been served comes first.
_REFILL: Final = 0.02
# How often bytecode is executed until the interpreter has fitted all of it to what it meets.
_REHEARSALS: Final = 20


def main(path: str, address: str, *, stay: bool = False) -> NoReturn:
    """Serve until nobody asks any more.

    Args:
        path: where to listen. The lock beside it is held by the caller's descriptor.
        address: containerd's gRPC address, shown in the command line.
        stay: whether to stay although nobody asks.
    """
    prepare_fork_server(address)
    signal.signal(signal.SIGTERM, _end)
    try:
        # Blocked since before exec, so that it never ends us without what follows.
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        time.sleep(_COURTESY)
        program = os.path.abspath(sys.argv[0])
        installation = Installation(program)
        _import_everything(path)
        if installation.is_imported(program):
            _serve_until_idle(path, address, installation, None if stay else IDLE * 1000)
    except SystemExit:
        pass
    finally:
        _remove(lock_path(path))
        os._exit(0)


def _end(_: int, __: object) -> NoReturn:
    raise SystemExit


def _serve_until_idle(
    path: str, address: str, installation: Installation, idle: float | None
) -> None:
    # What is made here is removed below, also if SIGTERM comes at once.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    listener_fd = sockets.listen(path)
    if listener_fd is None:
        return
    identity = sockets.identity(path)
    # Who is forked is nobody's to wait for.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    link = _leave_link(path, address)
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        _serve(socket.socket(fileno=listener_fd), address, installation, idle)
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


def _serve(
    listener: socket.socket, address: str, installation: Installation, idle: float | None
) -> None:
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    if installation.descriptor >= 0:
        poll.register(installation.descriptor, select.POLLIN)
    spare = _spare(address)
    wanted = False
    while (ready := poll.poll(_REFILL * 1000 if wanted else idle)) or wanted:
        if not ready:
            spare, wanted = _spare(address), False
            continue
        if installation.has_changed():
            return  # unanswered: the verb starts cold, and leaves our successor behind
        if (listener.fileno(), select.POLLIN) in ready:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                if not peer_is_another(connection):
                    connection.send(ACCEPTED)
                    taken, spare, wanted = spare, None, True
                    _hand_over(connection, taken, address)


def _hand_over(connection: socket.socket, spare: Spare | None, address: str) -> None:
    if spare is None or not spare.give(connection):
        fork_orphan(connection, address, lambda: serve(connection))


def _spare(address: str) -> Spare | None:
    try:
        return Spare(address)
    except OSError:
        return None  # there is no room for a process now


def _import_everything(path: str) -> None:
    gc.disable()
    api.alone = True
    import shim.delete  # noqa: PLC0415
    import shim.server  # noqa: PLC0415
    import shim.start  # noqa: F401, PLC0415
    from shim import resident  # noqa: PLC0415
    from shim.rehearsal import rehearse  # noqa: PLC0415

    resident.load()
    _look_at_node()
    for _ in range(_REHEARSALS):
        rehearse(f"{path}.{os.getpid()}")
    gc.collect()
    gc.freeze()


def _look_at_node() -> None:
    """Read what a container with GPUs needs, so that shims find it parsed, as long as it is so."""
    from hooks import engine  # noqa: PLC0415
    from hooks.config import load_config  # noqa: PLC0415

    try:
        engine.load_inventory(load_config())
    except Exception:  # noqa: BLE001, S110 - whoever asks for a GPU will be told
        pass


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
