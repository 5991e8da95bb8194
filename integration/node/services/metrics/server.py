"""The HTTP server for scrapers: one GET and one response for each connection.

Rules
- The standard library parses requests. A connection accepts one request, of at most :data:`LONGEST`
  bytes and without a body. The server closes it after :data:`LONGEST_EXCHANGE` seconds at the
  latest.
- The server keeps at most :data:`MOST` connections. A further one replaces the oldest, so that idle
  connections cannot lock Prometheus out.
- If a response fails, the client gets status 500, and the agent continues.

prometheus-client's server has no limits. With limits it would be as long (236 lines of code, this
has 230) and use as much memory (21.2 MB after 100 scrapes, both), and it would need a thread for
each connection (2026-11-29).

Source: RFC 9110; RFC 9112.
"""

from __future__ import annotations

import errno
import io
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Final

import anyio
import anyio.abc
from anyio.abc import ByteStream, SocketStream
from anyio.streams.stapled import MultiListener

from integration.agent_errors import MetricsAddressUnusable
from integration.node.services.metrics.address import Address

LONGEST: Final = 8192
MOST: Final = 32
LONGEST_EXCHANGE: Final = 20.0
"""Seconds, of which NVML may take up to eight."""

_END: Final = b"\r\n\r\n"
_METHODS: Final = ("GET", "HEAD")

_BACKLOG: Final = 64

# Bytes that are sent at a time; limits what is buffered for each slow client.
_SLICE: Final = 65536

_GONE: Final = (anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream, OSError)


@dataclass(frozen=True, slots=True)
class Request:
    """A parsed request."""

    method: str  # "GET" or "HEAD"
    path: str  # without the query
    headers: Mapping[str, str] = field(default_factory=dict)  # by name, in lower case


@dataclass(frozen=True, slots=True)
class Response:
    """A response."""

    status: HTTPStatus
    content: bytes
    type: str = "text/plain; charset=utf-8"  # the content's media type
    headers: tuple[tuple[str, str], ...] = ()  # further headers

    def to_head(self) -> bytes:
        """Return the status line and the headers, as bytes."""
        lines = [
            f"HTTP/1.1 {self.status.value} {self.status.phrase}",
            f"Content-Type: {self.type}",
            f"Content-Length: {len(self.content)}",
            "Connection: close",
            "X-Content-Type-Options: nosniff",
            *(f"{name}: {value}" for name, value in self.headers),
        ]
        return ("".join(f"{line}\r\n" for line in lines) + "\r\n").encode("latin-1")


class _Parsed(BaseHTTPRequestHandler):
    """The library's parser, without its sockets."""

    def __init__(self, head: bytes) -> None:
        self.rfile = io.BufferedReader(io.BytesIO(head))
        self.raw_requestline = self.rfile.readline()
        self.refused: tuple[HTTPStatus, str] | None = None
        if not self.parse_request() and self.refused is None:
            self.refused = HTTPStatus.BAD_REQUEST, "not a request of HTTP/1.1"

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Store the parser's error."""
        del explain
        self.refused = HTTPStatus(code), message or ""

    def handle_expect_100(self) -> bool:
        """Send no 100 Continue, because no request has a body."""
        return True


def parse(head: bytes) -> Request | Response:
    """Parse a request.

    Args:
        head: the request line and headers, including the empty line.

    Returns:
        The request, or the response that refuses it.
    """
    parsed = _Parsed(head)
    if parsed.refused is not None:
        return _refusal(*parsed.refused)
    headers = parsed.headers
    if "transfer-encoding" in headers or any(
        length.strip("0") for length in headers.get_all("content-length", ())
    ):
        return _refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "a body is not supported")
    if parsed.command not in _METHODS:
        return _refusal(HTTPStatus.METHOD_NOT_ALLOWED, "use GET or HEAD")
    if not parsed.path.startswith("/") or parsed.request_version == "HTTP/0.9":
        return _refusal(HTTPStatus.BAD_REQUEST, "not a path of HTTP/1")
    return Request(
        parsed.command,
        parsed.path.partition("?")[0],
        {name.lower(): value.strip() for name, value in headers.items()},
    )


