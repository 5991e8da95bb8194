"""Readers of containers avoid file systems that may hang, and read tenants' data last."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from integration.containers.device_users import device_users
from integration.containers.mount_users import mount_users
from integration.containers.procfs import Procfs
from integration.containers.trees import Tree, is_current, tree_of
from tests.harness.fuse import fuse

ROOT: Final = pytest.mark.skipif(os.geteuid() != 0, reason="makes namespaces and mounts")
SLEEP: Final = ("sh", "-c", "echo; exec sleep 100")


@contextmanager
def started(words: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process, and wait for a line of its output."""
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"\n"
            yield process
        finally:
            process.kill()


class _Mapped(Procfs):
    """A procfs in which every process has one file mapped."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    def mapped(self, pid: int) -> list[str]:
        del pid
        return [self._path]


@ROOT
def test_the_tree_on_a_volume_that_does_not_answer_is_known_by_its_name(tmp_path: Path) -> None:
    top = tmp_path / "1.2.3-aaaaaaaa"
    (tmp_path / "current").symlink_to(top)
    (tmp_path / "file").touch()
    ask = (
        "import sys; from tests.unit.inspection.test_readers import ask_tree; ask_tree(sys.argv[1])"
    )
    with fuse(str(top), str(tmp_path / "file")) as volume:
        volume.hang()
        # In its own process: one that hangs in here cannot be interrupted.
        subprocess.run([sys.executable, "-c", ask, str(top)], timeout=30, check=True)
        # Other programs of this machine may access it.
        assert not [line for line in volume.askers if os.getpid() in line]
        volume.go_on()


def ask_tree(top: str) -> None:
    """Fail unless a tree is recognized by name, without access to its files."""
    tree = tree_of(_Mapped(f"{top}/lib/google/_upb/_message.so"), 1)
    assert tree == Tree(top, "1.2.3", is_there=True)
    assert is_current(tree) is None


@ROOT
def test_processes_in_containers_are_read_last() -> None:
    contained = ["unshare", "--mount", "--pid", "--fork", "--kill-child", *SLEEP]
    with started(contained) as first, started(SLEEP) as ours:
        children = Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text("ascii")
        (inside,) = map(int, children.split())
        pids = Procfs().pids_by_trust()
        assert pids.index(ours.pid) < pids.index(inside)


def test_a_node_is_known_by_its_number_and_not_by_its_path(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {os.makedev(1, 5): "zero", os.makedev(195, 0): "gpu"}
    with started(("sh", "-c", "exec 3</dev/zero; echo; exec sleep 100")) as process:
        monkeypatch.setattr(Procfs, "pids", lambda _: iter([process.pid, os.getpid()]))
        with open("/dev/zero", "rb"):
            found = dict(device_users(Procfs(), lambda number: names.get(number, "")))
    assert found == {process.pid: ("zero",)}


@ROOT
def test_a_process_that_has_a_directory_mounted_is_found(tmp_path: Path) -> None:
    pipe, other = tmp_path / "pipe", tmp_path / "other"
    pipe.mkdir()
    other.mkdir()
    script = f"mount --bind {pipe} /mnt && echo && exec sleep 100"
    with started(("unshare", "--mount", "sh", "-c", script)) as process:
        # It may not have executed `sleep` yet.
        assert [pid for pid, _ in mount_users(str(pipe))] == [process.pid]
        assert list(mount_users(str(pipe), [process.pid])) == []
        assert list(mount_users(str(other))) == []
