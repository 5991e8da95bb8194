"""``nvshim simulate run``: one command runs a container on a temporary simulated node."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.harness.launcher import REPOSITORY


@pytest.fixture
def temporary() -> Iterator[str]:
    """Yield a directory for temporary files, with a short path: socket addresses have 107 bytes."""
    path = f"/tmp/nvshim-try-{os.getpid()}"
    os.mkdir(path)
    yield path
    shutil.rmtree(path)


def test_a_command_sees_the_gpus_and_its_status_is_the_answer(temporary: str) -> None:
    done = subprocess.run(
        [
            sys.executable, "-m", "integration.cli", "simulate", "run", "--gpus", "3",
            "--devices", "0,2", "--", "sh", "-c", "nvidia-smi -L; exit 7",
        ],
        cwd=REPOSITORY,
        env={**os.environ, "TMPDIR": temporary},
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )  # fmt: skip
    assert done.returncode == 7, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == ["GPU 0", "GPU 1"]
    assert os.listdir(temporary) == []
