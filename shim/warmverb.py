"""Doing a verb in a process forked from the fork server, for a caller that is no Python.

containerd executes :file:`launcher.c`, which has no interpreter to start. It sends the fork server
what a verb has of its own: words, environment, directory and standard descriptors. A fork takes
them on, and does the verb as an interpreter started for it would.

What is sent is a length, then texts, each with a zero after it: the Python program that would do
the verb otherwise, the number of words, the words, the environment. The fork server says
``ACCEPTED`` as soon as it has the connection. The fork says ``READY``, and
does nothing until it reads ``GO``, with which come four descriptors (directory, 0, 1, 2). At the
end it says a byte, the verb's status. If a shim is to be started, it then becomes that.

A caller that is killed, as containerd kills a verb that takes too long, takes the fork with it.

Source: unix(7) SCM_RIGHTS; fcntl(2) O_ASYNC.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
from socket import MSG_CMSG_CLOEXEC, MSG_DONTWAIT, MSG_PEEK, recv_fds
from typing import TYPE_CHECKING, Final, NoReturn

from shim import verbs
from shim.warmstart import GO

if TYPE_CHECKING:
    import socket

READY: Final = b"."

# The directory and the three standard descriptors.
_DESCRIPTORS: Final = 4

_FNV_OFFSET: Final = 0xCBF29CE484222325
_FNV_PRIME: Final = 0x100000001B3


class VerbRequest:
    """A verb that somebody wants done.

    Attributes:
        program: the Python program that would do it otherwise.
        words: what follows the program's name.
        environment: the whole environment of the verb.
    """

    __slots__ = ("environment", "program", "words")

    def __init__(self, program: str, words: list[str], environment: dict[str, str]) -> None:
        self.program = program
        self.words = words
        self.environment = environment

    @classmethod
    def decode(cls, content: bytes) -> VerbRequest:
        """The request from its bytes.

        Raises:
            ValueError: they are not what the launcher sends.
        """
        program, number, *rest = [os.fsdecode(text) for text in content.split(b"\0")[:-1]]
        count = int(number)
        words, variables = rest[:count], rest[count:]
        # A variable without "=" is nothing that getenv(3) would find either.
        pairs = (variable.split("=", 1) for variable in variables if "=" in variable)
        return cls(program, words, dict(pairs))


def link_name(address: str, program: str) -> str:
    """The name of the link by which the launcher finds the fork server, beside its socket.

    Args:
        address: containerd's gRPC address.
        program: the Python program beside the launcher.
    """
    value = _FNV_OFFSET
    for text in (address, program, os.readlink("/proc/self/ns/mnt")):
        for byte in (*os.fsencode(text), 0):
            value = (value ^ byte) * _FNV_PRIME & 0xFFFFFFFFFFFFFFFF
    return f"l{value:016x}"


def become_verb(connection: socket.socket, request: VerbRequest, *, parent: int) -> NoReturn:
    """Do a verb in this process, which was just forked, and end it.

    Args:
        connection: to the launcher.
        request: the verb.
        parent: the pid of who called the launcher: containerd.
    """
    try:
        connection.send(READY)
        # However long it takes: who does not want the verb any more closes its end.
        connection.settimeout(None)
        go, descriptors, _, _ = recv_fds(connection, len(GO), _DESCRIPTORS, MSG_CMSG_CLOEXEC)
        if go == GO:
            _end_with(connection)
            directory, *standard = descriptors
            os.fchdir(directory)
            for number, descriptor in enumerate(standard):
                os.dup2(descriptor, number)
            os.environ.clear()
            os.environ.update(request.environment)
            verbs.main(
                request.words,
                tell=lambda status: _tell(connection, status),
                parent=parent,
                warm=True,
            )
    finally:
        os._exit(1)


def _tell(connection: socket.socket, status: int) -> None:
    """Tell the launcher the verb's status; from here on this process does not end with it."""
    flags = fcntl.fcntl(connection, fcntl.F_GETFL)
    fcntl.fcntl(connection, fcntl.F_SETFL, flags & ~os.O_ASYNC)
    # Whoever waits for the end of the launcher's output shall not wait for ours.
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    with contextlib.suppress(OSError):  # it was killed in this moment
        connection.send(bytes([status]))
    connection.close()


def _end_with(connection: socket.socket) -> None:
    """Let the kernel end this process when the other end is closed."""
    for number in (signal.SIGTERM, signal.SIGIO, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
    flags = fcntl.fcntl(connection, fcntl.F_GETFL)
    fcntl.fcntl(connection, fcntl.F_SETFL, flags | os.O_ASYNC)
    try:
        if not connection.recv(1, MSG_PEEK | MSG_DONTWAIT):
            os._exit(1)  # it was closed before that
    except BlockingIOError:
        pass
