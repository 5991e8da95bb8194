"""Listed device nodes that need another owner in a user namespace."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from shim.work import listed
from shim.work.listed import shut_nodes


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a directory that stands in for those of GPU device nodes."""
    monkeypatch.setattr(listed, "GPU_NODES", (f"{tmp_path}/",))
    for name, mode, minor in (("shut", 0o660, 7), ("open", 0o666, 8), ("read", 0o644, 9)):
        os.mknod(tmp_path / name, stat.S_IFCHR, os.makedev(1, minor))
        (tmp_path / name).chmod(mode)
    os.chown(tmp_path / "shut", 3, 44)
    (tmp_path / "file").touch(mode=0o600)
    (tmp_path / "link").symlink_to("shut")
    return tmp_path


def spec_of(*nodes: tuple[str, int, int], mapped: bool = True) -> dict[str, Any]:
    devices = [
        {"path": path, "type": "c", "major": major, "minor": minor, "fileMode": 0o666}
        for path, major, minor in nodes
    ]
    namespaces = [{"type": "user"}] if mapped else []
    return {"linux": {"devices": devices, "namespaces": namespaces}}


def test_owner_and_mode_are_the_hosts_whatever_the_spec_says(directory: Path) -> None:
    path = str(directory / "shut")
    (node,) = shut_nodes(spec_of((path, 1, 7), (str(directory / "open"), 1, 8)), ())
    assert node == {
        "path": path, "type": "c", "major": 1, "minor": 7, "fileMode": 0o660, "uid": 3, "gid": 44,
        "state": "covered",
    }  # fmt: skip
    assert list(shut_nodes(spec_of((path, 1, 7)), {path})) == []
    assert list(shut_nodes(spec_of((path, 1, 7), mapped=False), ())) == []


def test_what_not_everybody_may_write_is_shut(directory: Path) -> None:
    path = str(directory / "read")
    assert [node["path"] for node in shut_nodes(spec_of((path, 1, 9)), ())] == [path]


def test_nothing_but_the_very_device_counts(directory: Path) -> None:
    nodes = [
        (str(directory / "shut"), 1, 8),
        (str(directory / "file"), 0, 0),
        (str(directory / "link"), 1, 7),
        (str(directory / "none"), 1, 7),
        (f"{directory}/zero\0", 1, 7),
        ("/dev/full", 1, 7),
    ]
    assert list(shut_nodes(spec_of(*nodes), ())) == []
