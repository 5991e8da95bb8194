"""Programs that run beside their own libraries, wherever they are put."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from integration.gpu.errors import BundleNotBuilt, MachineUnfit
from integration.gpu.programs import LIBRARIES, collect, relocate, relocated

if TYPE_CHECKING:
    from pathlib import Path

needs_patchelf = pytest.mark.skipif(not shutil.which("patchelf"), reason="needs patchelf")


@needs_patchelf
def test_program_runs_where_it_was_moved_to_with_its_own_loader(tmp_path: Path) -> None:
    collect(["/usr/bin/env"], str(tmp_path / "made"))
    moved = tmp_path / "moved"
    (tmp_path / "made").rename(moved)
    relocate(str(moved))
    # ld.so's own list names the file of each library that it has loaded.
    done = subprocess.run(
        [moved / "env", "LD_TRACE_LOADED_OBJECTS=1", moved / "env"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert f"{moved}/{LIBRARIES}/libc.so.6" in done.stdout
    assert "/usr/lib" not in done.stdout


@needs_patchelf
def test_relocating_again_changes_nothing(tmp_path: Path) -> None:
    collect(["/usr/bin/env"], str(tmp_path / "made"))
    before = (tmp_path / "made/env").read_bytes()
    once = relocated(before, "/somewhere/lib")
    assert len(once) == len(before)
    assert relocated(once, "/elsewhere/lib") == once


@needs_patchelf
def test_a_path_that_is_too_long_is_refused(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 120) / ("e" * 120)
    deep.mkdir(parents=True)
    with pytest.raises(MachineUnfit, match="more than 200 bytes"):
        relocate(str(deep))


@needs_patchelf
def test_a_static_program_cannot_be_collected(tmp_path: Path) -> None:
    static = shutil.which("busybox")
    if static is None:
        pytest.skip("needs busybox-static")
    with pytest.raises(BundleNotBuilt):
        collect([static], str(tmp_path / "made"))


def test_without_patchelf_one_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ldd", "bash", "sh"):
        os.symlink(shutil.which(name) or "/bin/false", tmp_path / name)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BundleNotBuilt, match=r"install the package patchelf"):
        collect(["/usr/bin/env"], str(tmp_path / "made"))
