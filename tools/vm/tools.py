"""The programs that create and run machines."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING, Final

from tools.errors import GuestNotBuilt, ToolMissing

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_SYSTEM_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def find(program: str) -> str:
    """Return the path of a program.

    Raises:
        ToolMissing: it is not installed.
    """
    path = shutil.which(program, path=_SYSTEM_PATH)
    if path is None:
        raise ToolMissing(
            f"the program {program} for a virtual machine",
            found=f"none in {_SYSTEM_PATH}",
            do="run make test-vm, which installs it",
        )
    return path


def run(
    asked: str,
    argv: Sequence[str],
    *,
    data: str = "",
    environment: Mapping[str, str] | None = None,
) -> str:
    """Run a program to its end.

    Args:
        argv: the command line; a program without a slash is looked up.

    Returns:
        Its standard output.

    Raises:
        ToolMissing: it is not installed.
        GuestNotBuilt: its exit code is not 0.
    """
    program = argv[0] if "/" in argv[0] else find(argv[0])
    done = subprocess.run(
        [program, *argv[1:]],
        input=data, capture_output=True, text=True, errors="replace", check=False,
        env={**os.environ, "PATH": _SYSTEM_PATH, "LC_ALL": "C.UTF-8", **(environment or {})},
    )  # fmt: skip
    if done.returncode != 0:
        said = (done.stderr or done.stdout).splitlines()
        why = [line for line in said if line.startswith(("E:", "ERROR", "error"))] or said[-3:]
        raise GuestNotBuilt(
            asked, found=f"{argv[0]} exited with {done.returncode}: {' '.join(why)}"
        )
    return done.stdout
