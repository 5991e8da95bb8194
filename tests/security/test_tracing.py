"""The tracer of the shim's file accesses misses no call, and does not stop the shim."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Final

import pytest

from tests.harness.hostile import calls_below, traced
from tests.harness.launcher import REPOSITORY

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.security,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it traces another process"),
    pytest.mark.skipif(not shutil.which("strace"), reason="needs strace"),
]

# Each program says that its exec is over, since strace detaches at an exec, and waits until it is
# traced.
WAITS: Final = "print('ready', flush=True); sys.stdin.readline()"
FROM_THE_ROOT: Final = f"""
import os, sys
from hooks.image.rootfs import Rootfs
rootfs = Rootfs.open(sys.argv[1])
{WAITS}
rootfs.stat("/etc/passwd")
rootfs.directory("/etc").close()
"""
MANY: Final = "after a thousand programs"
WAYS_ROUND: Final = {
    "by its path": "os.stat(root + '/etc/passwd')",
    "by a path that leads back into it": "os.stat(root + '/../rootfs/etc/passwd')",
    "below a descriptor": "os.stat('etc/passwd', dir_fd=os.open(root, os.O_PATH))",
    "through a link": "os.open('etc', os.O_PATH, dir_fd=os.open(root, os.O_PATH))",
    "below its directory": "os.chdir(root); os.stat('etc/passwd')",
    "in a fork": "pid = os.fork(); pid or os.stat(root + '/etc/passwd'); pid and os.wait()",
    MANY: (
        "[os.waitpid(os.posix_spawn('/bin/true', ['true'], {}), 0) for _ in range(1100)];"
        "os.stat(root + '/etc/passwd')"
    ),
}


def calls_of(program: str, tmp_path: Path) -> tuple[list[str], int]:
    """Return the traced calls of a Python program whose argument is a rootfs."""
    rootfs = tmp_path / "rootfs"
    (rootfs / "etc").mkdir(parents=True)
    (rootfs / "etc/passwd").touch()
    argv = [sys.executable, "-c", program, str(rootfs)]
    environment = {**os.environ, "PYTHONPATH": REPOSITORY, "PYTHONDONTWRITEBYTECODE": "1"}
    log = f"{tmp_path}/strace"
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        with traced(process.pid, log):
            process.communicate("go\n")
        assert process.returncode == 0
    return calls_below(log, str(rootfs))


@pytest.mark.parametrize(
    "way",
    [pytest.param(way, marks=[pytest.mark.thorough] if way == MANY else []) for way in WAYS_ROUND],
)
def test_a_file_of_an_image_that_is_not_named_from_the_root_is_seen(
    tmp_path: Path, way: str
) -> None:
    lines = ("import os, sys", "root = sys.argv[1]", WAITS, WAYS_ROUND[way])
    bad, _ = calls_of("\n".join(lines), tmp_path)
    assert len(bad) == 1


def test_a_file_of_an_image_that_is_named_from_the_root_is_allowed(tmp_path: Path) -> None:
    bad, good = calls_of(FROM_THE_ROOT, tmp_path)
    assert bad == []
    assert good >= 2
