"""The program that computes on a GPU, run with a CUDA driver that computes on the CPU."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

import tools.gpu
from tools.containerd import Completed
from tools.errors import CheckFailed
from tools.gpu.checks import answers, computes

SOURCE: Final = os.path.join(os.path.dirname(tools.gpu.__file__), "gpu.c")
FAKE: Final = os.path.join(os.path.dirname(__file__), "fake_cuda.c")
FIRST, SECOND = ("GPU-" + "-".join(n * k for k in (8, 4, 4, 4, 12)) for n in "12")

pytestmark = pytest.mark.skipif(not shutil.which("gcc"), reason="needs gcc")


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("gpu")
    strict = ("gcc", "-O1", "-Wall", "-Wextra", "-Werror")
    subprocess.run([*strict, "-o", directory / "gpu", SOURCE, "-ldl"], check=True)
    soname = ("-shared", "-fPIC", "-Wl,-soname,libcuda.so.1")
    subprocess.run([*strict, *soname, "-o", directory / "libcuda.so.1", FAKE], check=True)
    return directory


def test_it_computes_and_tells_of_each_device(programs: Path) -> None:
    done = _cuda(programs, FAKE_DEVICES="2")
    assert done.code == 0, done
    assert computes(done, {FIRST, SECOND}).startswith(
        'CUDA 13.0; Fake "0": 100003 right results of a kernel for sm_50'
    )
    assert [line["memory"] for line in answers(done)[1:]] == [80 << 30] * 2


def test_a_wrong_result_is_found(programs: Path) -> None:
    done = _cuda(programs, FAKE_FAULT="wrong")
    assert answers(done)[1]["wrong"] == 1
    with pytest.raises(CheckFailed, match="wrong results"):
        computes(done, {FIRST})


def test_where_the_oldest_target_is_refused_the_next_is_taken(programs: Path) -> None:
    assert "for sm_75" in computes(_cuda(programs, FAKE_FAULT="old"), {FIRST})


def test_a_kernel_that_is_refused_is_told_with_the_compilers_words(programs: Path) -> None:
    with pytest.raises(CheckFailed, match=r"ptxas: no code for this target.*218"):
        computes(_cuda(programs, FAKE_FAULT="ptx"), {FIRST})


def test_no_device_and_no_driver_are_told_apart(programs: Path) -> None:
    done = _cuda(programs, FAKE_DEVICES="0")
    assert (done.code, answers(done)[-1]["code"]) == (1, 100)
    done = _run([str(programs / "gpu"), "cuda"], {})
    assert (done.code, answers(done)[-1]["failed"]) == (3, "dlopen libcuda.so.1")


def test_called_wrongly_it_says_how(programs: Path) -> None:
    done = _run([str(programs / "gpu"), "dance"], {})
    assert done.code == 2
    assert "usage: gpu cuda|" in done.stderr


def _cuda(programs: Path, **environment: str) -> Completed:
    return _run([str(programs / "gpu"), "cuda"], {"LD_LIBRARY_PATH": str(programs), **environment})


def _run(argv: list[str], environment: dict[str, str]) -> Completed:
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env=environment)
    return Completed(tuple(argv), done.returncode, done.stdout, done.stderr)
