"""The processes that the fork server forks: each takes one connection, and serves it.

What comes of one is a shim, or a verb, or a verb first and then the shim that it starts. A shim is
nobody's child, as one is that a verb in Python forks and leaves; so they are all forked twice.

A fork takes milliseconds, most of them for the pages that a process copies when it first writes to
them. One, the spare, is therefore forked before anybody asks, and waits for a connection that the
fork server hands to it. It ends when the fork server does. Whatever becomes of it, whoever asks
loses nothing: a connection that nobody serves is closed, and the verb is done elsewhere.

Source: fork(2), unix(7) SCM_RIGHTS.
"""

from __future__ import annotations

import os
import socket
import sys
from typing import TYPE_CHECKING, Final

from shim import detach, forked
from shim.warmstart import GO, LENGTH, Request, peer_process, surroundings
from shim.warmverb import VerbRequest, become_verb

if TYPE_CHECKING:
    import signal as _signal
    from collections.abc import Callable
    from typing import NoReturn
else:
    # Without the enums that the public module makes of each set of signals.
    import _signal

# Seconds for a request to come in once somebody has connected.
_PATIENCE: Final = 1.0
_LONGEST_REQUEST: Final = 1 << 18
# Bytes; of nearly every request this is more than there is.
_CHUNK: Final = 1 << 14


class Spare:
    """A process that was forked in advance, and waits for a connection."""

    __slots__ = ("_channel",)

    def __init__(self, address: str) -> None:
        """Fork it.

        Args:
            address: containerd's gRPC address, shown in the command line.

        Raises:
            OSError: there is no room for a process.
        """
        self._channel, theirs = socket.socketpair()
        with theirs:
            fork_orphan(theirs, address, lambda: _wait(theirs))

    def give(self, connection: socket.socket) -> bool:
        """Let it serve a connection.

        Returns:
            Whether it was there to take it.
        """
        try:
            socket.send_fds(self._channel, [GO], [connection.fileno()])
        except OSError:
            return False
        finally:
            self._channel.close()
        return True


def fork_orphan(kept: socket.socket, address: str, child: Callable[[], NoReturn]) -> None:
    """Fork a process that is nobody's child.

    Args:
        kept: the one descriptor that it keeps besides 0, 1 and 2.
        address: containerd's gRPC address, shown in the command line.
        child: what it does.

    Raises:
        OSError: there is no room for a process.
    """
    # A signal in the child must not end what is the fork server's to end.
    before = _signal.pthread_sigmask(_signal.SIG_BLOCK, (_signal.SIGTERM,))
    try:
        if os.fork() == 0:
            _fork_again(kept, before, address, child)
    finally:
        _signal.pthread_sigmask(_signal.SIG_SETMASK, before)


def _fork_again(
    kept: socket.socket, mask: set[int], address: str, child: Callable[[], NoReturn]
) -> NoReturn:
    try:
        if os.fork() == 0:
            forked.close_others({0, 1, 2, kept.fileno()})
            detach.prepare_orphan(address, mask)
            child()
    finally:
        os._exit(1)


def _wait(channel: socket.socket) -> NoReturn:
    """Be the spare."""
    _, fds, _, _ = socket.recv_fds(channel, len(GO), 1, socket.MSG_CMSG_CLOEXEC)
    if not fds:
        os._exit(0)  # the fork server has ended
    channel.close()
    serve(socket.socket(fileno=fds[0]))


def serve(connection: socket.socket) -> NoReturn:
    """Do what a connection asks for, in a process that is forked for it.

    A shim is asked for by a verb in Python, which sends the listener; a verb by the launcher.

    Args:
        connection: its peer is one of our own user.
    """
    try:
        connection.settimeout(_PATIENCE)
        content, fds = _receive(connection)
        asker = peer_process(connection)
        # The fork server was found by its surroundings, or by less; and they can be changed.
        if surroundings(asker) == surroundings():
            if len(fds) == 1:
                _start_shim(connection, fds[0], Request.decode(content))
            elif not fds:
                request = VerbRequest.decode(content)
                if request.program == os.path.abspath(sys.argv[0]):
                    become_verb(connection, request, parent=_parent_of(asker))
    except (OSError, ValueError):
        pass  # unanswered, as all that cannot be served
    finally:
        os._exit(1)


def _start_shim(connection: socket.socket, listener: int, request: Request) -> None:
    connection.send(str(os.getpid()).encode())
    # However long it takes: a verb that has lost patience closes its end.
    connection.settimeout(None)
    if connection.recv(len(GO)) == GO:
        detach.become_server(listener, request)


def _receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    """The whole of a request, and the descriptors that came with it.

    Raises:
        ValueError: it is no request.
    """
    begin, fds, flags, _ = socket.recv_fds(connection, _CHUNK, 2, socket.MSG_CMSG_CLOEXEC)
    begin += _rest(connection, LENGTH.size - len(begin))
    (length,) = LENGTH.unpack_from(begin)
    missing = LENGTH.size + length - len(begin)
    if missing < 0 or length > _LONGEST_REQUEST or flags & socket.MSG_CTRUNC:
        message = "more than a request"
        raise ValueError(message)
    return begin[LENGTH.size :] + _rest(connection, missing), fds


def _rest(connection: socket.socket, missing: int) -> bytes:
    content = b""
    while len(content) < missing:
        chunk = connection.recv(missing - len(content))
        if not chunk:
            message = "the end of the connection in a request"
            raise ValueError(message)
        content += chunk
    return content


def _parent_of(pid: int) -> int:
    with open(f"/proc/{pid}/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[1])
