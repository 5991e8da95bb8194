"""A path that a person names may lead to anything; reading it never waits for ever."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest

from hooks import named_files
from hooks.config import Config, load_config
from hooks.errors import ConfigUnreadable
from hooks.named_files import read_named
from tests.harness.raising import raises


def test_a_file_is_read_through_links_up_to_its_limit(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_bytes(b"12345")
    link.symlink_to(file)
    assert read_named(str(link)) == read_named(str(file), 5) == b"12345"
    with pytest.raises(OSError, match="More than 4 bytes"):
        read_named(str(file), 4)
    assert read_named("/proc/self/stat")  # its size is 0
    assert read_named("/dev/null") == b""


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("fifo", "A pipe that nobody writes to"),
        ("socket", "Not a file, but a device or socket"),
        ("directory", "Is a directory"),
        ("missing", "No such file"),
        ("loop", "Too many levels"),
        ("/dev/zero", "Not a file, but a device or socket"),
        ("/dev/tty", "Not a file, but a device or socket"),
    ],
)
def test_what_may_never_end_is_refused(tmp_path: Path, path: str, error: str) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "directory").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        named = os.path.join(tmp_path, path)
        with pytest.raises(OSError, match=error) as failure:
            read_named(named)
        assert failure.value.filename == named
        with raises(ConfigUnreadable, match="NVSHIM-E0501"):
            load_config(named)


def test_a_pipe_with_a_writer_is_read_to_its_end(tmp_path: Path) -> None:
    read, write = os.pipe()

    def finish() -> None:
        with open(write, "wb") as file:
            file.write(b'[policy]\nmode = "strict"\n' + b"#" * (1 << 17))

    try:
        writer = threading.Thread(target=finish)
        writer.start()
        assert load_config(f"/dev/fd/{read}").mode != Config().mode
        writer.join()
    finally:
        os.close(read)


def test_a_writer_that_writes_nothing_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(named_files, "_SILENCE", 0)
    read, write = os.pipe()
    try:
        with pytest.raises(TimeoutError, match="silent"):
            read_named(f"/dev/fd/{read}")
    finally:
        os.close(read)
        os.close(write)
