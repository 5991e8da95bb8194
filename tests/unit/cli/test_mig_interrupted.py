"""``nvshim mig apply`` ends with the process that started it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from integration import exits

_LOST = """
import os, signal, sys, time
import click
from integration.cli.mig import _undone_by_sigterm

try:
    with _undone_by_sigterm({parent}):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(30)
        except KeyboardInterrupt:
            pass  # as Python does in a finalizer
        time.sleep({rest})
except click.exceptions.Exit as ended:
    sys.exit(ended.exit_code)
"""


@pytest.mark.parametrize(
    ("parent", "rest", "status"), [("os.getppid()", 30, exits.TERMINATED), ("None", 2, exits.OK)]
)
def test_the_end_of_its_parent_is_told_again_if_python_has_lost_it(
    parent: str, rest: int, status: int
) -> None:
    script = _LOST.format(parent=parent, rest=rest)
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == status


_TWICE = """
import os, signal, sys, time
import click
from integration.cli import mig

mig._AGAIN = 3600.0
try:
    with mig._undone_by_sigterm(os.getppid()):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(30)
        except KeyboardInterrupt:
            os.kill(os.getpid(), signal.SIGTERM)
            print("cleaned up", flush=True)
            raise
except click.exceptions.Exit as ended:
    sys.exit(ended.exit_code)
"""


def test_a_parent_of_many_threads_that_is_killed_interrupts_no_cleanup() -> None:
    """The kernel sends the signal when each of the threads ends."""
    done = subprocess.run([sys.executable, "-c", _TWICE], check=False, stdout=subprocess.PIPE)
    assert (done.returncode, done.stdout) == (exits.TERMINATED, b"cleaned up\n")
