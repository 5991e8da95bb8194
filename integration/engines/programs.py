"""The programs of engines, which are asked what they would make of a configuration.

Rules
- They are looked for where a system service finds them, not where a person does.
- They run to their end, within a time, with a fixed environment.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from typing import Final

from integration.engines.errors import EngineNotInstalled
from integration.timeouts import PATIENCE

PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Where a system service finds programs."""

_TIMEOUT: Final = 30 * PATIENCE


def find_program(program: str, option: str) -> str:
    """Where a program of an engine is.

    Raises:
        EngineNotInstalled: it is not there.
    """
    found = shutil.which(program, path=PATH)
    if found is None:
        raise EngineNotInstalled(
            f"the program {program}",
            found="no such file" if os.sep in program else f"none in {PATH}",
            do=f"name it with {option}",
        )
    return os.path.abspath(found)


def programs_named(name: str) -> list[str]:
    """All programs of a name that a system service could find, the first found first."""
    found = (shutil.which(name, path=directory) for directory in PATH.split(":"))
    return list(dict.fromkeys(filter(None, found)))


def version_of(program: str) -> str:
    """The version that a containerd says it is of ("1.7.24~ds1").

    Raises:
        EngineNotInstalled: it says none.
    """
    output = run([program, "--version"]).stdout
    # containerd github.com/containerd/containerd/v2 v2.1.4 75cb2b71…
    found = re.search(r" (v?\d+\.\d+\.\S+)", output)
    if found is None:
        raise EngineNotInstalled(f"the version of {program}", found=output.strip() or "no answer")
    return found[1]


def run(argv: list[str], *, timeout: float = _TIMEOUT) -> subprocess.CompletedProcess[str]:
    """Run an engine's program to its end, with a fixed environment.

    Args:
        argv: its command line.
        timeout: seconds that it may take.

    Raises:
        EngineNotInstalled: it cannot be run, or does not end.
    """
    try:
        return subprocess.run(
            argv, capture_output=True, text=True, errors="replace", check=False, cwd="/",
            stdin=subprocess.DEVNULL, timeout=timeout, env={"PATH": PATH, "LANG": "C.UTF-8"},
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise EngineNotInstalled(" ".join(argv), found=f"no end within {timeout:g} s") from error
    except OSError as error:
        raise EngineNotInstalled(" ".join(argv), found=error.strerror or str(error)) from error
