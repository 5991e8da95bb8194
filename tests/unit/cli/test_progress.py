"""Progress messages, on a terminal and in a log."""

from __future__ import annotations

import io

import pytest

from integration.cli.output import Format, Output
from integration.cli.progress import Progress


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


def said(stream: io.StringIO, form: Format = Format.TABLE) -> str:
    with Progress(Output(form), stream) as progress:
        progress.update("copy a tree")
        progress.update("start a container\x1b[2J")
    return stream.getvalue()


def test_a_log_has_a_line_for_each_step() -> None:
    assert said(io.StringIO()) == "copy a tree\nstart a container\\x1b[2J\n"


def test_a_step_goes_on_if_its_line_cannot_be_written() -> None:
    with (
        open("/dev/full", "w", encoding="utf-8") as stream,
        Progress(Output(Format.TABLE), stream) as progress,
    ):
        progress.update("copy a tree")
        progress.update("start a container")


def test_at_a_terminal_one_line_is_written_over_and_gone_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "12")
    assert said(Terminal()) == "\r\x1b[Kcopy a tree\r\x1b[Kstart a co…\r\x1b[K"


def test_what_comes_next_on_the_terminal_finds_the_line_empty(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with Progress(Output(Format.TABLE), stream) as progress:
        progress.update("copy")
        progress.update("")
    assert stream.getvalue() == "\r\x1b[Kcopy\r\x1b[K"


@pytest.mark.parametrize("form", [Format.JSON, Format.YAML])
def test_whoever_reads_documents_gets_no_lines(form: Format) -> None:
    assert said(io.StringIO(), form) == ""
