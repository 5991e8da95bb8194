"""Run the engines' programs, which check a configuration for us.

Rules
- They are looked up on the path of system services, not on the user's.
- They run with a fixed environment and a time limit.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from integration.engines.errors import EngineNotInstalled, WriteFailed
from integration.timeouts import PATIENCE

PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""The path on which system services find programs."""

_TIMEOUT: Final = 30 * PATIENCE


def find_program(program: str, option: str) -> str:
    """Return the path of an engine's program.

    Raises:
        EngineNotInstalled: the program was not found.
    """
    found = shutil.which(program, path=PATH)
    if found is None:
        raise EngineNotInstalled(
            f"the program {program}",
            found="no such file" if os.sep in program else f"none in {PATH}",
            do=f"name it with {option}",
        )
    return os.path.abspath(found)


@contextmanager
def temporary_directory() -> Iterator[str]:
    """Yield a directory for files that an engine's program checks.

    Raises:
        WriteFailed: the directory, or a file in it, cannot be written.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="nvshim-") as directory:
            yield directory
    except OSError as error:
        raise WriteFailed(
            "to write a copy of the configuration for the engine's check",
            found=error.strerror or str(error),
            do="make room in /tmp, or name another directory with TMPDIR",
        ) from error


def programs_named(name: str) -> list[str]:
    """Return all programs of a name on the path of system services, in its order."""
    found = (shutil.which(name, path=directory) for directory in PATH.split(":"))
    return list(dict.fromkeys(filter(None, found)))


def version_of(program: str) -> str:
    """Return the version that a containerd reports ("1.7.24~ds1").

    Raises:
        EngineNotInstalled: it reports no version.
    """
    output = run([program, "--version"]).stdout
    # containerd github.com/containerd/containerd/v2 v2.1.4 75cb2b71…
    found = re.search(r" (v?\d+\.\d+\.\S+)", output)
    if found is None:
        raise EngineNotInstalled(f"the version of {program}", found=output.strip() or "no answer")
    return found[1]


def run(argv: list[str], *, timeout: float = _TIMEOUT) -> subprocess.CompletedProcess[str]:
    """Run an engine's program until it exits, with a fixed environment.

    Args:
        argv: its command line.
        timeout: the time limit in seconds.

    Raises:
        EngineNotInstalled: the program cannot be run, or does not exit in time.
    """
    try:
        return subprocess.run(
            argv, capture_output=True, text=True, errors="replace", check=False, cwd="/",
            stdin=subprocess.DEVNULL, timeout=timeout, env={"PATH": PATH, "LANG": "C.UTF-8"},
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise EngineNotInstalled(" ".join(argv), found=f"no exit within {timeout:g} s") from error
    except OSError as error:
        raise EngineNotInstalled(" ".join(argv), found=error.strerror or str(error)) from error
