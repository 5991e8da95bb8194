"""The fork server's work after its imports: fork for requests, and warm up.

Importing this module imports everything that a shim and a verb need.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Final

# Import this first, to place what every shim uses together in memory: the first module with a name
# creates it.
from shim.pod import main as _main  # noqa: F401
from shim.pod import server as _server  # noqa: F401

# isort: split
from api.errors import NvshimError
from hooks.config import load_config
from hooks.node.cache import decode_ahead
from hooks.prepared import Prepared
from shim import resident
from shim.forkserver import gpu_warmup
from shim.forkserver.executed_code import put_together, read_list
from shim.forkserver.installation import Installation
from shim.forkserver.memory import fill_holes, make_immortal
from shim.forkserver.prefork_pool import Lent, PreforkPool, serve_in_fork
from shim.forkserver.warmup import warm_up
from shim.verbs.warmstart import ACCEPTED, peer_is_another
from shim.work.layers import note_used_last

# Seconds without a request until the pool is refilled, because the last client comes first.
_REFILL: Final = 0.02
# Verbs that hang do not use up the descriptors: the oldest keeps its process for itself.
_MOST_LENT: Final = 64
# Executions of bytecode until the interpreter has specialized all of it.
_WARMUPS: Final = 20
_GPU_STEP: Final = 5  # repetitions at a time


def serve(server: Server, path: str, idle: float | None, *, announce: Callable[[], None]) -> None:
    """Fork for each connection, until requests have stopped for a long time.

    Args:
        server: forks.
        path: the path of its socket; the warmup's files are next to it.
        idle: milliseconds without a request before it ends; None to serve for ever.
        announce: called to announce that connections are served from now on.
    """
    # Do not wait for the forked processes.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    resident.load()
    look_at_node()
    put_together(read_list())
    _share()
    if not server.note_imports():
        return
    with contextlib.suppress(OSError):
        announce()
    # Serve waiting connections before the first warmup.
    if all(server.serve_waiting() for _ in _warm_up(path)) and server.note_imports():
        server.serve_until_idle(idle)


def _share() -> None:
    """Let shims forked from now on share what is in memory."""
    gc.collect()
    make_immortal()
    fill_holes()
    gc.freeze()


def _warm_up(path: str) -> Iterator[None]:
    """Run the steps of every shim once, some milliseconds at a time."""
    for _ in range(_WARMUPS):
        yield
        warm_up(path)
    for _ in range(_WARMUPS // _GPU_STEP):
        yield
        with contextlib.suppress(NvshimError, OSError):  # the first workers then do it
            gpu_warmup.warm_up(f"{path}.gpus", _GPU_STEP)
    yield
    _share()
    # Reap processes that ended while a warmup had SIGCHLD; later ones need no reaping.
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def look_at_node() -> None:
    """Read and parse what containers with GPUs need, for shims to use while it is valid.

    This is the inventory, and the prepared plan of the last used image.
    """
    try:
        config = load_config()
        decode_ahead(config)
        Prepared.decode(note_used_last(config.layers))
    except Exception:  # noqa: BLE001, S110 - a container with GPUs reports it
        pass


class Server:
    """Forks for connections.

    Args:
        listener: accepts connections.
        address: containerd's gRPC address.
        installation: if it has changed, this serves no connection. The verb then starts cold, and
            leaves our successor behind.
    """

    def __init__(self, listener: socket.socket, address: str, installation: Installation) -> None:
        self._listener = listener
        self._address = address
        self._installation = installation
        self._pool: PreforkPool | None = None
        # By descriptor, the processes that wait to become a shim, and that verbs have; and the
        # connection to one that a verb has given back.
        self._lent: dict[int, Lent] = {}
        self._waiting: socket.socket | None = None
        self._poll = select.poll()
        self._poll.register(listener, select.POLLIN)
        if installation.descriptor >= 0:
            self._poll.register(installation.descriptor, select.POLLIN)

    def note_imports(self) -> bool:
        """Record the imported files; return whether they are unchanged since the start."""
        return self._installation.is_imported()

    def serve_waiting(self) -> bool:
        """Serve the waiting connections; return whether the installation is unchanged."""
        while ready := self._poll.poll(0):
            if not self._serve(ready):
                return False
        return True

    def serve_until_idle(self, idle: float | None) -> None:
        """Serve with a pool, until no connection has come for this many milliseconds."""
        wanted = True
        while (ready := self._poll.poll(_REFILL * 1000 if wanted else idle)) or wanted:
            if not ready:
                self._refill()
                wanted = False
            elif not self._serve(ready):
                return
            else:
                wanted = wanted or self._pool is None

    def _serve(self, ready: list[tuple[int, int]]) -> bool:
        if self._installation.has_changed():
            return False
        for fd, _ in ready:
            if fd in self._lent:
                self._take_back(fd)
        if (self._listener.fileno(), select.POLLIN) in ready:
            connection, _ = self._listener.accept()
            with connection, contextlib.suppress(OSError):
                if not peer_is_another(connection):
                    connection.send(ACCEPTED)
                    taken, self._pool = self._pool, None
                    if taken is None:
                        serve_in_fork(connection, self._address)
                    elif (lent := taken.serve(connection, self._address)) is not None:
                        self._lent[lent.fileno()] = lent
                        self._poll.register(lent, select.POLLIN)
                        if len(self._lent) > _MOST_LENT:
                            self._take_back(next(iter(self._lent)))
        return True

    def _take_back(self, fd: int) -> None:
        """Keep the waiting process of a verb, if that has ended without using it."""
        self._poll.unregister(fd)
        waiting = self._lent.pop(fd).take_back()
        if self._waiting is None:
            self._waiting = waiting
        elif waiting is not None:
            waiting.close()  # it exits

    def _refill(self) -> None:
        look_at_node()
        waiting, self._waiting = self._waiting, None
        try:
            self._pool = PreforkPool(self._address, waiting)
        except OSError:  # no process can be forked now
            self._pool = None
