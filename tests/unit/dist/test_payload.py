"""Duplicate files in a payload."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tools.dist.payload import link_or_copy


def test_a_file_is_linked_and_copied_where_the_file_system_is_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "program"
    source.write_text("text")
    source.chmod(0o750)
    link_or_copy(str(source), str(tmp_path / "link"))
    assert os.path.samefile(source, tmp_path / "link")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "link", refuse)
    link_or_copy(str(source), str(tmp_path / "copy"))
    assert not os.path.samefile(source, tmp_path / "copy")
    assert (tmp_path / "copy").read_text() == "text"
    assert (tmp_path / "copy").stat().st_mode == source.stat().st_mode
