"""``python -m tests.more``: run all checks beyond ``make test`` in turn, and print a table.

Each check is a target of the Makefile, which sets up its needs and can run alone. The others run
even if one fails; the exit code is 0 if all of them passed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Final

from tests.harness.launcher import REPOSITORY

CHECKS: Final = {
    "thorough": "test-thorough",
    "minimums": "test-minimums",
    "examples": "test-examples",
    "matrix": "test-matrix",
    "vm": "test-vm",
    "hostile": "test-hostile",
    "fuzz": "fuzz",
    "chaos": "test-chaos",
    "soak": "soak",
    "packages": "packages",
    "release": "test-release",
    "anywhere": "test-anywhere",
}
"""The targets, by what a person calls the check."""


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a check."""

    name: str
    code: int  # the exit code of its target
    seconds: float  # how long it took


def table(results: list[Result]) -> str:
    """Format the table of checks, results and times."""
    rows = [f"{'check':10} {'target':16} {'result':12} {'time':>9}"]
    for result in results:
        outcome = "passed" if result.code == 0 else f"failed ({result.code})"
        rows.append(
            f"{result.name:10} {CHECKS[result.name]:16} {outcome:12} {_time(result.seconds):>9}"
        )
    return "\n".join(rows)


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def _run(name: str) -> Result:
    started = time.monotonic()
    # ONLY chooses among checks; a target with its own ONLY runs everything.
    argv = ["make", "--no-print-directory", "ONLY=", CHECKS[name]]
    code = subprocess.run(argv, cwd=REPOSITORY, env=os.environ, check=False).returncode
    return Result(name, code, time.monotonic() - started)


def _names(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in CHECKS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not among {', '.join(CHECKS)}")
    return [name for name in CHECKS if name in names]


def main(words: list[str] | None = None) -> int:
    """Run the checks, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.more", description=__doc__)
    parser.add_argument(
        "--only", type=_names, default=list(CHECKS), metavar="CHECK,…",
        help="some of: " + ", ".join(CHECKS),
    )  # fmt: skip
    results = []
    for name in parser.parse_args(words).only:
        sys.stdout.write(f"--- {name}: make {CHECKS[name]}\n")
        sys.stdout.flush()
        results.append(_run(name))
    sys.stdout.write(f"\n{table(results)}\n")
    return 1 if any(result.code for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
