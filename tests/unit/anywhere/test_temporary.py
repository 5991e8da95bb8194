"""The choice of the tests' temporary directory."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from shim import syscalls
from tests.harness import temporary
from tests.harness.temporary import usable_tmpdir


@pytest.fixture(autouse=True)
def usable(monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the temporary directory of this run, which is usable. A test may change TMPDIR."""
    directory = tempfile.gettempdir()
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", directory)
    return directory


def test_a_directory_in_which_tests_can_run_stays(usable: str) -> None:
    with usable_tmpdir() as why:
        assert why == ""
        assert os.environ["TMPDIR"] == tempfile.gettempdir() == usable


def test_one_with_a_long_name_is_exchanged_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    with usable_tmpdir() as why:
        assert str(tmp_path) in why
        assert os.environ["TMPDIR"] == tempfile.gettempdir()
        assert len(tempfile.gettempdir()) <= temporary._LONGEST
    assert os.environ["TMPDIR"] == tempfile.gettempdir() == str(tmp_path)


def test_one_on_an_overlay_is_exchanged_for_memory_which_goes(
    usable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = temporary._LONGEST
    monkeypatch.setattr(temporary, "_LONGEST", 100)  # any directory in it is too long
    with tempfile.TemporaryDirectory(prefix="o-", dir=usable) as directory:
        for name in ("l", "u", "w", "t"):
            os.mkdir(f"{directory}/{name}")
        layers = f"lowerdir={directory}/l,upperdir={directory}/u,workdir={directory}/w"
        syscalls.mount("overlay", f"{directory}/t", "overlay", 0, layers)
        try:
            monkeypatch.setenv("TMPDIR", f"{directory}/t")
            tempfile.tempdir = None
            with usable_tmpdir() as why:
                memory = tempfile.gettempdir()
                assert f"{directory}/t" in why
                assert os.path.ismount(memory)
                assert len(memory) <= longest
            assert not os.path.exists(memory)
            assert os.environ["TMPDIR"] == f"{directory}/t"
        finally:
            syscalls.umount(f"{directory}/t", syscalls.MNT_DETACH)
