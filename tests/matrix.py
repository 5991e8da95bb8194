"""``python -m tests.matrix``: the end-to-end tests on other containerds, runcs and cruns.

The shim comes from the self-contained tree, with its own Python, as on a node; `make test` uses the
one of the checkout.

Every containerd runs all of the tests with the runc of its own release, and again with its crun.
With the runc of each other release it runs the tests that depend on the low-level runtime. The
tests that `make test` skips because they need Debian unstable run first. The table at the end also
names the parts that were unavailable; the exit code is 0 if everything ran and passed. The results
are kept in tests/support.json, from which docs/support.md is generated.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final
from xml.etree import ElementTree as ET

import pytest

from integration.simulated.errors import PackagesError
from tests.harness.launcher import REPOSITORY
from tests.harness.releases import UNSTABLE
from tools.errors import ProgramNotAdapted
from tools.parts import INSTALLED, Parts

# Debian 12's (installed), Debian 13's, and those that will be in 14.
CONTAINERDS: Final = (INSTALLED, "trixie", UNSTABLE)

RECORD: Final = os.path.join(REPOSITORY, "tests", "support.json")
"""The file with the last result of each run, by name."""

# The tests for a containerd with another release's runc: the shim talks to both, and they do not
# talk to each other, so nothing else can differ.
_LOW_LEVEL_TESTS: Final = tuple(
    f"tests/e2e/test_{name}.py"
    for name in ("crash", "errors", "gpu", "lifecycle", "options", "task_service")
)
_ALL_TESTS: Final = ("tests/e2e",)
# Tests marked "newest" have their own run; the others run in parallel where possible.
_PARTS_OF_RUN: Final = (
    ("-n", os.environ.get("WORKERS", "3"), "--dist", "loadfile", "-m", "not newest and not serial"),
    ("-m", "serial and not newest"),
)


@dataclass(frozen=True, slots=True)
class Run:
    """One run of tests."""

    parts: str  # as NVSHIM_TEST_PARTS names them
    low_level: str  # runc or crun
    tests: tuple[str, ...] = _ALL_TESTS  # the paths of the tests
    needs: str = ""  # another release whose programs this run needs

    @property
    def name(self) -> str:
        """Return the name of the run on the command line."""
        return f"{self.parts}/{self.low_level}" if not self.needs else "newest"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a run."""

    passed: int  # how many tests passed
    failed: int  # how many failed, or left something behind
    skipped: int  # how many were skipped
    seconds: float  # how long it took
    missing: str = ""  # what was unavailable, so that nothing ran

    @property
    def is_good(self) -> bool:
        """Return whether it ran, and everything passed."""
        return not self.failed and not self.missing


def runs() -> list[Run]:
    """Return all runs: marked tests, each containerd with its own runtimes, then other runcs."""
    marked = Run(INSTALLED, "runc", ("tests",), needs=UNSTABLE)
    own = [Run(name, low_level) for name in CONTAINERDS for low_level in ("runc", "crun")]
    others = [
        Run(f"{name}+{other}", "runc", _LOW_LEVEL_TESTS)
        for name in CONTAINERDS
        for other in CONTAINERDS
        if other != name
    ]
    return [marked, *own, *others]


def read_outcome(path: str, seconds: float) -> Outcome:
    """Read what pytest wrote.

    Args:
        path: the file of ``--junitxml``; if it is missing, pytest itself failed.
        seconds: how long it took.
    """
    try:
        suite = ET.parse(path).getroot().find("testsuite")
    except (FileNotFoundError, ET.ParseError):
        suite = None
    if suite is None:
        return Outcome(0, 1, 0, seconds)
    tests, failures, errors, skipped = (
        int(suite.attrib[key]) for key in ("tests", "failures", "errors", "skipped")
    )
    # A test that passed and left something behind is counted as both.
    return Outcome(max(0, tests - failures - errors - skipped), failures + errors, skipped, seconds)


def describe(run: Run) -> str:
    """Return the versions that a run uses.

    Raises:
        PackagesError: the packages of a release are unavailable.
        ProgramNotAdapted: a program cannot be made to run here.
    """
    if run.needs:
        Parts.named(run.needs, say=_print)
    containerd, _, low_level = run.parts.partition("+")
    parts = Parts.named(containerd, say=_print)
    if low_level:
        parts = parts.with_low_level_of(Parts.named(low_level, say=_print))
    program = parts.crun if run.low_level == "crun" else parts.runc
    return f"{_version(parts.containerd)}, {_version(program)}"


