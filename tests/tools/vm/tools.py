"""The programs that machines are made with."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import Final

from tests.tools.errors import ToolMissing, VmError

_SYSTEM_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# Which package a program comes with, where the name does not tell.
_PACKAGES: Final = {
    "dpkg-deb": "dpkg",
    "depmod": "kmod",
    "mke2fs": "e2fsprogs",
    "modprobe": "kmod",
    "qemu-system-x86_64": "qemu-system-x86",
    "setpriv": "util-linux",
}


def find(program: str) -> str:
    """The path of a program.

    Raises:
        ToolMissing: it is not installed.
    """
    path = shutil.which(program, path=_SYSTEM_PATH)
    if path is None:
        raise ToolMissing(
            f"the program {program} for a virtual machine",
            found=f"none in {_SYSTEM_PATH}",
            do=f"install the package {_PACKAGES.get(program, program)}",
        )
    return path


def run(
    error: type[VmError],
    asked: str,
    argv: Sequence[str],
    *,
    data: bytes = b"",
    cwd: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> bytes:
    """Run a program to its end.

    Args:
        error: what is raised if it fails.
        asked: what it does, in words.
        argv: the command line; a program without a slash is looked up.
        data: its standard input.
        cwd: its working directory.
        environment: more variables for it.

    Returns:
        What it wrote to its standard output.

    Raises:
        ToolMissing: it is not installed.
        VmError: of the kind ``error``: it ended with another code than 0.
    """
    program = argv[0] if "/" in argv[0] else find(argv[0])
    done = subprocess.run(
        [program, *argv[1:]],
        input=data,
        capture_output=True,
        check=False,
        cwd=cwd,
        env={**os.environ, "PATH": _SYSTEM_PATH, "LC_ALL": "C.UTF-8", **(environment or {})},
    )
    if done.returncode != 0:
        said = (done.stderr or done.stdout).decode(errors="replace").splitlines()
        why = [line for line in said if line.startswith(("E:", "ERROR", "error"))] or said[-3:]
        raise error(asked, found=f"{argv[0]} ended with {done.returncode}: {' '.join(why)}")
    return done.stdout
