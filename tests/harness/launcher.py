"""Build the launcher of this checkout, as ``make`` does."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
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


def launcher_with(constants: Mapping[str, float], launcher: str, directory: str) -> str:
    """Copy a launcher of this checkout, and let its shim have other constants.

    A test that makes a wait endless sees by its end, without a clock, that nobody waited.

    Args:
        constants: values by module and name, as in ``{"shim.stdio.streams.DRAIN_SECONDS": 1}``.
        launcher: from :func:`make_launcher`.
        directory: a new directory for the copy.

    Returns:
        The path of the copy.
    """
    os.mkdir(directory, 0o700)
    path = os.path.join(directory, os.path.basename(launcher))
    shutil.copy2(launcher, path)
    lines = []
    for place, value in constants.items():
        module, _, name = place.rpartition(".")
        lines += [f"import {module}", f"{module}.{name}  # it exists", f"{place} = {value!r}"]
    with open(f"{launcher}.py", encoding="utf-8") as file:
        before, main, after = file.read().partition("from shim.__main__ import main\n")
    with open(f"{path}.py", "w", encoding="utf-8") as file:
        file.write("\n".join([before, *lines, main + after]))
    os.chmod(f"{path}.py", 0o755)
    return path
