"""The choice of the verb, its output, and its error messages."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

import shim
from tests.harness.launcher import SITE
from tests.unit.verbs.program import INTERPRETER, SOURCES, Program


def test_the_version_is_the_distributions() -> None:
    with open(os.path.join(SOURCES, "pyproject.toml"), "rb") as file:
        assert tomllib.load(file)["project"]["version"] == shim.VERSION


def test_version_prints_text(program: Program) -> None:
    done = program.run("-v")
    assert (done.returncode, done.stderr) == (0, b"")
    assert re.match(rb"containerd-shim-nvidia-v1:\n  Version:  [0-9.]+\n", done.stdout)


@pytest.mark.parametrize("word", ["-h", "-help", "--help"])
def test_a_person_who_asks_is_told_how_it_is_called(program: Program, word: str) -> None:
    done = program.run(word)
    assert (done.returncode, done.stderr) == (0, b"")
    for said in (b"-info", b"start", b"delete", b"ctr run --runtime io.containerd.nvidia.v1"):
        assert said in done.stdout


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ([], b"NVSHIM-E1001"),
        (["serve"], b"NVSHIM-E1001"),
        (["-namespace", "n", "-id", "../../etc", "start"], b"NVSHIM-E1002"),
        (["-namespace", "", "-id", "i", "delete"], b"NVSHIM-E1002"),
    ],
)
def test_a_refusal_is_one_line_on_stderr_and_exit_status_1(
    program: Program, words: list[str], code: bytes
) -> None:
    done = program.run(*words)
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.startswith(code)
    assert b"\n" not in done.stderr


def test_a_person_at_a_terminal_gets_a_line_break_too(program: Program) -> None:
    master, slave = os.openpty()
    try:
        subprocess.run([program.path], stderr=slave, check=False)
        assert os.read(master, 4096).endswith(b"\r\n")
    finally:
        os.close(master)
        os.close(slave)


def test_what_should_not_happen_is_one_line_too_and_says_where(program: Program) -> None:
    bundle = program.bundle("web-1")
    missing = bundle / "gone"
    missing.mkdir()
    # The working directory disappears during the verb, an unexpected error.
    script = 'rmdir "$PWD"; exec "$@"'
    words = ["-namespace", "test", "-id", "web-1", "start"]
    done = subprocess.run(
        ["sh", "-c", script, "sh", program.path, *words],
        cwd=missing,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, b"")
    assert re.fullmatch(
        rb"containerd-shim-nvidia-v1: FileNotFoundError: .* \(start\.py:\d+\)", done.stderr
    )


def test_closed_descriptors_are_not_taken_by_files_of_ours(program: Program) -> None:
    script = '"$@" <&- >&- 2>&-; echo "status $?"'
    done = subprocess.run(
        ["sh", "-c", script, "sh", program.path, "-v"], stdout=subprocess.PIPE, check=True
    )
    assert done.stdout == b"status 0\n"


def test_the_package_can_be_run_as_a_module(tmp_path: Path) -> None:
    script = f"import sys, runpy; sys.path += [{SOURCES!r}, {SITE!r}]; sys.argv = ['shim', '-v'];"
    script += "runpy.run_module('shim', run_name='__main__')"
    done = subprocess.run(
        [INTERPRETER, "-ISc", script], cwd=tmp_path, capture_output=True, check=True
    )
    assert done.stdout.startswith(b"containerd-shim-nvidia-v1:")
