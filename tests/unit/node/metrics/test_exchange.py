"""As much of HTTP as a scrape needs, and not a byte more."""

from __future__ import annotations

from contextlib import suppress
from http import HTTPStatus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from integration.node.metrics.exchange import (
    LONGEST,
    Refused,
    Request,
    Response,
    accepts_gzip,
    head_end,
    parse_head,
)


def test_what_prometheus_asks_is_understood() -> None:
    request = parse_head(
        b"GET /metrics?x=y HTTP/1.1\r\nHost: 10.0.0.1:9477\r\nUser-Agent: Prometheus/2.42.0\r\n"
        b"Accept: text/plain\r\naccept:  */* \r\nX-Prometheus-Scrape-Timeout-Seconds: 10\r\n\r\n"
    )
    assert (request.method, request.path) == ("GET", "/metrics")
    assert request.headers["accept"] == "text/plain, */*"
    assert request.headers["x-prometheus-scrape-timeout-seconds"] == "10"


def test_an_old_request_needs_no_host() -> None:
    assert parse_head(b"HEAD / HTTP/1.0\r\n\r\n") == Request("HEAD", "/")


HOST = b"Host: a\r\n"
HEAD = b"GET / HTTP/1.1\r\n" + HOST


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"", 400),
        (b"GET /metrics\r\n", 400),
        (b"GET  /metrics HTTP/1.1\r\n" + HOST, 400),
        (b"GET /metrics HTTP/2.0\r\n" + HOST, 400),
        (b"GET http://a/metrics HTTP/1.1\r\n" + HOST, 400),
        (b"GET * HTTP/1.1\r\n" + HOST, 400),
        (b"GET /metrics HTTP/1.1\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\n" + HOST + HOST, 400),
        (b"GET /metrics HTTP/1.1\r\n" + HOST + b"X : y\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\n" + HOST + b"X: y\r\n folded\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\n" + HOST + b"X: \x00\r\n", 400),
        (b"GET /metrics HTTP/1.1\n" + HOST, 400),
        (b"GET /metrics HTTP/1.1\r\nHost: a\nX: y\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\n" + HOST + b"Content-Length: 5\r\n", 413),
        (b"GET /metrics HTTP/1.1\r\n" + HOST + b"Content-Length: 0, 5\r\n", 413),
        (b"GET /metrics HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n", 413),
        (b"POST /metrics HTTP/1.1\r\n" + HOST, 405),
        (b"get /metrics HTTP/1.1\r\n" + HOST, 405),
    ],
)
def test_what_is_not_of_the_grammar_is_refused(head: bytes, status: int) -> None:
    with pytest.raises(Refused) as refused:
        parse_head(head + b"\r\n")
    assert refused.value.status == status


@pytest.mark.parametrize("filler", [b" ", b"\t", b"a", b":", b",", b"\r", b"\n", b"\xff"])
@pytest.mark.parametrize("before", [b"", b"GET /", HEAD, HEAD + b"a", HEAD + b"a:"])
@pytest.mark.parametrize("after", [b"\x00\r\n\r\n", b"\r\n\r\n"])
@pytest.mark.timeout(20)
def test_no_head_takes_longer_than_it_is_long(before: bytes, filler: bytes, after: bytes) -> None:
    with suppress(Refused):
        parse_head(before + filler * (LONGEST - len(before) - len(after)) + after)


@given(st.binary(max_size=200))
def test_whatever_comes_is_a_request_or_refused(head: bytes) -> None:
    with suppress(Refused):
        assert parse_head(head).path.startswith("/")


def test_a_head_ends_with_an_empty_line_and_is_not_without_end() -> None:
    assert head_end(b"GET / HTTP/1.0\r\n") == -1
    assert head_end(b"GET / HTTP/1.0\r\n\r\nmore") == 18
    for head in (b"x" * (LONGEST + 1), b"x" * (LONGEST + 1) + b"\r\n\r\n"):
        with pytest.raises(Refused):
            head_end(head)


def test_an_answer_says_how_long_it_is_and_that_it_is_the_last() -> None:
    response = Response(HTTPStatus.OK, b"abc\n", headers=(("Vary", "Accept"),))
    head = response.to_head()
    assert head.endswith(b"\r\n\r\n")
    assert head.splitlines()[0] == b"HTTP/1.1 200 OK"
    assert {b"Content-Length: 4", b"Connection: close", b"Vary: Accept"} < set(head.splitlines())


@pytest.mark.parametrize(
    ("header", "accepted"),
    [("", False), ("gzip", True), ("deflate, GZIP;q=0.5", True), ("gzip;q=0", False),
     ("gzip; q=0.000", False), ("gzip;q=0.001", True), ("gzipped, identity", False), ("*", False)],
)  # fmt: skip
def test_gzip_is_for_who_asks_for_it(header: str, *, accepted: bool) -> None:
    assert accepts_gzip(header) is accepted
