"""The program that containerd executes is isolated from the environment of Python."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from shim import VERSION
from tests.harness.launcher import SITE
from tests.harness.own_process import restored
from tests.unit.verbs.program import INTERPRETER, SOURCES
from tools.errors import LauncherUnusable
from tools.launcher import compile_native, launcher_text, write_launcher


def _write(path: Path, interpreter: str = INTERPRETER) -> Path:
    write_launcher(
        str(path), interpreter=interpreter, library_paths=[SOURCES, SITE], revision="abc123"
    )
    return path


def _version(path: Path, environment: dict[str, str] | None = None) -> list[str]:
    text = subprocess.check_output([path, "-v"], cwd=path.parent, env=environment, text=True)
    return text.splitlines()


def test_the_program_is_executable_for_all_and_knows_its_revision(tmp_path: Path) -> None:
    with restored():
        os.umask(0o077)
        path = _write(tmp_path / "containerd-shim-nvidia-v1")
    assert stat.S_IMODE(path.stat().st_mode) == 0o755
    assert _version(path)[:3] == [
        "containerd-shim-nvidia-v1:",
        f"  Version:  {VERSION}",
        "  Revision: abc123",
    ]
    assert os.listdir(tmp_path) == ["containerd-shim-nvidia-v1"]


def test_the_environment_cannot_change_what_runs(tmp_path: Path) -> None:
    (tmp_path / "os.py").write_text("raise SystemExit('not the standard library')")
    (tmp_path / "shim").mkdir()
    (tmp_path / "shim" / "__init__.py").write_text("raise SystemExit('not our package')")
    environment = {"PYTHONPATH": str(tmp_path), "PYTHONSTARTUP": str(tmp_path / "os.py")}
    assert len(_version(_write(tmp_path / "program"), environment)) == 4


def test_a_library_cannot_stand_in_for_a_standard_module(tmp_path: Path) -> None:
    (tmp_path / "fcntl.py").write_text("raise SystemExit('not the standard library')")
    path = tmp_path / "program"
    write_launcher(
        str(path),
        interpreter=INTERPRETER,
        library_paths=[str(tmp_path), SOURCES, SITE],
        revision="",
    )
    assert _version(path)[2] == "  Revision: unknown"


def test_library_paths_may_have_any_printable_name(tmp_path: Path) -> None:
    library = tmp_path / 'it\'s "a" $library \\ é'
    library.symlink_to(SOURCES)
    path = tmp_path / "program"
    write_launcher(str(path), interpreter=INTERPRETER, library_paths=[str(library), SITE])
    assert len(_version(path)) == 4


@pytest.mark.parametrize(
    ("interpreter", "libraries"),
    [
        ("python3", ["/lib"]),
        ("/usr/bin/python3", []),
        ("/usr/bin/python3", ["lib"]),
        ("/usr/bin/python3", ["/lib\n"]),
        ("/usr/bin/\npython3", ["/lib"]),
        ("/with space/python3", ["/lib"]),
        (f"/{'d' * 250}/python3", ["/lib"]),
    ],
)
def test_a_launcher_that_could_not_work_is_refused(interpreter: str, libraries: list[str]) -> None:
    with pytest.raises(LauncherUnusable):
        launcher_text(interpreter, libraries)


def test_the_module_can_be_run_to_write_one(tmp_path: Path) -> None:
    path = tmp_path / "containerd-shim-nvidia-v1"
    command = [sys.executable, "-m", "tools.launcher", str(path)]
    command += ["--library", SOURCES, "--library", SITE]
    subprocess.run(command, cwd=SOURCES, check=True)
    assert path.read_text().startswith(f"#!{INTERPRETER} -IS\n")
    assert len(_version(path)) == 4


def test_the_module_says_in_one_line_why_it_did_not(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "tools.launcher",
        str(tmp_path / "no" / "x"),
        "--library",
        "/l",
    ]
    done = subprocess.run(command, cwd=SOURCES, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("NVSHIM-E2404")
    assert done.stderr.count("\n") == 1


def test_the_native_program_is_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "containerd-shim-nvidia-v1"
    compile_native(str(path), compiler="gcc")
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    assert path.read_bytes()[:4] == b"\x7fELF"


@pytest.mark.parametrize(
    ("compiler", "word"), [("no-such-compiler", "no such file"), ("false", "ended with 1")]
)
def test_a_compiler_that_fails_is_told_in_one_line(
    tmp_path: Path, compiler: str, word: str
) -> None:
    with pytest.raises(LauncherUnusable, match=word) as caught:
        compile_native(str(tmp_path / "program"), compiler=compiler)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []
