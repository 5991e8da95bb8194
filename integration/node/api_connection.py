"""Connections to the API server: what they trust, and keeping one for the next call.

Rules
- A connection is kept after a call: to make one anew takes most of a call's time.
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
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from integration.node.api_access import Access

__all__ = ["IDLE_TIMEOUT", "TIMEOUT", "Connection", "Kept", "trusted"]

TIMEOUT: Final = 10.0
"""Seconds that the server may be silent in a call, unless the agent is told otherwise."""

# How long an idle connection is believed in, and its answer waited for, in seconds.
_IDLE: Final = 60.0
IDLE_TIMEOUT: Final = 3.0
_MOST_IDLE: Final = 2
_PROBES: Final = (
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
    if access.certificate:
        # OpenSSL reads it from a file only. This one nobody else can open.
        with open(os.memfd_create("certificate", os.MFD_CLOEXEC), "w", encoding="ascii") as file:
            file.write(access.certificate)
            file.flush()
            trust.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
    return trust


class Connection(http.client.HTTPSConnection):
    """One connection; as a context it is closed at the end."""

    plain: socket.socket
    """What is below; a connection forgets its own where the server closes it after an answer."""

    def __init__(self, access: Access, trust: ssl.SSLContext, timeout: float = TIMEOUT) -> None:
        super().__init__(access.host, access.port, timeout=timeout, context=trust)
        self.access, self._trust = access, trust

    def connect(self) -> None:
        """Connect, as the base does, with the kernel's probes."""
        http.client.HTTPConnection.connect(self)
        for option in _PROBES:
            self.sock.setsockopt(*option)
        name = self.access.name or self.host
        self.sock = self._trust.wrap_socket(self.sock, server_hostname=name)
        self.plain = self.sock

    def asked(
        self, method: str, target: str, data: str | None, headers: dict[str, str], timeout: float
    ) -> http.client.HTTPResponse:
        """Ask, and have the answer's first bytes; closed if there is none.

        Args:
            timeout: seconds from then on.
        """
        try:
            self.request(method, target, data, headers)
            answer = self.getresponse()
            self.plain.settimeout(timeout)
        except BaseException:
            self.close()
            raise
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
        if kept is None or not _is_same(kept[0], access):
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
            if time.monotonic() - since < _IDLE and _is_same(connection.access, access):
                return connection
            connection.close()
        return None


def _is_same(one: Access, other: Access) -> bool:
    """Whether a connection is good for both: the token comes with each call."""
    return replace(one, token="") == replace(other, token="")
