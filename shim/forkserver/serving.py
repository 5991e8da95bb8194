"""What the fork server does once it has imported everything: it prepares, then forks for requests.

To import this module is to import all that a shim and a verb need.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import sys
from typing import Final

# First, so that what every shim uses lies together in memory: a name that several modules have is
# made once, by the first.
from shim.pod import main as _main  # noqa: F401
from shim.pod import server as _server  # noqa: F401

# isort: split
from api.errors import NvshimError
from hooks.config import load_config
from hooks.node.cache import decode_ahead
from hooks.prepared import Prepared
from shim import resident, sockets
from shim.forkserver import gpu_warmup
from shim.forkserver.installation import Installation
from shim.forkserver.memory import fill_holes, make_immortal
from shim.forkserver.prefork_pool import PreforkPool, serve_in_fork
from shim.forkserver.warmup import warm_up
from shim.verbs.warmstart import ACCEPTED, link_name, peer_is_another
from shim.work.layers import note_used_last

# Seconds without a request after which the pool is refilled: the last client comes first.
_REFILL: Final = 0.02
# How often bytecode is executed until the interpreter has fitted all of it to what it meets.
_WARMUPS: Final = 20


def prepare(path: str) -> None:
    """Do once what every shim would do for itself.

    Args:
        path: where the fork server will listen; files of the warmup are next to it.
    """
    resident.load()
    look_at_node()
    for _ in range(_WARMUPS):
        warm_up(path)
    with contextlib.suppress(NvshimError, OSError):  # then the first workers do it for themselves
        gpu_warmup.warm_up(f"{path}.gpus", _WARMUPS)
    gc.collect()
    make_immortal()
    fill_holes()
    gc.freeze()


def look_at_node() -> None:
    """Read what a container with GPUs needs, so that shims find it parsed while it is valid.

    That is the inventory, and what was prepared for the image that was used last.
    """
    try:
        config = load_config()
        decode_ahead(config)
        Prepared.decode(note_used_last(config.layers))
    except Exception:  # noqa: BLE001, S110 - a container with GPUs reports it
        pass


def serve_until_idle(
    path: str, address: str, installation: Installation, idle: float | None
) -> None:
    """Listen, and fork for each connection, until requests have stopped for long.

    Args:
        path: where.
        address: containerd's gRPC address.
        installation: serving ends when it has changed.
        idle: milliseconds without a request; None to serve for ever.
    """
    # What is made here is removed below, also if SIGTERM comes at once.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    listener_fd = sockets.listen(path)
    if listener_fd is None:
        return
    identity = sockets.identity(path)
    # The forked processes are not waited for.
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
    pool = _fork_pool(address)
    wanted = False
    while (ready := poll.poll(_REFILL * 1000 if wanted else idle)) or wanted:
        if not ready:
            pool, wanted = _fork_pool(address), False
            continue
        if installation.has_changed():
            return  # unanswered: the verb starts cold, and leaves our successor behind
        if (listener.fileno(), select.POLLIN) in ready:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                if not peer_is_another(connection):
                    connection.send(ACCEPTED)
                    taken, pool, wanted = pool, None, True
                    if taken is None:
                        serve_in_fork(connection, address)
                    else:
                        taken.serve(connection, address)


def _fork_pool(address: str) -> PreforkPool | None:
    look_at_node()
    try:
        return PreforkPool(address)
    except OSError:
        return None  # there is no room for a process now
