"""``python -m tests.minimums [TESTS]…``: run unit tests with the oldest and newest dependencies.

One run has exactly the declared minimum of each package that the product imports, the other the
newest release that pyproject.toml allows. Everything else is pinned, as in the development
environment. Each run has its own virtual environment, which is removed afterwards.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Iterable
from typing import Final

from tests.harness.launcher import REPOSITORY

_DECLARED: Final = re.compile(r"([a-z0-9-]+)>=([0-9.]+)(?:,<[0-9.]+)?")
_PIP: Final = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")


def declared(project: str) -> list[str]:
    """Return the product's own requirements, as written in pyproject.toml.

    Args:
        project: the text of pyproject.toml.
    """
    table = tomllib.loads(project)["project"]
    optional = table["optional-dependencies"]
    return [*table["dependencies"], *optional["cli"], *optional["node"]]


def least(requirements: Iterable[str]) -> list[str]:
    """Pin each requirement to its declared minimum.

    Raises:
        ValueError: a requirement has no minimum, or is no plain range.
    """
    found = []
    for requirement in requirements:
        parts = _DECLARED.fullmatch(requirement)
        if parts is None:
            raise ValueError(f"{requirement}: write NAME>=VERSION or NAME>=VERSION,<VERSION")
        found.append(f"{parts[1]}=={parts[2]}")
    return found


def _run(packages: Iterable[str], tests: Iterable[str]) -> int:
    """Run the tests with these packages; return pytest's exit code."""
    with tempfile.TemporaryDirectory(prefix="nvshim-minimums-") as directory:
        venv.create(directory, with_pip=True)
        python = os.path.join(directory, "bin", "python")
        pinned = ("--require-hashes", "-r", "requirements/dev.txt")
        for wanted in (pinned, ("--upgrade", *packages)):
            subprocess.run([python, *_PIP, *wanted], cwd=REPOSITORY, check=True)
        argv = [python, "-m", "pytest", "-n", str(os.cpu_count()), "--dist", "loadfile"]
        marks = ("-m", "not serial and not newest and not thorough")
        return subprocess.run([*argv, *marks, *tests], cwd=REPOSITORY, check=False).returncode


def main() -> int:
    """Run both, and print the versions of each."""
    parser = argparse.ArgumentParser(prog="python -m tests.minimums", description=__doc__)
    parser.add_argument("tests", nargs="*", default=["tests/unit"], metavar="TESTS")
    tests = parser.parse_args().tests
    with open(os.path.join(REPOSITORY, "pyproject.toml"), encoding="utf-8") as file:
        requirements = declared(file.read())
    codes = []
    for packages in (least(requirements), requirements):
        sys.stdout.write(f"--- with {' '.join(packages)}\n")
        sys.stdout.flush()
        codes.append(_run(packages, tests))
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
