"""Walking directories of any depth."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from shim.cgroup.cgroup import pids_in
from shim.files import at_and_below


def test_depth_beyond_recursion(tmp_path: Path) -> None:
    top = tmp_path / "top"
    top.mkdir()
    fd = os.open(top, os.O_RDONLY)
    for _ in range(1200):
        os.mkdir("a", dir_fd=fd)
        below = os.open("a", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)
    try:
        assert len([*at_and_below(str(top))]) == 1201
        assert pids_in(str(top)) == []
    finally:
        subprocess.run(["rm", "-rf", str(top)], check=True)


def test_parents_come_first_and_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "c").symlink_to("/")
    names = ["", "/a", "/a/b"]
    assert [*at_and_below(str(tmp_path))] == [f"{tmp_path}{name}" for name in names]
    assert [*at_and_below(str(tmp_path / "none"))] == []
