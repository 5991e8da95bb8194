"""Scrapers that are slow, silent, too many or hostile must not affect a good one."""

from __future__ import annotations

import tracemalloc
from contextlib import AsyncExitStack, asynccontextmanager
from http import HTTPStatus
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given
from hypothesis import strategies as st

from integration.agent_errors import MetricsAddressUnusable
from integration.node.services.metrics import server
from integration.node.services.metrics.address import Address
from integration.node.services.metrics.server import (
    LONGEST,
    Request,
    Response,
    addresses_of,
    listen,
    parse,
    serve,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from anyio.abc import SocketStream

pytestmark = pytest.mark.anyio

GET = b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n"


async def hello(request: Request) -> Response:
    if request.path != "/metrics":
        return Response(HTTPStatus.NOT_FOUND, b"nothing there\n")
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


async def test_one_that_is_refused_is_told_why() -> None:
    async with served() as port:
        refused = await ask(port, GET.replace(b"GET", b"DELETE"))
        assert refused.startswith(b"HTTP/1.1 405 ")
        assert b"Allow: GET, HEAD\r\n" in refused
        assert (await ask(port, b"x" * (LONGEST + 1))).startswith(b"HTTP/1.1 431 ")


async def test_one_that_does_not_ask_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "LONGEST_EXCHANGE", 0.05)
    async with served() as port, await anyio.connect_tcp("127.0.0.1", port) as silent:
        await silent.send(b"GET /met")
        assert await read(silent) == b""


async def test_one_that_does_not_take_its_answer_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "LONGEST_EXCHANGE", 0.05)

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


# -- requests ----------------------------------------------------------------------------------


def test_what_prometheus_asks_is_understood() -> None:
    request = parse(
        b"GET /metrics?x=y HTTP/1.1\r\nHost: 10.0.0.1:9477\r\nUser-Agent: Prometheus/2.42.0\r\n"
        b"Accept:  text/plain \r\nX-Prometheus-Scrape-Timeout-Seconds: 10\r\n\r\n"
    )
    assert isinstance(request, Request)
    assert (request.method, request.path) == ("GET", "/metrics")
    assert request.headers["accept"] == "text/plain"
    assert request.headers["x-prometheus-scrape-timeout-seconds"] == "10"
    assert isinstance(parse(b"HEAD / HTTP/1.0\r\n\r\n"), Request)


HOST = b"Host: a\r\n"
HEAD = b"GET / HTTP/1.1\r\n" + HOST


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"", 400),
        (b"GET\r\n", 400),
        (b"GET /metrics\r\n", 400),
        (b"GET /metrics x HTTP/1.1\r\n" + HOST, 400),
        (b"GET /metrics HTTP/2.0\r\n" + HOST, 505),
        (b"GET http://a/metrics HTTP/1.1\r\n" + HOST, 400),
        (b"GET * HTTP/1.1\r\n" + HOST, 400),
        (b"GET /metrics HTTP/1.1\r\n" + HOST + b"Content-Length: 5\r\n", 413),
        (b"GET /metrics HTTP/1.1\r\n" + HOST + b"Content-Length: 0, 5\r\n", 413),
        (b"GET /metrics HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n", 413),
        (b"GET /metrics HTTP/1.1\r\n" + HOST + b"X: y\r\n" * 200, 431),
        (b"POST /metrics HTTP/1.1\r\n" + HOST, 405),
        (b"get /metrics HTTP/1.1\r\n" + HOST, 405),
    ],
)
def test_what_is_no_request_for_metrics_is_refused(head: bytes, status: int) -> None:
    refused = parse(head + b"\r\n")
    assert isinstance(refused, Response)
    assert refused.status == status


@pytest.mark.parametrize("filler", [b" ", b"\t", b"a", b":", b",", b"\r", b"\n", b"\xff"])
@pytest.mark.timeout(20)
def test_no_head_takes_longer_than_it_is_long(filler: bytes) -> None:
    for before in (b"", b"GET /", HEAD, HEAD + b"a", HEAD + b"a:"):
        for after in (b"\x00\r\n\r\n", b"\r\n\r\n"):
            parse(before + filler * (LONGEST - len(before) - len(after)) + after)


@given(st.binary(max_size=200))
def test_whatever_comes_is_a_request_or_refused(head: bytes) -> None:
    request = parse(head)
    assert isinstance(request, Response) or request.path.startswith("/")


def test_an_answer_says_how_long_it_is_and_that_it_is_the_last() -> None:
    response = Response(HTTPStatus.OK, b"abc\n", headers=(("Vary", "Accept"),))
    head = response.to_head()
    assert head.endswith(b"\r\n\r\n")
    assert head.splitlines()[0] == b"HTTP/1.1 200 OK"
    assert {b"Content-Length: 4", b"Connection: close", b"Vary: Accept"} < set(head.splitlines())


# -- addresses ---------------------------------------------------------------------------------


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