def _version(program: str) -> str:
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    match = re.search(r"\d+\.\d+(\.\d+)?", said)
    return f"{os.path.basename(program)} {match[0] if match else 'unknown'}"


def _perform(run: Run, directory: str, more: list[str]) -> Outcome:
    parts = (("-m", "newest"),) if run.needs else _PARTS_OF_RUN
    outcomes = [_perform_part(run, words, directory, more) for words in parts]
    return Outcome(
        passed=sum(outcome.passed for outcome in outcomes),
        failed=sum(outcome.failed for outcome in outcomes),
        skipped=sum(outcome.skipped for outcome in outcomes),
        seconds=sum(outcome.seconds for outcome in outcomes),
    )


def _perform_part(run: Run, words: Sequence[str], directory: str, more: list[str]) -> Outcome:
    path = os.path.join(directory, f"{run.name.replace('/', '-')}.xml")
    if os.path.exists(path):
        os.unlink(path)
    argv = [sys.executable, "-m", "pytest", "-q", "--junitxml", path, *run.tests, *words, *more]
    environment = {
        "NVSHIM_TEST_PARTS": run.parts,
        "NVSHIM_TEST_LOW_LEVEL": run.low_level,
        "NVSHIM_TEST_SHIM": "tree",
    }
    began = time.monotonic()
    code = subprocess.run(
        argv, cwd=REPOSITORY, env={**os.environ, **environment}, check=False
    ).returncode
    outcome = read_outcome(path, time.monotonic() - began)
    # In some runs, no test has to run alone.
    nothing = code == pytest.ExitCode.NO_TESTS_COLLECTED and "serial and" in words[-1]
    if code and not outcome.failed and not nothing:  # interrupted
        return replace(outcome, failed=1)
    return outcome


def record(run: Run, versions: str, outcome: Outcome, path: str = RECORD) -> None:
    """Store the result of a run; replace that of an earlier one.

    Args:
        run: the run.
        versions: the versions that it used, from :func:`describe`.
        outcome: its result.
        path: the path of the file.
    """
    with open(path, encoding="utf-8") as file:
        known = json.load(file)
    containerd, low_level = versions.split(", ")
    known[run.name] = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "containerd": containerd,
        "low_level": low_level,
        "passed": outcome.passed,
        "failed": outcome.failed,
        "skipped": outcome.skipped,
    }
    with open(f"{path}.new", "w", encoding="utf-8") as file:
        json.dump(known, file, indent=2, sort_keys=True)
        file.write("\n")
    os.replace(f"{path}.new", path)


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    """Run the chosen runs, and print the table."""
    names = [run.name for run in runs()]
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__)
    parser.add_argument(
        "--only", action="append", metavar="PARTS/LOW_LEVEL", choices=names,
        help="one of: " + ", ".join(names),
    )  # fmt: skip
    parser.add_argument("more", nargs="*", help="further words for pytest, after --")
    asked = parser.parse_args()
    directory = os.path.join(REPOSITORY, ".cache", "matrix")
    os.makedirs(directory, exist_ok=True)
    table = []
    for run in runs():
        if not asked.only or run.name in asked.only:
            try:
                versions = describe(run)
            except (PackagesError, ProgramNotAdapted) as error:
                _print(f"--- {run.name}: not run: {error}")
                table.append((run, "", Outcome(0, 0, 0, 0.0, missing=error.found)))
                continue
            _print(f"--- {run.name}: {versions}")
            outcome = _perform(run, directory, asked.more)
            table.append((run, versions, outcome))
            if not asked.more:
                record(run, versions, outcome)
    _print(f"\n{'parts':24} {'versions':36} {'passed':>7} {'failed':>7} {'skipped':>8} {'time':>7}")
    for run, versions, outcome in table:
        if outcome.missing:
            _print(f"{run.name:24} not run, unavailable: {outcome.missing}")
            continue
        _print(
            f"{run.name:24} {versions:36} {outcome.passed:7} {outcome.failed:7}"
            f" {outcome.skipped:8} {outcome.seconds:5.0f} s"
        )
    return 0 if all(outcome.is_good for _, _, outcome in table) else 1


if __name__ == "__main__":
    sys.exit(main())
