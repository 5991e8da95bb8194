"""The shim inspects processes whose files are on a file system that hangs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from tests.harness.fuse import FILE, FuseServer, fuse
from tests.harness.launcher import REPOSITORY

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")

LOG: Final = "runc.json"
# It opens a file on the volume, and then has a command line that names one.
PROCESS: Final = """if True:
    import os, sys
    fd = os.open(sys.argv[1], os.O_RDONLY)
    os.set_inheritable(fd, True)
    print("open", flush=True)
    sys.stdin.read()
"""


@contextmanager
def process(volume: FuseServer) -> Iterator[int]:
    path, log = f"{volume.mount_point}/{FILE}", f"{volume.mount_point}/{LOG}"
    with subprocess.Popen(
        [sys.executable, "-c", PROCESS, path, "--log", log],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as started:  # fmt: skip
        try:
            assert started.stdout is not None
            assert started.stdout.readline() == b"open\n"
            volume.hang()
            yield started.pid
        finally:
            volume.go_on()
            started.kill()


def answered(script: str, *words: str) -> str:
    """Run a program with a timeout in another process, which may hang; return its output."""
    argv = [sys.executable, "-c", script, *words]
    done = subprocess.run(
        argv, cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout


def test_a_call_of_a_runtime_is_looked_for_among_them(tmp_path: Path) -> None:
    script = (
        "import sys; from shim.runtime.orphans import end_calls; print(end_calls(*sys.argv[1:2],"
        " sys.argv[2:]))"
    )
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    with fuse(str(tmp_path / "volume")) as volume, process(volume):
        assert answered(script, str(bundle), LOG) == "[]\n"


def test_the_files_that_a_checkpoint_names_are_looked_for_among_them(tmp_path: Path) -> None:
    script = (
        "import sys; from shim.checkpoint.criu import external_files;"
        " print(external_files(int(sys.argv[1]), [], [None, None, None]))"
    )
    with fuse(str(tmp_path / "volume")) as volume, process(volume) as pid:
        assert answered(script, str(pid)) == "{}\n"
