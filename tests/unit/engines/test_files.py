"""Files are replaced atomically, by one process at a time, and keep their owner and mode."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from integration.engines import files
from integration.engines.errors import ChangedMeanwhile, ConfigLocked, WriteFailed
from integration.engines.files import Change, FileChange, Need, apply, missing_directories
from tests.harness.raising import raises


def change(*changes: FileChange) -> Change:
    return Change("containerd", changes, Need.RESTART, "why", changes[0].path)


def test_owner_mode_and_attributes_stay(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_bytes(b"old")
    path.chmod(0o640)
    with contextlib.suppress(OSError):
        os.setxattr(path, "user.nvshim", b"kept")
    if os.geteuid() == 0:
        os.chown(path, 12, 34)
    before = path.stat()
    apply(change(FileChange(str(path), b"old", b"new")))
    after = path.stat()
    assert path.read_bytes() == b"new"
    assert (after.st_mode, after.st_uid, after.st_gid) == (
        before.st_mode,
        before.st_uid,
        before.st_gid,
    )
    with contextlib.suppress(OSError):
        assert os.getxattr(path, "user.nvshim") == b"kept"
    assert os.listdir(tmp_path) == ["config.toml"]


def test_link_is_written_through(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real/file").write_bytes(b"old")
    link = tmp_path / "link"
    link.symlink_to("real/file")
    apply(change(FileChange(str(link), b"old", b"new")))
    assert link.is_symlink()
    assert (tmp_path / "real/file").read_bytes() == b"new"
    apply(change(FileChange(str(link), b"new", None)))
    assert link.is_symlink()
    assert not (tmp_path / "real/file").exists()


def test_directories_are_made_and_removed_only_when_empty(tmp_path: Path) -> None:
    path = f"{tmp_path}/a/b/file"
    made = missing_directories(path)
    assert made == (f"{tmp_path}/a", f"{tmp_path}/a/b")
    apply(change(FileChange(path, None, b"x", directories=made)))
    (tmp_path / "a/theirs").write_text("")
    apply(change(FileChange(path, b"x", None, directories=made)))
    assert os.listdir(tmp_path / "a") == ["theirs"]


def test_file_that_changed_since_it_was_read_is_not_written(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    second.write_bytes(b"somebody was here")
    with raises(ChangedMeanwhile, match="second"):
        apply(change(FileChange(str(first), None, b"x"), FileChange(str(second), b"old", b"x")))
    assert not first.exists()
    assert second.read_bytes() == b"somebody was here"


def test_two_at_once_are_one_and_an_error(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with raises(ConfigLocked):
            apply(change(FileChange(f"{tmp_path}/new/file", None, b"x")))
    finally:
        os.close(descriptor)
    assert os.listdir(tmp_path) == []


def test_a_first_run_has_the_lock_also_once_it_has_made_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replace(path: str, *_: object, **how: object) -> None:
        with raises(ConfigLocked):
            apply(change(FileChange(f"{tmp_path}/new/theirs", None, b"x")))
        Path(path).parent.mkdir(exist_ok=True)
        Path(path).write_bytes(b"x")

    monkeypatch.setattr(files, "replace_file", replace)
    ours = (FileChange(f"{tmp_path}/new/{name}", None, b"x") for name in ("first", "second"))
    apply(change(*ours))
    assert sorted(os.listdir(tmp_path / "new")) == ["first", "second"]


def test_the_lock_of_a_directory_that_was_made_again_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "new"
    directory.mkdir()
    lock = fcntl.flock

    def remove_first(descriptor: int, operation: int) -> None:
        directory.rmdir()
        directory.mkdir()
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    with raises(ConfigLocked):
        apply(change(FileChange(f"{directory}/file", None, b"x")))
    assert os.listdir(directory) == []


def test_a_directory_that_could_only_be_made_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "replace_file", fail)
    with raises(WriteFailed):
        apply(change(FileChange(f"{tmp_path}/a/b/file", None, b"x")))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("step", ["fsync", "rename", "fchmod"])
def test_failure_at_any_step_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, step, fail)
    with raises(WriteFailed, match=r"No space left.*Make room"):
        apply(change(FileChange(str(path), b"old", b"new")))
    monkeypatch.undo()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_files_before_one_that_cannot_be_written_are_restored(tmp_path: Path) -> None:
    """Among others a configuration that is a link to /dev/null, or a mount of its own."""
    theirs, gone, link = (tmp_path / name for name in ("theirs", "gone", "link"))
    theirs.write_bytes(b"old")
    theirs.chmod(0o600)
    gone.write_bytes(b"old")
    link.symlink_to("/dev/null")
    made = f"{tmp_path}/a/b/file"
    before = {path: path.lstat().st_mode for path in tmp_path.iterdir()}
    wanted = change(
        FileChange(made, None, b"new", directories=missing_directories(made)),
        FileChange(str(theirs), b"old", b"new"),
        FileChange(str(gone), b"old", None),
        FileChange(str(link), b"", b"new"),
    )
    with raises(WriteFailed, match=r"link: is not a file"):
        apply(wanted)
    assert {path: path.lstat().st_mode for path in tmp_path.iterdir()} == before
    assert (theirs.read_bytes(), gone.read_bytes()) == (b"old", b"old")


def test_diff_says_what_is_at_the_end_of_a_file() -> None:
    diff = FileChange("/f", b"a\nb", b"a\nb\n").diff()
    assert diff.startswith("--- /f\n+++ /f\n")
    assert "\\ No newline at end of file\n" in diff
    assert FileChange("/f", None, b"a\n").diff().startswith("--- /dev/null\n+++ /f\n")
    assert FileChange("/f", b"a\n", None).action == "removed"


@pytest.mark.parametrize("mode", [0o600, 0o640])
def test_content_that_not_every_user_may_read_is_not_shown(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "config.toml"
    path.write_text("password")
    path.chmod(0o644)
    shown = FileChange.of(str(path), "password", "password, ours")
    path.chmod(mode)
    hidden = FileChange.of(str(path), "password", "password, ours")
    assert shown is not None
    assert hidden is not None
    assert "password" in shown.diff()
    assert hidden.diff() == ""
    assert "password" not in change(hidden).diff()
    assert str(path) in change(hidden).diff()
    apply(change(hidden))
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("password, ours", mode)


def test_a_link_of_another_user_where_everybody_may_make_one_is_not_followed(
    tmp_path: Path,
) -> None:
    tmp_path.chmod(0o1777)
    precious = tmp_path / "precious"
    precious.write_text("old")
    link = tmp_path / "config.toml"
    link.symlink_to(precious)
    os.lchown(link, 12345, 12345)
    with raises(WriteFailed, match="belongs to user 12345"):
        apply(change(FileChange(str(link), b"old", b"new")))
    assert precious.read_text() == "old"


def killed(change: Change, step: int) -> bool:
    """Run it in a process that is killed at a step; return False if it has fewer steps."""
    pid = os.fork()
    if pid == 0:
        left = [step]

        def hook(event: str, _: object) -> None:
            if event in {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod"}:
                left[0] -= 1
                if not left[0]:
                    os.kill(os.getpid(), signal.SIGKILL)

        status = 1
        try:
            sys.addaudithook(hook)
            apply(change)
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) or status == 0
    return os.WIFSIGNALED(status)


def test_kill_at_any_step_leaves_old_or_new_and_the_next_one_sweeps(tmp_path: Path) -> None:
    path, drop_in = tmp_path / "config.toml", tmp_path / "d" / "x.toml"
    for old, new in ((None, b"new"), (b"old", b"new"), (b"old", None)):
        for step in range(1, 99):
            path.write_bytes(b"root")
            if old is not None:
                drop_in.parent.mkdir(exist_ok=True)
                drop_in.write_bytes(old)
            made = (str(drop_in.parent),) if None in (old, new) else ()
            todo = change(FileChange(str(drop_in), old, new, 0o644, made, str(tmp_path)))
            was_killed = killed(todo, step)
            now = drop_in.read_bytes() if drop_in.exists() else None
            assert now in (old, new)
            if drop_in.parent.exists():
                assert set(os.listdir(drop_in.parent)) <= {"x.toml"}
            for content in (b"again", None):
                apply(change(FileChange(str(drop_in), now, content, 0o644, (made or (
                    str(drop_in.parent),)), str(tmp_path))))  # fmt: skip
                now = content
            assert os.listdir(tmp_path) == ["config.toml"]
            if not was_killed:
                break
        assert step > 3, "it was killed at steps of its own"


@pytest.mark.skipif(os.geteuid() != 0, reason="mount(2) is root's")
def test_file_below_another_mount_of_the_same_file_system_is_written(tmp_path: Path) -> None:
    """rename(2) refuses to cross mounts, also where both show one file system."""
    source, mounted, staging = (tmp_path / name for name in ("source", "mounted", "staging"))
    for directory in (source, mounted, staging):
        directory.mkdir()
    subprocess.run(["mount", "--bind", source, mounted], check=True)
    try:
        path = str(mounted / "file")
        apply(change(FileChange(path, None, b"new", staging=str(staging))))
        assert (mounted / "file").read_bytes() == b"new"
        assert os.listdir(staging) == []
    finally:
        subprocess.run(["umount", mounted], check=True)
