"""Connections to the API server: what they trust, and which are kept for the next call.

Rules
- A connection is kept after a call: connecting takes most of a call's time. A load balancer may
  lose the server behind an idle one without a word, so it is used again only soon afterwards.
- A kept connection is dead if its peer does not even acknowledge a request. A server that has
  acknowledged it is slow, and must not get it twice.
- A time limit covers everything: each address of the server's name gets a part of it, and a server
  that sends a byte now and then does not extend it.
- The kernel probes silent connections. A peer that vanished is noticed after half a minute, even
  by a watch, which may be silent for long.
- After a change of the authority or the client's certificate, older connections are not used.

Source: tcp(7), SIOCOUTQ; RFC 9112, 9.3; Go's net/http, ``Transport`` (``shouldRetryRequest``).
"""

from __future__ import annotations

import fcntl
import http.client
import os
import select
import socket
import ssl
import struct
import termios
import time
from contextlib import suppress
from typing import Any, Final, Self, cast

from integration.apiserver.credentials import Access

__all__ = ["TIMEOUT", "Connection", "ConnectionUnusable", "Kept", "trusted"]

TIMEOUT: Final = 10.0
"""Seconds that a call may take, unless the agent is configured otherwise."""

_IDLE: Final = 15.0  # seconds after which an idle connection is not used
_FOR_ACKNOWLEDGEMENT: Final = 2.5  # seconds until a request that is not acknowledged is lost
_MOST_IDLE: Final = 2
_OPTIONS: Final = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000),
)


def trusted(access: Access) -> ssl.SSLContext:
    """Return a context that accepts servers with a certificate of the cluster's authority.

    Many of these certificates lack extensions that RFC 5280, and Python since 3.13, require.
    """
    trust = ssl.create_default_context(cadata=access.authority or None)
    trust.verify_flags &= ~ssl.VERIFY_X509_STRICT
    trust.sslsocket_class = _Socket
    if access.certificate:
        # OpenSSL reads it only from a file. No other process can open this one.
        with open(os.memfd_create("certificate", os.MFD_CLOEXEC), "w", encoding="ascii") as file:
            file.write(access.certificate)
            file.flush()
            trust.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
    return trust


def _left(ends: float) -> float:
    """Return the seconds until a time of the monotonic clock."""
    if (left := ends - time.monotonic()) <= 0:
        raise TimeoutError("it takes too long")
    return left


class _Socket(ssl.SSLSocket):
    """A socket with one deadline for all reads and writes.

    Attributes:
        ends: the deadline, on the monotonic clock.
        has_answered: whether it has received anything since that was set to False.
    """

    ends: float
    has_answered: bool

    def recv_into(self, *what: Any) -> int:
        self.settimeout(_left(self.ends))
        received = super().recv_into(*what)
        self.has_answered = self.has_answered or received > 0
        return received

    def send(self, *what: Any) -> int:
        self.settimeout(_left(self.ends))
        return super().send(*what)


class ConnectionUnusable(Exception):
    """A kept connection cannot be used any longer, and another one can be tried."""


class Connection(http.client.HTTPSConnection):
    """One connection; a context manager closes it."""

    auto_open = 0
    below: _Socket
    """The socket; http.client drops its own reference when the server closes after an answer."""

    def __init__(self, access: Access, trust: ssl.SSLContext) -> None:
        super().__init__(access.host, access.port, context=trust)
        self.access, self._trust = access, trust

    def asked(
        self, method: str, target: str, data: str | None, headers: dict[str, str], ends: float
    ) -> http.client.HTTPResponse:
        """Send a request, and return the answer's head; close the connection on failure.

        Args:
            ends: the deadline, on the monotonic clock.

        Raises:
            ConnectionUnusable: a kept connection has ended, or is dead, and nothing of an answer
                has come. The request may be sent again on another connection.
            OSError: there is no answer.
            HTTPException: the answer is not HTTP.
        """
        is_kept = self.sock is not None
        try:
            if not is_kept:
                self._open(ends)
            self.below.ends, self.below.has_answered = ends, False
            self.request(method, target, data, headers)
            if is_kept:
                self._refuse_dead(min(_FOR_ACKNOWLEDGEMENT, _left(ends) / 4))
            return self.getresponse()
        except (OSError, http.client.HTTPException) as error:
            self.close()
            is_late = isinstance(error, TimeoutError) and error.errno is None  # else by the kernel
            if is_kept and not is_late and not self.below.has_answered:
                raise ConnectionUnusable from error
            raise
        except BaseException:
            self.close()
            raise

    def _refuse_dead(self, seconds: float) -> None:
        """Raise an error if the peer acknowledges nothing of what was sent.

        Args:
            seconds: the time that it has.
        """
        poll = select.poll()
        poll.register(self.below, select.POLLIN)
        if not poll.poll(seconds * 1000) and _unacknowledged(self.below):
            raise ConnectionAbortedError("the peer does not acknowledge the request")

    def _open(self, ends: float) -> None:
        plain = _connected(self.host, self.port, ends)
        with plain:  # the wrapped socket owns the descriptor now
            for option in _OPTIONS:
                plain.setsockopt(*option)
            plain.settimeout(_left(ends))
            name = self.access.name or self.host
            self.below = cast("_Socket", self._trust.wrap_socket(plain, server_hostname=name))
        self.sock = self.below

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _unacknowledged(connection: socket.socket) -> int:
    """Return how many bytes of what was sent the peer has not acknowledged."""
    (count,) = struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))
    return int(count)


def _connected(host: str, port: int, ends: float) -> socket.socket:
    """Connect to the first address of a name that answers in its part of the time."""
    failed = OSError(f"{host} has no address")
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for n, (family, kind, protocol, _, address) in enumerate(found):
        plain = socket.socket(family, kind, protocol)
        try:
            plain.settimeout(_left(ends) / (len(found) - n))
            plain.connect(address)
        except OSError as error:
            plain.close()
            failed = error
        else:
            return plain
    raise failed


class Kept:
    """What is kept between calls: connections, and the TLS context. Thread-safe."""

    def __init__(self) -> None:
        self._idle: list[tuple[float, Connection]] = []
        self._most = _MOST_IDLE
        self._trust: tuple[Access, ssl.SSLContext] | None = None

    def close(self) -> None:
        """Close all connections, and keep none from now on."""
        self._most = 0
        self._drop(self._most)

    def doubt(self) -> None:
        """Close all idle connections: another one was not answered."""
        self._drop(0)

    def __del__(self) -> None:  # for callers that have not closed it
        self.close()

    def trust(self, access: Access) -> ssl.SSLContext:
        """Return the TLS context; a new one if the authority or the certificate changed."""
        kept = self._trust
        if kept is None or kept[0] != access:
            kept = self._trust = access, trusted(access)
        return kept[1]

    def keep(self, connection: Connection) -> None:
        """Keep a connection for the next call."""
        self._idle.append((time.monotonic(), connection))
        self._drop(self._most)

    def _drop(self, most: int) -> None:
        with suppress(IndexError):  # another thread was faster
            while len(self._idle) > most:
                self._idle.pop(0)[1].close()

    def idle(self, access: Access) -> Connection | None:
        """Return an idle connection; None if there is none."""
        while self._idle:
            try:
                since, connection = self._idle.pop()
            except IndexError:  # another thread was faster
                return None
            if time.monotonic() - since < _IDLE and connection.access == access:
                return connection
            connection.close()
        return None
