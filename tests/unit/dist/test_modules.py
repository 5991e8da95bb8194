"""The files of a checkout that go into a tree."""

from __future__ import annotations

from pathlib import Path

from tools.dist.modules import OURS, copy_ours


def test_a_package_that_has_moved_leaves_nothing_in_a_tree(tmp_path: Path) -> None:
    for package in OURS:
        (tmp_path / "source" / package / "room").mkdir(parents=True)
        (tmp_path / "source" / package / "room" / "module.py").write_text("")
    caches = tmp_path / "source" / OURS[0] / "moved" / "deep" / "__pycache__"
    caches.mkdir(parents=True)
    (caches / "module.cpython-311.pyc").write_bytes(b"")
    copy_ours(str(tmp_path / "source"), str(tmp_path / "tree"))
    copied = {str(path.relative_to(tmp_path / "tree")) for path in (tmp_path / "tree").rglob("*")}
    assert copied == {
        name for each in OURS for name in (each, f"{each}/room", f"{each}/room/module.py")
    }
