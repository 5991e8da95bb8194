"""Reads that may block for ever happen in a child, which the parent can abandon."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import pytest

from integration import driver_programs
from integration.containers import bounded_reader as reading
from integration.containers.bounded_reader import Reader
from integration.containers.procfs import Procfs
from tests.harness.fuse import FILE, fuse
from tests.harness.waiting import eventually

MOST: Final = 1 << 20


def children() -> set[int]:
    text = Path(f"/proc/self/task/{os.getpid()}/children").read_text("ascii")
    return {int(word) for word in text.split()}


def test_files_and_nodes_are_read_by_one_child_that_ends_with_its_reader(tmp_path: Path) -> None:
    before = children()
    large = tmp_path / "large"
    large.write_bytes(b"0123456789" * 100_000)
    reader = Reader()
    assert children() == before
    assert reader.text(str(large), 10 * MOST) == large.read_bytes()
    assert reader.text(str(large), 15) == b"012345678901234"
    (child,) = children() - before
    (tmp_path / "empty").touch()
    assert reader.text(str(tmp_path / "empty"), MOST) == b""
    assert reader.text(str(tmp_path / "none"), MOST) is None
    assert reader.node("/dev/null") == os.makedev(1, 3)
    assert reader.node(str(large)) == 0
    assert reader.node(str(tmp_path / "none")) == 0
    assert children() - before == {child}
    del reader
    assert children() == before


def test_one_that_was_killed_answers_nothing() -> None:
    before = children()
    reader = Reader()
    assert reader.node("/dev/null")
    (child,) = children() - before
    os.kill(child, 9)
    assert reader.text("/proc/self/stat", MOST) is None
    assert children() == before


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_file_that_is_not_answered_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_programs, "_TO_DIE", 0.1)
    before = children()
    backing = tmp_path / "backing"
    backing.write_bytes(b"content")
    with fuse(str(tmp_path / "volume"), str(backing)) as server:
        path = f"{server.mount_point}/{FILE}"
        reader = Reader()
        assert reader.text(path, MOST) == b"content"
        server.hang()

        def is_answered() -> bool:
            with monkeypatch.context() as briefly:
                briefly.setattr(reading, "TO_ANSWER", 0.1)
                return reader.text(path, MOST) is not None

        assert not is_answered()
        assert reader.text("/proc/self/stat", MOST), "another child goes on"
        assert not is_answered()
        assert not is_answered()
        # There may be any number of them.
        assert reader.text("/proc/self/stat", MOST) is None
        assert reader.lost == 3
    # The next reader reaps the abandoned children.

    def reaped() -> bool:
        other = Reader()
        assert other.text("/proc/self/stat", MOST)
        del other
        return children() == before

    eventually(reaped, "all have ended")


def test_of_the_nodes_own_processes_nothing_is_read_by_a_child() -> None:
    before = children()
    procfs = Procfs()
    assert procfs.is_own(os.getpid())
    assert procfs.words(os.getpid())
    assert procfs.mapped(os.getpid())
    assert procfs.memory(os.getpid())
    assert children() == before
