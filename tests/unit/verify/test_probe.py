"""The program of verify's containers, run here: its report matches the machine."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
from typing import TYPE_CHECKING, Final

import pytest

from integration.verify.probe import END, find_program, parse
from tests.harness.waiting import eventually

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM: Final = find_program()


def probe(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [PROGRAM, *words], capture_output=True, text=True, errors="replace", check=False, env={},
        timeout=60,
    )  # fmt: skip


def test_it_needs_no_file_of_the_image() -> None:
    told = subprocess.run(
        ["readelf", "--program-headers", PROGRAM], capture_output=True, text=True, check=True
    ).stdout
    assert " LOAD " in told
    assert " INTERP " not in told


def test_it_tells_the_nodes_that_are_there_by_their_numbers() -> None:
    report = parse(probe("look").stdout.splitlines())
    status = os.stat("/dev/null")
    assert stat.S_ISCHR(status.st_mode)
    assert report.nodes["/dev/null"] == (
        (os.major(status.st_rdev), os.minor(status.st_rdev)), 0,
    )  # fmt: skip
    assert "proc" in report.mounts


@pytest.mark.parametrize(("words", "status"), [(("exit", "42"), 42), (("what",), 2), ((), 2)])
def test_it_ends_with_the_code_that_it_is_told(words: tuple[str, ...], status: int) -> None:
    assert probe(*words).returncode == status


def test_an_exec_has_a_line_and_a_code() -> None:
    done = probe("echo", "43")
    assert (done.stdout, done.returncode) == ("here\n", 43)


@pytest.mark.parametrize(("count", "status"), [("0", 0), ("2", 1)])
def test_a_pod_of_a_cluster_is_judged_by_how_many_it_has(count: str, status: int) -> None:
    """This machine has no real GPU and no mounted driver, so the count is 0."""
    done = probe("count", count)
    assert done.returncode == status
    told = "passed  0 GPUs, as requested\n" if status == 0 else "seen: 0 GPUs\n"
    assert told in done.stdout
    assert all(len(line) <= 80 for line in done.stdout.splitlines())


def test_it_looks_again_when_it_is_told_to_end(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with open(log, "wb") as file, subprocess.Popen([PROGRAM, "hold"], stdout=file) as process:
        eventually(lambda: log.read_bytes().endswith(f"{END}\n".encode()), "the first look")
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
    assert log.read_bytes().split(b"\n").count(END.encode()) == 2
