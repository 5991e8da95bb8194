"""The fork server's processes: one executes a verb, one becomes the shim that the verb starts.

A fork takes milliseconds, mostly to copy pages at the first write. So a pair is forked before a
verb arrives (:class:`PreforkPool`). The first process waits for a connection from the fork server,
the second for a listener from the first (:mod:`shim.verbs.handover`). The second is a child of the
first, like a shim that a verb forks, and becomes an orphan after the verb. Both exit with the fork
server. If either is killed, nothing is lost: an unserved connection closes, and its client executes
the verb itself; a verb without a waiting process forks the shim itself.

Most containers join the shim of their pod. Their verbs give the second process back
(:class:`Lent`), and it waits for the next verb.

The process for a verb takes over its caller's arguments, environment, directory and standard
descriptors. Then it executes the verb like a new interpreter. If containerd kills the caller
because the verb takes too long, this process exits, too.

Source: fork(2), unix(7) SCM_RIGHTS; fcntl(2) O_ASYNC; :mod:`shim.verbs.warmstart` for the protocol.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import fcntl
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import Final, NamedTuple, NoReturn

from shim import PROGRAM, forked, processes
from shim.verbs import handover
from shim.verbs.handover import GO
from shim.verbs.verbs import WarmCaller
from shim.verbs.verbs import main as do_verb
from shim.verbs.warmstart import LARGEST_REQUEST, LENGTH, READY, peer_process, process_context

# Seconds for a request after a client has connected.
_PATIENCE: Final = 1.0
# Bytes; nearly every request is shorter.
_CHUNK: Final = 1 << 14
# The directory and the three standard descriptors.
_DESCRIPTORS: Final = 4
_UNUSED: Final = b"-"


class Lent:
    """A process that waits to become a shim, while a verb has it.

    Args:
        verb: the connection to the process that executes the verb.
        shim: the connection to the waiting process.
    """

    __slots__ = ("_shim", "_verb")

    def __init__(self, verb: socket.socket, shim: socket.socket) -> None:
        self._verb = verb
        self._shim = shim

    def fileno(self) -> int:
        """Return a descriptor that is readable once the verb no longer needs the process."""
        return self._verb.fileno()

    def take_back(self) -> socket.socket | None:
        """Return the connection to the waiting process; None if the verb has used it.

        Call this once, when the descriptor is readable.
        """
        with self._verb:
            try:
                is_unused = self._verb.recv(len(_UNUSED), socket.MSG_DONTWAIT) == _UNUSED
            except OSError:
                is_unused = False
        if is_unused:
            return self._shim
        self._shim.close()  # it exits, if it has not become a shim
        return None


class PreforkPool:
    """Two processes forked in advance: one for a verb, one for the shim that it starts."""

    __slots__ = ("_shim", "_verb")

    def __init__(self, address: str, waiting: socket.socket | None = None) -> None:
        """Fork the two processes.

        Args:
            address: containerd's gRPC address, shown in the command line.
            waiting: the connection to a process that already waits to become a shim; None forks
                one.

        Raises:
            OSError: no process can be forked.
        """
        self._verb, for_verb = socket.socketpair()
        with for_verb:
            if waiting is not None:
                self._shim = waiting
                _fork([for_verb], address, lambda: _wait_for_connection(for_verb))
                return
            self._shim, for_shim = handover.channel()

            def fork_second() -> None:
                _fork([for_shim], address, lambda: _wait_for_listener(for_shim))

            with for_shim:
                _fork(
                    [for_verb], address, lambda: _wait_for_connection(for_verb), first=fork_second
                )

    def serve(self, connection: socket.socket, address: str) -> Lent | None:
        """Let them serve a connection.

        Args:
            connection: the connection to the client.
            address: containerd's gRPC address.

        Returns:
            The second process, which the verb may not need; None if that will not be known.

        Raises:
            OSError: no process can be forked.
        """
        try:
            socket.send_fds(self._verb, [GO], [connection.fileno(), self._shim.fileno()])
        except OSError:  # the process for the verb was killed
            with self._verb, self._shim:
                serve_in_fork(connection, address, self._shim)
            return None
        return Lent(self._verb, self._shim)


def serve_in_fork(
    connection: socket.socket, address: str, waiting: socket.socket | None = None
) -> None:
    """Serve a connection in a newly forked process.

    Args:
        connection: the connection to the client.
        address: containerd's gRPC address.
        waiting: the connection to the process that waits to become the shim, if there is one.

    Raises:
        OSError: no process can be forked.
    """
    kept = [connection] if waiting is None else [connection, waiting]
    _fork(kept, address, lambda: _serve(connection, waiting, None))


def _fork(
    kept: list[socket.socket],
    address: str,
    child: Callable[[], NoReturn],
    *,
    first: Callable[[], None] = lambda: None,
) -> None:
    """Fork a process that shares only memory with this one.

    Args:
        kept: the descriptors that it keeps besides 0, 1 and 2.
        address: containerd's gRPC address, shown in the command line.
        child: the process's function.
        first: called before it writes to any memory.
    """

    def stand_alone() -> NoReturn:
        try:
            first()
            forked.close_others({0, 1, 2, *(each.fileno() for each in kept)})
            forked.lead_group()
            processes.set_command_line([PROGRAM, "-address", address, "-spare", "fork-server"])
            child()
        finally:
            os._exit(1)

    # The child must not remove the fork server's files.
    forked.fork(stand_alone, (signal.SIGTERM,))


def _wait_for_listener(channel: socket.socket) -> NoReturn:
    """Run the process that waits to become a shim."""
    accepted = handover.accept(channel)
    if accepted is None:
        os._exit(0)
    handover.become_shim(*accepted)


def _wait_for_connection(channel: socket.socket) -> NoReturn:
    """Run the process that waits for a verb."""
    _, fds, _, _ = socket.recv_fds(channel, len(GO), 2, socket.MSG_CMSG_CLOEXEC)
    if not fds:
        os._exit(0)  # the fork server has ended
    connection, waiting = (socket.socket(fileno=fd) for fd in fds)
    _serve(connection, waiting, channel)


class VerbRequest(NamedTuple):
    """A verb to execute."""

    program: str  # the Python program that would otherwise execute it
    words: list[str]  # the arguments, without the program's name
    environment: dict[str, str]  # the whole environment of the verb

    @classmethod
    def decode(cls, content: bytes) -> VerbRequest:
        """Parse a request.

        Raises:
            ValueError: the bytes are not a client's request.
        """
        program, number, *rest = [os.fsdecode(text) for text in content.split(b"\0")[:-1]]
        count = int(number)
        words, variables = rest[:count], rest[count:]
        # getenv(3) would also ignore a variable without "=".
        pairs = (variable.split("=", 1) for variable in variables if "=" in variable)
        return cls(program, words, dict(pairs))


def _serve(
    connection: socket.socket, waiting: socket.socket | None, server: socket.socket | None
) -> NoReturn:
    """Execute a client's verb, in a process forked for it.

    Args:
        connection: the connection to the client, a process of our own user.
        waiting: the connection to the process that waits to become the shim, if there is one.
        server: the connection to the fork server, which takes an unused one back; None otherwise.
    """

    def tell(status: int) -> None:
        # First, because this process may be ended as soon as the client knows.
        if server is not None and waiting is not None and waiting.fileno() >= 0:
            _give_back(server)
        _tell(connection, status)

    try:
        connection.settimeout(_PATIENCE)
        request = VerbRequest.decode(_receive(connection))
        client = peer_process(connection)
        # The launcher does not compare contexts, which can change after a fork.
        is_ours = request.program == os.path.abspath(sys.argv[0])
        if is_ours and process_context(client) == process_context():
            parent = processes.parent_of(client)
            _become_verb(connection, request, WarmCaller(parent, waiting, tell))
    except (OSError, ValueError):
        pass  # close without an answer, like all requests that cannot be served
    finally:
        os._exit(1)


def _receive(connection: socket.socket) -> bytes:
    """Return the content of a request.

    Raises:
        ValueError: it is not a request.
    """
    content = b""
    missing = LENGTH.size
    while missing > 0:
        chunk = connection.recv(_CHUNK)
        content += chunk
        missing = LENGTH.size - len(content)
        if missing <= 0:
            (length,) = LENGTH.unpack_from(content)
            missing += length
        if not chunk or missing < 0 or len(content) + missing > LARGEST_REQUEST:
            message = "no request, or more than one"
            raise ValueError(message)
    return content[LENGTH.size :]


def _become_verb(connection: socket.socket, request: VerbRequest, caller: WarmCaller) -> None:
    """Execute a verb in this process, and exit; return if the client has withdrawn it."""
    connection.send(READY)
    # No time limit: a client that withdraws the verb closes its end.
    connection.settimeout(None)
    go, descriptors, _, _ = socket.recv_fds(
        connection, len(GO), _DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
    )
    if go != GO:
        return
    _end_with(connection)
    directory, *standard = descriptors
    os.fchdir(directory)
    for number, descriptor in enumerate(standard):
        os.dup2(descriptor, number)
    os.environ.clear()
    os.environ.update(request.environment)
    do_verb(request.words, caller=caller)


def _tell(connection: socket.socket, status: int) -> None:
    """Send the verb's status to the client."""
    # containerd waits for the end of the client's output, but should not wait for ours.
    os.closerange(0, 3)
    try:
        connection.send(bytes([status]))
    except OSError:
        pass  # the client was just killed


def _give_back(server: socket.socket) -> None:
    """Tell the fork server that the waiting process was not used, and will not be."""
    try:
        server.send(_UNUSED)
    except OSError:
        pass  # the fork server has ended


def _end_with(connection: socket.socket) -> None:
    """Exit when the other end closes, which SIGIO reports.

    The signal alone proves nothing: it also arrives for each sent byte, even one that was already
    read.
    """

    def look(*_: object) -> None:
        try:
            is_open = bool(connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            is_open = True
        except OSError:
            is_open = False
        if not is_open:
            os._exit(1)

    _signal.signal(_signal.SIGIO, look)
    fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
    flags = fcntl.fcntl(connection, fcntl.F_GETFL)
    fcntl.fcntl(connection, fcntl.F_SETFL, flags | os.O_ASYNC)
    look()  # it may already be closed
