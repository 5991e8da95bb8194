"""Scrapers that are slow, silent, too many or hostile, and the one that is none of it."""

from __future__ import annotations

import tracemalloc
from contextlib import AsyncExitStack, asynccontextmanager
from http import HTTPStatus
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
import pytest

from integration.node.metrics import server
from integration.node.metrics.address import Address
from integration.node.metrics.errors import MetricsAddressUnusable
from integration.node.metrics.exchange import Refused, Request, Response
from integration.node.metrics.server import addresses_of, listen, serve

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from anyio.abc import SocketStream

pytestmark = pytest.mark.anyio

GET = b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n"


async def hello(request: Request) -> Response:
    if request.path != "/metrics":
        raise Refused(HTTPStatus.NOT_FOUND, "nothing there")
    return Response(HTTPStatus.OK, b"hello\n")


@asynccontextmanager
async def served(
    answer: Callable[[Request], Awaitable[Response]] = hello,
    failures: list[Exception] | None = None,
) -> AsyncIterator[int]:
    listener = await listen(Address("127.0.0.1", 0))
    port = int(addresses_of(listener)[0].rpartition(":")[2])
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(serve, listener, answer, (failures if failures is not None else []).append)
        yield port
        tasks.cancel_scope.cancel()


async def read(stream: SocketStream) -> bytes:
    content = b""
    try:
        while True:
            content += await stream.receive()
    except (anyio.EndOfStream, anyio.BrokenResourceError):
        return content


async def ask(port: int, head: bytes = GET) -> bytes:
    async with await anyio.connect_tcp("127.0.0.1", port) as stream:
        await stream.send(head)
        return await read(stream)


async def test_a_request_is_answered_and_the_connection_over() -> None:
    async with served() as port:
        assert (await ask(port)).endswith(b"\r\n\r\nhello\n")
        assert (await ask(port, GET.replace(b"GET", b"HEAD"))).endswith(b"\r\n\r\n")
        assert (await ask(port, GET.replace(b"metrics", b"x"))).startswith(b"HTTP/1.1 404 ")


async def test_a_request_may_come_in_bits() -> None:
    async with served() as port, await anyio.connect_tcp("127.0.0.1", port) as stream:
        for at in range(len(GET)):
            await stream.send(GET[at : at + 1])
            await anyio.lowlevel.checkpoint()
        assert b"200 OK" in await read(stream)


async def test_one_that_is_refused_is_told_why_although_it_goes_on_sending() -> None:
    async with served() as port:
        post = GET.replace(b"GET", b"POST").replace(
            b"\r\n\r\n", b"\r\nContent-Length: 99999\r\n\r\n"
        )
        assert (await ask(port, post + b"x" * 99999)).startswith(b"HTTP/1.1 413 ")
        refused = await ask(port, GET.replace(b"GET", b"DELETE"))
        assert b"Allow: GET, HEAD\r\n" in refused
        assert (await ask(port, b"x" * 100_000)).startswith(b"HTTP/1.1 431 ")


async def test_one_that_does_not_ask_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "TO_ASK", 0.05)
    async with served() as port, await anyio.connect_tcp("127.0.0.1", port) as silent:
        await silent.send(b"GET /met")
        assert await read(silent) == b""


async def test_one_that_does_not_take_its_answer_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "TO_TAKE", 0.05)

    async def much(_: Request) -> Response:
        return Response(HTTPStatus.OK, bytes(64 << 20))

    async with served(much) as port, await anyio.connect_tcp("127.0.0.1", port) as greedy:
        await greedy.send(GET)
        await anyio.sleep(0.2)
        assert len(await read(greedy)) < 64 << 20


async def test_many_that_do_not_ask_make_room_for_one_that_does() -> None:
    async with served() as port:
        silent = [await anyio.connect_tcp("127.0.0.1", port) for _ in range(3 * server.MOST)]
        await anyio.sleep(0.05)
        assert b"200 OK" in await ask(port)
        for stream in silent:
            await stream.aclose()
        assert b"200 OK" in await ask(port)


async def test_one_more_than_can_be_answered_is_told_to_come_again() -> None:
    goes_on = anyio.Event()

    async def slow(_: Request) -> Response:
        await goes_on.wait()
        return Response(HTTPStatus.OK, b"late\n")

    async with served(slow) as port, anyio.create_task_group() as scrapers:
        got: list[bytes] = []

        async def scrape() -> None:
            got.append(await ask(port))

        for _ in range(server.MOST):
            scrapers.start_soon(scrape)
        await anyio.sleep(0.1)
        assert (await ask(port)).startswith(b"HTTP/1.1 503 ")
        goes_on.set()
    assert len(got) == server.MOST
    assert all(b"late" in answer for answer in got)


async def test_those_who_do_not_take_an_answer_have_no_copy_each() -> None:
    large = Response(HTTPStatus.OK, bytes(1 << 24))

    async def answer(_: Request) -> Response:
        return large

    async with AsyncExitStack() as streams, served(answer) as port:
        tracemalloc.start()
        try:
            for _ in range(8):
                connected = await anyio.connect_tcp("127.0.0.1", port)
                stream = await streams.enter_async_context(connected)
                await stream.send(GET)
                assert await stream.receive(1)
            assert tracemalloc.get_traced_memory()[1] < 1 << 24
        finally:
            tracemalloc.stop()


async def test_an_answer_that_fails_is_told_to_the_agent_and_ends_nothing() -> None:
    failures: list[Exception] = []

    async def wrong(request: Request) -> Response:
        if "fail" in request.path:
            raise ZeroDivisionError
        return await hello(request)

    async with served(wrong, failures) as port:
        assert b" 500 " in await ask(port, GET.replace(b"metrics", b"fail"))
        assert b"200 OK" in await ask(port)
    assert [type(each) for each in failures] == [ZeroDivisionError]


async def test_one_that_goes_away_in_the_midst_ends_nothing() -> None:
    async with served() as port:
        for head in (b"", b"GET", GET):
            stream = await anyio.connect_tcp("127.0.0.1", port)
            await stream.send(head)
            await stream.aclose()
        assert b"200 OK" in await ask(port)


async def test_a_port_that_is_taken_is_a_fault_of_one_line() -> None:
    async with served() as port:
        with pytest.raises(MetricsAddressUnusable, match=r"(?i)address already in use") as refused:
            await listen(Address("127.0.0.1", port))
        assert "\n" not in str(refused.value)
        assert "stop the other program" in refused.value.do


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-name.invalid"])
async def test_an_address_of_somebody_elses_is_a_fault_of_one_line(host: str) -> None:
    with pytest.raises(MetricsAddressUnusable) as refused:
        await listen(Address(host, 0))
    assert refused.value.found
    assert "--metrics" in refused.value.do


async def test_every_address_is_listened_on() -> None:
    async with await listen(Address("", 0)) as listener:
        assert addresses_of(listener)[0].startswith(("[::]:", "0.0.0.0:"))
