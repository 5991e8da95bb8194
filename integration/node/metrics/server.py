"""Connections of scrapers: few, short, and none waits for another.

Rules
- A connection has :data:`TO_ASK` seconds for its request and :data:`TO_TAKE` for the answer, and
  there are :data:`MOST` at most. One more takes the place of the one that has let the agent wait
  longest, be it to ask or to take; if the agent lets them all wait, it is told to come again.
- Whatever a scraper does, it costs the agent one task and some 100 KiB, no thread: those who are
  told the same share it.
- An answer that cannot be made is a 500 to the one who asked. The agent goes on.
"""

from __future__ import annotations

import errno
from contextlib import contextmanager
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

import anyio
import anyio.abc

from integration.node.metrics.address import Address
from integration.node.metrics.errors import MetricsAddressUnusable
from integration.node.metrics.exchange import (
    LONGEST,
    Refused,
    Request,
    Response,
    head_end,
    parse_head,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from anyio.abc import SocketStream
    from anyio.streams.stapled import MultiListener

__all__ = ["MOST", "TO_ASK", "TO_TAKE", "addresses_of", "listen", "serve"]

MOST: Final = 32
TO_ASK: Final = 5.0
TO_TAKE: Final = 10.0

# A scraper that goes on sending is listened to for that long, so that it gets its answer: a socket
# that is closed with something unread in it takes back what was sent last.
_TO_FALL_SILENT: Final = 0.5
_BACKLOG: Final = 64

# What is sent at a time: of what is not taken yet no more is copied, for each who does not take it.
_SLICE: Final = 65536

_GONE: Final = (anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream, OSError)


async def listen(address: Address) -> MultiListener[SocketStream]:
    """Listen for scrapers.

    Args:
        address: where.

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
        answer: makes an answer; raises :class:`Refused` for what is not answered.
        failed: told of any other exception of it.
    """
    async with listener:
        await listener.serve(_Connections(answer, failed).handle)


class _Connections:
    """Those that there are now."""

    def __init__(
        self,
        answer: Callable[[Request], Awaitable[Response]],
        failed: Callable[[Exception], None],
    ) -> None:
        self._answer = answer
        self._failed = failed
        self._count = 0
        self._waited_for: dict[int, anyio.CancelScope] = {}  # in the order in which they began

    async def handle(self, stream: SocketStream) -> None:
        """One connection, from its beginning to its end."""
        self._count += 1
        try:
            async with stream:
                try:
                    await self._exchange(stream)
                except _GONE:
                    return
        finally:
            self._count -= 1

    async def _exchange(self, stream: SocketStream) -> None:
        if self._count > MOST and not self._make_room():
            if self._count > 2 * MOST:
                return
            busy = Response(HTTPStatus.SERVICE_UNAVAILABLE, b"too many scrape at once\n")
            await self._send(stream, busy, linger=True)
            return
        try:
            request = await self._request(stream)
            if request is not None:
                response = await self._respond(request)
                await self._send(stream, response, content=request.method != "HEAD")
        except Refused as refused:
            await self._send(stream, _refusal(refused), linger=True)

    async def _request(self, stream: SocketStream) -> Request | None:
        """What is asked; None if nothing is in time."""
        received, end = bytearray(), -1
        with self._bounded(TO_ASK):
            while (end := head_end(received)) < 0:
                received += await stream.receive(LONGEST)
        return parse_head(bytes(received[:end])) if end >= 0 else None

    async def _respond(self, request: Request) -> Response:
        try:
            return await self._answer(request)
        except Refused:
            raise
        except Exception as error:  # noqa: BLE001 - a scrape does not end the others
            self._failed(error)
            return Response(HTTPStatus.INTERNAL_SERVER_ERROR, b"the agent's log says why\n")

    async def _send(
        self,
        stream: SocketStream,
        response: Response,
        *,
        content: bool = True,
        linger: bool = False,
    ) -> None:
        with self._bounded(TO_TAKE):
            await stream.send(response.to_head())
            for at in range(0, len(response.content) if content else 0, _SLICE):
                await stream.send(response.content[at : at + _SLICE])
            if linger:
                await stream.send_eof()
                with anyio.move_on_after(_TO_FALL_SILENT):
                    for _ in range(LONGEST):
                        await stream.receive()

    @contextmanager
    def _bounded(self, seconds: float) -> Iterator[None]:
        """While the scraper lets the agent wait."""
        with anyio.move_on_after(seconds) as scope:
            self._waited_for[id(scope)] = scope
            try:
                yield
            finally:
                del self._waited_for[id(scope)]

    def _make_room(self) -> bool:
        """End the one that lets the agent wait longest; whether there was one."""
        for scope in self._waited_for.values():
            if not scope.cancel_called:
                scope.cancel()
                return True
        return False


def _refusal(refused: Refused) -> Response:
    headers: tuple[tuple[str, str], ...] = ()
    if refused.status is HTTPStatus.METHOD_NOT_ALLOWED:
        headers = (("Allow", "GET, HEAD"),)
    return Response(refused.status, f"{refused.reason}\n".encode(), headers=headers)
