"""Parsing containerd's URIs for stdio."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.errors import NvshimError
from shim.errors import InvalidLogUri, StdioUnsupported
from shim.stdio.logger import LoggerUri
from shim.stdio.uris import Fifo, LogFile, parse_outputs, parse_stdin
from tests.harness.raising import raises


@pytest.mark.parametrize(
    ("uri", "place"),
    [
        ("", None),
        ("/run/containerd/fifo/1/out", Fifo("/run/containerd/fifo/1/out")),
        ("/odd%20 name?#", Fifo("/odd%20 name?#")),
        ("fifo:///run/fifo", Fifo("/run/fifo")),
        ("file:///var/log/x", LogFile("/var/log/x")),
        ("file:///var/log/a%20b?max=1", LogFile("/var/log/a b")),
    ],
)
def test_places_that_are_files(uri: str, place: object) -> None:
    assert parse_outputs(uri, "") == (place, None)
    assert parse_outputs("", uri) == (None, place)
    assert parse_outputs(uri, uri) == (place, place)


@pytest.mark.parametrize(
    ("uri", "logger"),
    [
        ("binary:///bin/log", LoggerUri("/bin/log", (), (), speaks=False)),
        ("binary-v2:///bin/log", LoggerUri("/bin/log", (), (), speaks=True)),
        ("binary:/bin/log", LoggerUri("/bin/log", (), (), speaks=False)),
        ("binary:///opt/a%20b?x", LoggerUri("/opt/a b", ("x", ""), (), speaks=False)),
        (
            "binary:///bin/log?b=2&a=1&b=3&--flag=a%26b+c&env.KEY=v&env.CONTAINER_ID=other",
            LoggerUri(
                "/bin/log",
                ("b", "2", "a", "1", "--flag", "a&b c"),
                (("KEY", "v"),),
                speaks=False,
            ),
        ),
    ],
)
def test_a_logger_has_a_path_and_pairs_of_arguments(uri: str, logger: LoggerUri) -> None:
    assert parse_outputs(uri, uri) == (logger, logger)
    assert parse_outputs(uri, "") == (logger, logger)
    assert parse_outputs(uri, "/fifo") == (logger, Fifo("/fifo"))
    assert parse_outputs(uri, uri, terminal=True) == (logger, None)


@pytest.mark.parametrize(
    "uri",
    [
        "binary://",
        "binary://host/bin/log",
        "binary:bin/log",
        "binary:///bin/log?a=%00",
        "binary:///bin/%00",
        "binary:///bin/log?env.=1",
        "binary:///bin/log?env.a%3Db=1",
        "binary://[/bin/log",
    ],
)
def test_a_logger_that_cannot_be_understood_is_named(uri: str) -> None:
    with raises(InvalidLogUri):
        parse_outputs(uri, uri)


@pytest.mark.parametrize(
    "uri", ["npipe:////./pipe/x", "relative/path", "file://host/x", "file:///%00", "fifo:x", "a\0"]
)
def test_a_scheme_that_is_not_served_is_named(uri: str) -> None:
    with raises(StdioUnsupported, match="scheme"):
        parse_outputs(uri, "")
    with raises(StdioUnsupported, match="scheme"):
        parse_stdin(uri)


@pytest.mark.parametrize("stdout", ["", "/fifo", "binary:///bin/another"])
def test_a_logger_for_stderr_alone_is_refused(stdout: str) -> None:
    with raises(StdioUnsupported, match="logger"):
        parse_outputs(stdout, "binary:///bin/log")


def test_nothing_is_read_from_a_logger() -> None:
    with raises(StdioUnsupported, match="logger"):
        parse_stdin("binary:///bin/log")
    assert parse_stdin("file:///etc/motd") == Fifo("/etc/motd")


@given(st.text(), st.sampled_from(["", "binary://", "binary-v2:///x?", "file://", "fifo:///"]))
def test_any_text_is_understood_or_refused_in_one_line(text: str, scheme: str) -> None:
    try:
        parse_outputs(scheme + text, "")
    except NvshimError as error:
        refused = str(error)
    else:
        refused = ""
    assert "\n" not in refused
