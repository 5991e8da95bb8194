from __future__ import annotations

import errno
import fcntl
import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from integration.files import read_file, remove_file, replace_file, sweep


def test_a_new_file_has_the_mode_that_was_asked_for_and_its_directory(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    replace_file(str(path), b"one", mode=0o600)
    assert read_file(str(path)) == b"one"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path / "a") == ["b"]


def test_a_file_that_is_replaced_keeps_owner_and_mode(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"one")
    path.chmod(0o640)
    os.chown(path, 1234, 5678)
    before = path.stat().st_ino
    replace_file(str(path), b"two")
    seen = path.stat()
    assert path.read_bytes() == b"two"
    assert (stat.S_IMODE(seen.st_mode), seen.st_uid, seen.st_gid) == (0o640, 1234, 5678)
    assert seen.st_ino != before


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"one")
    (tmp_path / "link").symlink_to("real")
    replace_file(str(tmp_path / "link"), b"two")
    assert (tmp_path / "link").readlink() == (tmp_path / "real").relative_to(tmp_path)
    assert (tmp_path / "real").read_bytes() == b"two"


def test_what_is_no_file_is_left_alone(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(FileExistsError):
        replace_file(str(tmp_path / "fifo"), b"two")
    assert os.listdir(tmp_path) == ["fifo"]


def test_a_failure_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_bytes(b"one")

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        replace_file(str(tmp_path / "a"), b"two")
    assert os.listdir(tmp_path) == ["a"]
    assert (tmp_path / "a").read_bytes() == b"one"


def test_a_signal_that_comes_when_it_is_replaced_is_what_is_raised(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rename = os.rename

    def interrupted(source: str, target: str) -> None:
        rename(source, target)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        replace_file(str(tmp_path / "file"), b"new")
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_file_that_is_not_there_is_none(tmp_path: Path) -> None:
    assert read_file(str(tmp_path / "a")) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="makes files of another user")
@pytest.mark.parametrize("what", ["link", "link to nothing", "directory", "file"])
def test_nobody_leads_root_astray_in_a_directory_of_everybody(what: str, tmp_path: Path) -> None:
    everybodys = tmp_path / "tmp"
    everybodys.mkdir()
    everybodys.chmod(0o1777)
    precious = tmp_path / "etc" / "shadow"
    precious.parent.mkdir()
    path = everybodys / "shadow"
    if what == "file":
        path.write_text("old")
    elif what == "directory":
        path = everybodys / "etc" / "shadow"
        path.parent.symlink_to(precious.parent)
    else:
        path.symlink_to(precious)
    if what != "link to nothing":
        precious.write_text("old")
    strangers = path.parent if what == "directory" else path
    os.lchown(strangers, 12345, 12345)
    with pytest.raises(PermissionError, match="belongs to user 12345"):
        replace_file(str(path), b"new")
    assert not precious.exists() if what == "link to nothing" else precious.read_text() == "old"
    assert os.listdir(everybodys) == [strangers.name]
    os.lchown(strangers, 0, 0)
    replace_file(str(path), b"new")
    assert path.read_text() == "new"


def test_links_are_followed_as_the_kernel_does(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "way").symlink_to("a/b")
    (tmp_path / "a" / "link").symlink_to("../way/../made/file")
    replace_file(str(tmp_path / "a" / "link"), b"new")
    assert (tmp_path / "a" / "made" / "file").read_bytes() == b"new"
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="levels of symbolic links"):
        replace_file(str(tmp_path / "loop"), b"")


def test_a_pipe_that_nobody_writes_to_is_no_file(tmp_path: Path) -> None:
    path = str(tmp_path / "pipe")
    os.mkfifo(path)
    with pytest.raises(FileExistsError):
        read_file(path)


# -- temporary files of killed writers -----------------------------------------------------------


_KILLED = """
import os, signal, sys
from integration.files import replace_file
os.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
replace_file(sys.argv[1], b"never")
"""


def killed_while_writing(path: Path) -> None:
    """Replace a file in a process that is killed before the rename."""
    code = subprocess.run([sys.executable, "-c", _KILLED, path], check=False).returncode
    assert code == -signal.SIGKILL


@pytest.mark.parametrize("do", [lambda path: replace_file(path, b"new"), remove_file, sweep])
def test_what_a_killed_writer_left_is_removed_with_the_next_write(
    tmp_path: Path, do: Callable[[str], None]
) -> None:
    path = tmp_path / "health[1].json"
    path.write_bytes(b"old")
    others = {".health1.json.abcdefgh.new", ".health[1].json.abc.new", ".other.abcdefgh.new"}
    for name in others:
        (tmp_path / name).touch()
    killed_while_writing(path)
    assert len(os.listdir(tmp_path)) == len(others) + 2
    do(str(path))
    assert {*os.listdir(tmp_path)} - {path.name} == others


@pytest.mark.parametrize("step", ["fsync", "fchmod"])
def test_the_file_of_a_writer_that_is_at_work_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    path, do = tmp_path / "node.json", getattr(os, step)
    writes = [b"second", b"third"]

    def meanwhile(*what: Any) -> None:
        if writes:
            replace_file(str(path), writes.pop(0))
        do(*what)

    monkeypatch.setattr(os, step, meanwhile)
    replace_file(str(path), b"first")
    assert path.read_bytes() == b"first", "the first has ended last"
    assert os.listdir(tmp_path) == [path.name]


def test_a_file_that_is_swept_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, make = tmp_path / "node.json", tempfile.mkstemp
    made = list[str]()

    def mkstemp(**how: Any) -> tuple[int, str]:
        fd, name = make(**how)
        made.append(name)
        if len(made) == 1:
            sweep(str(path))
        return fd, name

    monkeypatch.setattr(tempfile, "mkstemp", mkstemp)
    replace_file(str(path), b"new")
    assert path.read_bytes() == b"new"
    assert len(made) == 2
    assert os.listdir(tmp_path) == [path.name]


def test_where_a_file_system_has_no_locks_files_are_written_and_none_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, left = tmp_path / "node.json", tmp_path / ".node.json.abcdefgh.new"
    left.touch()

    def flock(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    replace_file(str(path), b"new")
    assert path.read_bytes() == b"new"
    assert left.exists()
