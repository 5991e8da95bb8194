"""HTTP for scrapers: a GET, an answer, and the connection is closed.

Rules
- The standard library parses requests. Each connection has one, of at most :data:`LONGEST` bytes
  and without a body, and is closed after :data:`LONGEST_EXCHANGE` seconds, whatever it waits for.
- There are :data:`MOST` connections at most: one more takes the place of the oldest. So nobody
  who connects and does not ask keeps Prometheus away.
- An answer that cannot be made is a 500 to the one who asked. The agent goes on.

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
from typing import TYPE_CHECKING, Final

import anyio
import anyio.abc
from anyio.abc import SocketStream

from integration.agent_errors import MetricsAddressUnusable
from integration.node.services.metrics.address import Address

if TYPE_CHECKING:
    from anyio.streams.stapled import MultiListener

LONGEST: Final = 8192
MOST: Final = 32
LONGEST_EXCHANGE: Final = 20.0
"""Seconds; NVML has up to eight of them."""

_END: Final = b"\r\n\r\n"
_METHODS: Final = ("GET", "HEAD")

_BACKLOG: Final = 64

# What is sent at a time: of what is not taken yet no more is copied, for each who does not take it.
_SLICE: Final = 65536

_GONE: Final = (anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream, OSError)


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked."""

    method: str  # "GET" or "HEAD"
    path: str  # without what follows a question mark
    headers: Mapping[str, str] = field(default_factory=dict)  # by their names in lower case


@dataclass(frozen=True, slots=True)
class Response:
    """What is answered."""

    status: HTTPStatus  # of HTTP
    content: bytes  # of what is sent
    type: str = "text/plain; charset=utf-8"  # the content's media type
    headers: tuple[tuple[str, str], ...] = ()  # further ones

    def to_head(self) -> bytes:
        """What goes over the wire before the content."""
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
        """Keep what the parser has found wrong."""
        del explain
        self.refused = HTTPStatus(code), message or ""

    def handle_expect_100(self) -> bool:
        """Ask for no body."""
        return True


def parse(head: bytes) -> Request | Response:
    """Understand a request.

    Args:
        head: of it, up to and with the empty line.

    Returns:
        The request, or the answer to one that is refused.
    """
    parsed = _Parsed(head)
    if parsed.refused is not None:
        return _refusal(*parsed.refused)
    headers = parsed.headers
    if "transfer-encoding" in headers or any(
        length.strip("0") for length in headers.get_all("content-length", ())
    ):
        return _refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "a body")
    if parsed.command not in _METHODS:
        return _refusal(HTTPStatus.METHOD_NOT_ALLOWED, "GET or HEAD is understood")
    if not parsed.path.startswith("/") or parsed.request_version == "HTTP/0.9":
        return _refusal(HTTPStatus.BAD_REQUEST, "not a path by HTTP/1")
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
        MetricsAddressUnusable: one cannot.
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
        do = "have it listen elsewhere (--metrics)"
        if number == errno.EADDRINUSE:
            do = "stop the other program that listens there, or have this one listen elsewhere"
        raise MetricsAddressUnusable(
            f"to serve metrics at {address}",
            found=(cause.strerror if isinstance(cause, OSError) else None) or str(cause),
            do=do,
        ) from error


def addresses_of(listener: MultiListener[SocketStream]) -> Sequence[str]:
    """Where one listens, with the port that it became."""
    local = anyio.abc.SocketAttribute.local_address
    found = (each.extra(local) for each in listener.listeners)  # noqa: S610 - of no database
    return [str(Address(str(each[0]), int(each[1]))) for each in found]


async def serve(
    listener: MultiListener[SocketStream],
    answer: Callable[[Request], Awaitable[Response]],
    failed: Callable[[Exception], None],
) -> None:
    """Answer scrapers, until cancelled.

    Args:
        listener: where they come; it is closed in the end.
        failed: takes an exception of it.
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
                        await _exchange(stream, answer, failed)
            finally:
                connections.pop(scope, None)

    async with listener:
        await listener.serve(handle)


async def _exchange(
    stream: SocketStream,
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
        except Exception as error:  # noqa: BLE001 - a scrape does not end the others
            failed(error)
            status = HTTPStatus.INTERNAL_SERVER_ERROR
            response = Response(status, b"the agent's log says why\n")
    await stream.send(response.to_head())
    if isinstance(request, Response) or request.method != "HEAD":
        for at in range(0, len(response.content), _SLICE):
            await stream.send(response.content[at : at + _SLICE])
