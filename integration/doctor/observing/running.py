"""Run the node's programs and read its files."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from typing import Final

from api.errors import one_line
from integration.doctor.facts import CouldNotLook, ProgramFailed
from integration.doctor.places import Places
from integration.driver_programs import run_for
from integration.files import read_some

SYSTEM_PATH: Final = (
    "/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin",
)  # fmt: skip

_TIMEOUT: Final = 10.0
_MOST_BYTES: Final = 8 << 20
# The exit statuses of chroot(1) if it could not run the program: env(1), "exit status".
_NOT_RUN: Final = frozenset({126, 127})


def read_file(path: str, most: int = _MOST_BYTES) -> str:
    """Return a file's text; invalid bytes are replaced.

    Args:
        path: the path for this process.
        most: the maximum number of bytes to read.
    """
    return read_some(path, most).decode(errors="replace")


def find_program(places: Places, name: str, directories: Sequence[str] = SYSTEM_PATH) -> str:
    """Find a program of the node.

    Args:
        places: the node's paths.
        name: a name, or an absolute path.
        directories: the directories to search for a name.

    Returns:
        The program's path on the node; "" if no executable was found.
    """
    candidates = [name] if "/" in name else [os.path.join(d, name) for d in directories]
    for candidate in candidates:
        here = places.at(candidate)
        if os.path.isfile(here) and os.access(here, os.X_OK):
            return candidate
    return ""


def run(
    places: Places, argv: Sequence[str], *, timeout: float = _TIMEOUT, in_root: bool = False
) -> str:
    """Run a program of the node and return its stdout.

    Args:
        places: the node's paths.
        argv: the program's path on the node, and its arguments, with paths on the node.
        timeout: the time limit in seconds.
        in_root: run only in the node's root, because the program opens files that its arguments
            do not name.

    Raises:
        ProgramFailed: the program failed; the text has the last line of its output.
        CouldNotLook: the program could not be run, or took too long.
    """
    name = os.path.basename(argv[0])
    done = None
    if places.is_below and os.geteuid() == 0 and (chroot := shutil.which("chroot", path=_OURS)):
        done = _run([chroot, places.root, *argv], name, timeout)
    # If it cannot run in the root, it may still run with our libraries.
    if done is None or done.returncode in _NOT_RUN:
        if in_root and places.is_below:
            raise CouldNotLook(f"{name} cannot be run within {places.root}")
        here = places.at(argv[0])
        done = _run([here, *(_here(places, word) for word in argv[1:])], name, timeout)
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        said = one_line(lines[-1]) if lines else "no error message"
        raise ProgramFailed(f"{name} exited with {done.returncode}: {said}")
    return done.stdout[:_MOST_BYTES].decode(errors="replace")


_OURS: Final = ":".join(SYSTEM_PATH)


def _here(places: Places, word: str) -> str:
    return places.at(word) if places.is_below and word.startswith("/") else word


def _run(argv: list[str], name: str, timeout: float) -> subprocess.CompletedProcess[bytes]:
    try:
        env = {"PATH": _OURS, "LANG": "C.UTF-8", "HOME": "/root"}
        return run_for(argv, timeout, env=env)
    except subprocess.TimeoutExpired:
        raise CouldNotLook(f"{name} took longer than {timeout:g} s") from None
    except OSError as error:
        raise CouldNotLook(f"{name} cannot be run: {error.strerror}") from error
