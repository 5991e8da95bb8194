"""Parsing the address of the metrics endpoint."""

from __future__ import annotations

import pytest

from integration.agent_errors import MetricsAddressInvalid
from integration.node.services.metrics.address import Address, parse_address
from tests.harness.raising import raises


@pytest.mark.parametrize(
    ("text", "address"),
    [
        (":9477", Address("", 9477)),
        ("127.0.0.1:0", Address("127.0.0.1", 0)),
        ("0.0.0.0:65535", Address("0.0.0.0", 65535)),
        ("[::1]:9477", Address("::1", 9477)),
        ("[::]:9477", Address("::", 9477)),
        ("localhost:9477", Address("localhost", 9477)),
        ("node-1.example:9477", Address("node-1.example", 9477)),
    ],
)
def test_an_address_is_read_and_written_alike(text: str, address: Address) -> None:
    assert parse_address(text) == address
    assert str(address) == text


@pytest.mark.parametrize(
    "text",
    [
        "", "9477", "localhost", "::1:9477", "[::1]", "[::1:9477", "[1.2.3.4]:1", "1.2.3:80",
        "256.1.1.1:80", "a:b", ":65536", ":-1", ":+80", ": 80", "a b:80", ":80 ", ":٨٠",
        "unix:/run/metrics.sock", "http://localhost:9477", "-x:80", ":123456", "\n:80", ":80\n",
    ],
)  # fmt: skip
def test_what_is_no_address_is_an_error_that_shows_one(text: str) -> None:
    with raises(MetricsAddressInvalid, match=r"127\.0\.0\.1:9477"):
        parse_address(text)
