"""The fork server: a process with all imports that forks shims and verbs.

There is one for each containerd and process context, both part of its name
(:mod:`shim.verbs.warmstart`). The first cold ``start`` leaves it behind, or systemd starts it
(:mod:`shim.forkserver.systemd_start`). It has one thread, which waits in poll(2) between requests.

Rules
- It exits after a long time without requests, and when an imported file has changed: a shim must
  have the installed version. SIGTERM ends it at any time. Shims are not its children, so this does
  not affect them.
- It listens before it imports: while a node boots, verbs wait up to half a second for it. Cold
  verbs would take about as long, and each of their shims would need 16 MB more for its whole life.
- It reads no request. It hands each connection to a forked process
  (:mod:`shim.forkserver.prefork_pool`), so a slow or stopped client does not delay others.
- If it cannot serve a request, it closes the connection without an answer; the launcher then
  becomes an interpreter and executes the verb itself.
- Before the first fork, it hides imported objects from the garbage collector (gc.freeze), so that
  shims share their pages for life.

This module imports little. It imports the rest, :mod:`shim.forkserver.serving`, after recording the
state of the installed files.

Source: fork(2), poll(2), unix(7).
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Final, NoReturn

from shim import PROGRAM, files, forked, processes, sockets
from shim.errors import NvshimError
from shim.forkserver import systemd_start
from shim.forkserver.installation import Installation
from shim.verbs.handover import UMASK
from shim.verbs.invocation import FORK_SERVER, parse
from shim.verbs.warmstart import LOCK_FD, READY_LINK, STARTING_LINK, link_name, lock_path

# Seconds without a request until it ends.
IDLE: Final = 600.0


def main(words: Sequence[str]) -> NoReturn:
    """Become the fork server described by the command line.

    Args:
        words: the arguments. ``-address`` names containerd. Without ``-socket`` the process first
            adopts containerd's context, and stays even without requests.
    """
    try:
        asked = parse(words, (FORK_SERVER,))
        if not asked.socket:
            systemd_start.serve(asked.address)
    except NvshimError as error:
        sys.exit(str(error))
    serve(asked.socket, asked.address, stay=asked.stay)


def serve(path: str, address: str, *, stay: bool = False) -> NoReturn:
    """Serve until requests stop.

    Args:
        path: the socket. The caller's descriptor holds the lock next to it.
        address: containerd's gRPC address, shown in the command line.
        stay: whether to stay even without requests.
    """
    _become_server(address)
    try:
        # Blocked since before exec, so that it never ends us without the clean-up below.
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        installation = Installation(os.path.abspath(sys.argv[0]))
        gc.disable()
        _import_threading_without_hook()
        links = _links(path, address)
        with _listening(path, links) as listener:
            # Imported after checking its files, and after threading.
            from shim.forkserver import serving  # noqa: PLC0415

            if listener is not None:
                idle = None if stay else IDLE * 1000
                server = serving.Server(listener, address, installation)
                serving.serve(server, path, idle, announce=partial(os.rename, *links))
    except SystemExit:
        pass
    finally:
        files.remove(lock_path(path))
        os._exit(0)


def _links(path: str, address: str) -> tuple[str, str]:
    """Return the links to the socket, during its start and afterwards.

    The launcher needs them, because it cannot compute the digest in the socket's name.
    """
    program = os.path.abspath(sys.argv[0])
    directory = os.path.dirname(path)
    names = (link_name(address, program, kind) for kind in (STARTING_LINK, READY_LINK))
    starting, ready = (os.path.join(directory, name) for name in names)
    return starting, ready


@contextmanager
def _listening(path: str, links: tuple[str, str]) -> Iterator[socket.socket | None]:
    """Listen, with the first of the links; None if another process listens there."""
    # Files created here are removed below, even if SIGTERM comes at once.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    listener = sockets.listen(path)
    if listener is None:
        yield None
        return
    identity, name = sockets.identity(path), os.path.basename(path)
    try:
        _remove_links(links, name)  # left by a killed server: a launcher would wait longer for us
        with suppress(OSError):
            os.symlink(name, f"{links[0]}.{os.getpid()}")
            os.rename(f"{links[0]}.{os.getpid()}", links[0])
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        yield socket.socket(fileno=listener)
    finally:
        # It is about to end; SIGTERM would keep it from removing its files.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        _remove_links(links, name)
        sockets.remove_own(path, identity)


def _remove_links(links: tuple[str, str], name: str) -> None:
    """Remove the links to a socket of this name."""
    for link in links:
        with suppress(OSError):
            if os.readlink(link) == name:
                os.unlink(link)


def _become_server(address: str) -> None:
    """Close all descriptors but 0, 1, 2 and the lock, and leave the caller's directory."""
    forked.close_others({0, 1, 2, LOCK_FD})
    try:
        os.set_inheritable(LOCK_FD, False)  # or each runtime that a verb calls would hold the lock
    except OSError:
        pass  # started manually, without a lock
    os.umask(UMASK)
    os.chdir("/")
    processes.set_command_line([PROGRAM, "-address", address, FORK_SERVER])
    # Blocked until it can remove its files.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    forked.reset_signals(signal.SIGPIPE)
    signal.signal(signal.SIGTERM, _end)


def _end(_: int, __: object) -> NoReturn:
    raise SystemExit


def _import_threading_without_hook() -> None:
    """Import threading, which protobuf needs, without its function for forked children.

    That function resets locks and lists of other threads. There are none here: the fork server has
    one thread, and shims start threads with ``_thread``. The function would dirty 0.4 MB in every
    shim.
    """
    register, os.register_at_fork = os.register_at_fork, lambda **_: None
    try:
        import threading  # noqa: F401, PLC0415
    finally:
        os.register_at_fork = register
