"""A warm process looks like a newly started one, to itself and to others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from tests.harness.launcher import REPOSITORY
from tests.harness.warm import PROGRAM, Warm

MODULE = "tests.unit.warm_program"
PIPE = subprocess.PIPE


def cold(module: str, *words: str, **options: Any) -> subprocess.Popen[Any]:
    return subprocess.Popen([*PROGRAM, module, *words], cwd=REPOSITORY, **options)


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("leads", [False, True])
def test_it_sees_nothing_of_how_it_was_made(*, leads: bool, unbuffered: str) -> None:
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered, "ODD": "ä \udcff="}
    options = {"stdin": PIPE, "stdout": PIPE, "env": environment, "start_new_session": leads}
    seen = []
    for make in (cold, Warm):
        with make(MODULE, "portrait", "ö", "", **options) as process:
            seen.append(json.loads(process.communicate()[0]))
        assert process.returncode == 0
    assert seen[1] == seen[0]
    assert seen[0]["leads"] is leads


@pytest.mark.parametrize(
    "deed",
    [
        "sys.exit()",
        "sys.exit(7)",
        "sys.exit(True)",
        "sys.exit('no')",
        "print('out'); print('err', file=sys.stderr); sys.exit(3)",
        "import atexit; atexit.register(print, 'last')",
        "import time; threading.Timer(0.1, print, ['thread']).start()",
        "os.kill(os.getpid(), signal.SIGTERM)",
        "os.kill(os.getpid(), signal.SIGINT)",
        "print(input())",
        "1 / 0",
        "subprocess.run(['sh', '-c', 'echo child; exit 5'], check=True)",
    ],
)
def test_it_ends_as_one_that_was_started(deed: str) -> None:
    ends = []
    for make in (cold, Warm):
        with make(MODULE, deed, stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True) as process:
            stdout, stderr = process.communicate("in\n")
        # Only the last line of a traceback, because its stack differs.
        ends.append((process.returncode, stdout, stderr.splitlines()[-1:]))
    assert ends[1] == ends[0]


def test_it_has_the_streams_of_whoever_starts_it(capfd: pytest.CaptureFixture[str]) -> None:
    assert Warm(MODULE, "print('out'); print('err', file=sys.stderr)").wait() == 0
    assert capfd.readouterr() == ("out\n", "err\n")
    with Warm(MODULE, "print(1, flush=True); os.write(2, b'2')", stdout=PIPE, stderr=-2) as process:
        assert process.communicate() == (b"1\n2", None)


@pytest.mark.parametrize("make", [cold, Warm])
def test_it_can_be_waited_for_and_killed(make: Callable[..., subprocess.Popen[Any]]) -> None:
    with make(MODULE, "print(flush=True); signal.pause()", stdout=PIPE) as process:
        assert process.stdout.readline() == b"\n"  # type: ignore[union-attr]
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0)
        process.kill()
        assert process.wait() == -signal.SIGKILL