def _refusal(status: HTTPStatus, why: str) -> Response:
    allow = (("Allow", ", ".join(_METHODS)),) if status == HTTPStatus.METHOD_NOT_ALLOWED else ()
    return Response(status, f"{why}\n".encode(), headers=allow)


# -- connections -------------------------------------------------------------------------------


async def listen(address: Address) -> MultiListener[SocketStream]:
    """Listen for scrapers.

    Raises:
        MetricsAddressUnusable: the address cannot be used.
    """
    try:
        return await anyio.create_tcp_listener(
            local_host=address.host or None, local_port=address.port, backlog=_BACKLOG
        )
    except (OSError, ExceptionGroup) as error:
        cause: BaseException = error
        while isinstance(cause, ExceptionGroup):
            cause = cause.exceptions[0]
        cause = cause if isinstance(cause, OSError) else cause.__cause__ or cause
        number = cause.errno if isinstance(cause, OSError) else None
        do = "choose another address with --metrics"
        if number == errno.EADDRINUSE:
            do = "stop the other program that listens there, or choose another address"
        raise MetricsAddressUnusable(
            f"to serve metrics at {address}",
            found=(cause.strerror if isinstance(cause, OSError) else None) or str(cause),
            do=do,
        ) from error


def addresses_of(listener: MultiListener[SocketStream]) -> Sequence[str]:
    """Return the addresses of a listener, with the actual port."""
    local = anyio.abc.SocketAttribute.local_address
    addresses = (each.extra(local) for each in listener.listeners)  # noqa: S610 - no database
    return [str(Address(str(each[0]), int(each[1]))) for each in addresses]


async def serve(
    listener: MultiListener[SocketStream],
    answer: Callable[[Request], Awaitable[Response]],
    failed: Callable[[Exception], None],
    wrap: Callable[[SocketStream], Awaitable[ByteStream]] | None = None,
) -> None:
    """Answer scrapers, until cancelled.

    Args:
        listener: accepts their connections; it is closed on return.
        answer: returns the response to a request.
        failed: called with an exception of ``answer``.
        wrap: starts TLS on a connection; None without TLS.
    """
    connections: dict[anyio.CancelScope, None] = {}  # the oldest first

    async def handle(stream: SocketStream) -> None:
        with anyio.move_on_after(LONGEST_EXCHANGE) as scope:
            connections[scope] = None
            if len(connections) > MOST:
                oldest = next(iter(connections))
                del connections[oldest]
                oldest.cancel()
            try:
                async with stream:
                    with suppress(*_GONE):
                        await _exchange(await wrap(stream) if wrap else stream, answer, failed)
            finally:
                connections.pop(scope, None)

    async with listener:
        await listener.serve(handle)


async def _exchange(
    stream: ByteStream,
    answer: Callable[[Request], Awaitable[Response]],
    failed: Callable[[Exception], None],
) -> None:
    received = bytearray()
    while _END not in received and len(received) <= LONGEST:
        received += await stream.receive(LONGEST)
    head, end, _ = bytes(received).partition(_END)
    if len(head) > LONGEST:
        too_large = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
        request: Request | Response = _refusal(too_large, f"more than {LONGEST} bytes")
    else:
        request = parse(head + end)
    if isinstance(request, Response):
        response = request
    else:
        try:
            response = await answer(request)
        except Exception as error:  # noqa: BLE001 - a failed scrape must not stop the others
            failed(error)
            status = HTTPStatus.INTERNAL_SERVER_ERROR
            response = Response(status, b"read the agent's log\n")
    await stream.send(response.to_head())
    if isinstance(request, Response) or request.method != "HEAD":
        for at in range(0, len(response.content), _SLICE):
            await stream.send(response.content[at : at + _SLICE])
