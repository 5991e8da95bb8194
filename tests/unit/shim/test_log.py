"""The log, read from the other end of the fifo as containerd reads it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shim.log import Log


@pytest.fixture
def fifo(tmp_path: Path) -> Iterator[int]:
    os.mkfifo(tmp_path / "log")
    fd = os.open(tmp_path / "log", os.O_RDONLY | os.O_NONBLOCK)
    yield fd
    os.close(fd)


def _read(fd: int) -> list[str]:
    try:
        return os.read(fd, 65536).decode().splitlines()
    except BlockingIOError:
        return []


def test_a_line_is_logfmt_with_time_level_and_message_first(
    open_log: Callable[..., Log], fifo: int
) -> None:
    open_log(namespace="k8s.io").warning("an event waits", why="it's away")
    (line,) = _read(fifo)
    time, rest = line.split(" ", 1)
    assert re.fullmatch(r"time=\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z", time)
    assert rest == 'level=warning msg="an event waits" namespace=k8s.io why="it\'s away"'


def test_what_a_runtime_said_cannot_break_the_line(open_log: Callable[..., Log], fifo: int) -> None:
    open_log().error("failed", why='two\nlines and a "quote"')
    assert len(_read(fifo)) == 1


@pytest.mark.parametrize(("debug", "lines"), [(False, 0), (True, 1)])
def test_debug_lines_are_written_only_if_asked_for(
    open_log: Callable[..., Log], fifo: int, debug: bool, lines: int
) -> None:
    open_log(debug=debug).debug("step")
    assert len(_read(fifo)) == lines


def test_a_full_fifo_loses_lines_and_blocks_nobody(open_log: Callable[..., Log], fifo: int) -> None:
    log = open_log()
    for number in range(3000):
        log.info("x" * 100, number=number)
    assert "number=0" in _read(fifo)[0]
    log.info("after the reader has caught up")
    assert _read(fifo)


def test_without_a_reader_or_a_fifo_nothing_happens(
    tmp_path: Path, open_log: Callable[..., Log]
) -> None:
    open_log().info("nobody listens")
    assert os.listdir(tmp_path) == []
    os.mkfifo(tmp_path / "log")
    open_log().info("containerd is away")
