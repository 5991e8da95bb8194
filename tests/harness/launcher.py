"""Build the launcher of this checkout, as ``make`` does."""

from __future__ import annotations

import os
import subprocess
from typing import Final

REPOSITORY: Final = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

# As on a node: the system's interpreter, without any development tools.
INTERPRETER: Final = "/usr/bin/python3"
SITE: Final = os.path.join(REPOSITORY, ".cache", "site")


def make_launcher(directory: str) -> str:
    """Write the launcher into a directory, and return its path.

    Args:
        directory: created if missing.

    Raises:
        FileNotFoundError: the modules that the shim imports are not set up.
    """
    if not os.path.isdir(SITE):
        raise FileNotFoundError(f"{SITE} is missing: run `make setup`")
    os.makedirs(directory, exist_ok=True)
    path = os.path.join(directory, "containerd-shim-nvidia-v1")
    argv = [
        INTERPRETER, "-m", "tools.launcher", path,
        "--interpreter", INTERPRETER, "--library", REPOSITORY, "--library", SITE,
        "--compiler", "gcc",
    ]  # fmt: skip
    subprocess.run(argv, cwd=REPOSITORY, check=True)
    return path
