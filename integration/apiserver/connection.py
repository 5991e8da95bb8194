"""Connections to the API server: what they trust, and keeping one for the next call.

Rules
- A connection is kept after a call: to make one anew takes most of a call's time.
- A limit is for all that is waited for until then: each address of the server's name has its part
  of it, and a server that sends a byte now and then is not waited for any longer.
- The kernel tries every connection that is silent. A peer that is gone without a word is known
  after half a minute, also to a watch, which may be silent for long.
- Where the authority, or the client's certificate, is another than before, no connection of before
  is used any more.

Source: tcp(7); RFC 9112, 9.3.
"""

from __future__ import annotations

import http.client
import os
import socket
import ssl
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Self, cast

if TYPE_CHECKING:
    from integration.apiserver.credentials import Access

__all__ = ["TIMEOUT", "Connection", "Kept", "trusted"]

TIMEOUT: Final = 10.0
"""Seconds that a call may take, unless the agent is told otherwise."""

_IDLE: Final = 60.0  # seconds that an idle connection is believed in
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
    """Who is believed to be the server: whoever has a certificate of the cluster's authority.

    Many of these lack extensions that RFC 5280 asks for, and Python does too since 3.13.
    """
    trust = ssl.create_default_context(cadata=access.authority or None)
    trust.verify_flags &= ~ssl.VERIFY_X509_STRICT
    trust.sslsocket_class = _Socket
    if access.certificate:
        # OpenSSL reads it from a file only. This one nobody else can open.
        with open(os.memfd_create("certificate", os.MFD_CLOEXEC), "w", encoding="ascii") as file:
            file.write(access.certificate)
            file.flush()
            trust.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
    return trust


def _left(ends: float) -> float:
    """Seconds until a moment of the monotonic clock."""
    if (left := ends - time.monotonic()) <= 0:
        raise TimeoutError("it takes too long")
    return left


class _Socket(ssl.SSLSocket):
    """A socket that waits until one moment, however often it is read from and written to."""

    ends: float

    def recv_into(self, *what: Any) -> int:
        self.settimeout(_left(self.ends))
        return super().recv_into(*what)

    def send(self, *what: Any) -> int:
        self.settimeout(_left(self.ends))
        return super().send(*what)


class Connection(http.client.HTTPSConnection):
    """One connection; as a context it is closed at the end."""

    auto_open = 0
    below: _Socket
    """What is below; a connection forgets its own where the server closes it after an answer."""

    def __init__(self, access: Access, trust: ssl.SSLContext) -> None:
        super().__init__(access.host, access.port, context=trust)
        self.access, self._trust = access, trust

    def asked(
        self, method: str, target: str, data: str | None, headers: dict[str, str], ends: float
    ) -> http.client.HTTPResponse:
        """Ask, and have the answer's first bytes; closed if there is none.

        Args:
            ends: when it is waited for no more, by the monotonic clock.
        """
        try:
            if self.sock is None:
                self._open(ends)
            self.below.ends = ends
            self.request(method, target, data, headers)
            return self.getresponse()
        except BaseException:
            self.close()
            raise

    def _open(self, ends: float) -> None:
        plain = _connected(self.host, self.port, ends)
        with plain:  # what is wrapped is none of it any more
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


def _connected(host: str, port: int, ends: float) -> socket.socket:
    """A connection to the first address of a name that answers in its part of the time."""
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
    """What is kept between calls: connections, and what they trust. For several threads."""

    def __init__(self) -> None:
        self._idle: list[tuple[float, Connection]] = []
        self._most = _MOST_IDLE
        self._trust: tuple[Access, ssl.SSLContext] | None = None

    def close(self) -> None:
        """Keep nothing any more, nor from now on."""
        self._most = 0
        self._drop()

    def __del__(self) -> None:  # who has not closed it just stops
        self.close()

    def trust(self, access: Access) -> ssl.SSLContext:
        """What is trusted: read anew where the authority, or the client's certificate, is new."""
        kept = self._trust
        if kept is None or kept[0] != access:
            kept = self._trust = access, trusted(access)
        return kept[1]

    def keep(self, connection: Connection) -> None:
        """Have a connection be there for the next call."""
        self._idle.append((time.monotonic(), connection))
        self._drop()

    def _drop(self) -> None:
        with suppress(IndexError):  # another thread was faster
            while len(self._idle) > self._most:
                self._idle.pop(0)[1].close()

    def idle(self, access: Access) -> Connection | None:
        """A connection that is not in use; None if there is none."""
        while self._idle:
            try:
                since, connection = self._idle.pop()
            except IndexError:  # another thread was faster
                return None
            if time.monotonic() - since < _IDLE and connection.access == access:
                return connection
            connection.close()
        return None
