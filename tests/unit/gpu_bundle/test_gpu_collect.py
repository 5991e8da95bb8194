"""Programs that are bundled with their own libraries."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.harness.raising import raises
from tools.errors import BundleNotBuilt, ProgramNotAdapted
from tools.gpu.bundle import collect

needs_patchelf = pytest.mark.skipif(not shutil.which("patchelf"), reason="needs patchelf")


@needs_patchelf
def test_a_program_runs_at_its_place_with_its_own_loader(tmp_path: Path) -> None:
    place = tmp_path / "place"
    collect(["/usr/bin/env"], str(tmp_path / "made"), place=str(place))
    (tmp_path / "made").rename(place)
    # ld.so's own list names the file of each library that it has loaded.
    done = subprocess.run(
        [place / "env", "LD_TRACE_LOADED_OBJECTS=1", place / "env"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert f"{place}/lib/libc.so.6" in done.stdout
    assert "/usr/lib" not in done.stdout


@needs_patchelf
def test_a_static_program_cannot_be_collected(tmp_path: Path) -> None:
    static = shutil.which("busybox")
    if static is None:
        pytest.skip("needs busybox-static")
    with raises(BundleNotBuilt, ProgramNotAdapted):
        collect([static], str(tmp_path / "made"))
