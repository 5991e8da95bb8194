"""``python -m tests.anywhere``: run circumstances, save the results, print a table.

The output of each run is printed and saved in ``.cache/anywhere/NAME.log``. Without ``--only``,
rows that passed at this commit do not run again, so an interrupted run can be resumed. The exit
status is 0 if every row in the table passed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from typing import Final, TextIO

from tests.anywhere import KEPT
from tests.anywhere.circumstances import CIRCUMSTANCES, Circumstance, together
from tools import REPOSITORY

_RESULTS: Final = os.path.join(KEPT, "results.json")

# The last line of each run of pytest: "==== 8372 passed, 5 skipped in 508.10s (0:08:28) ====".
_CLOSING: Final = re.compile(r"^(?:=+ )?((?:\d+ [a-z]+(?:, )?)+) in \d+\.\d+s\b")
_FAILED: Final = ("failed", "error", "errors")


@dataclass(frozen=True, slots=True)
class Result:
    """How a run ended."""

    name: str  # of the circumstance
    commit: str  # what ran; "" for files that are in no commit
    asked: str  # paths of tests that ran instead of the row's; "" for the row's own
    passed: int  # tests
    failed: int  # tests that failed, or left something behind
    skipped: int  # tests that do not apply there
    code: int  # the exit status of the command
    seconds: float  # how long it took

    @property
    def is_good(self) -> bool:
        """Whether at least one test ran and all passed."""
        return not self.code and not self.failed and self.passed > 0


def is_done(known: Result, commit: str) -> bool:
    """Whether all tests of a row have passed at a commit."""
    return known.is_good and not known.asked and known.commit == commit != ""


def count(lines: list[str]) -> dict[str, int]:
    """Return the sums of the counts in pytest's closing lines."""
    counts: dict[str, int] = {}
    for line in lines:
        match = _CLOSING.match(line)
        for each in match[1].split(", ") if match else ():
            number, word = each.split()
            counts[word] = counts.get(word, 0) + int(number)
    return counts


def table(results: list[Result]) -> str:
    """Return the table that is printed at the end."""
    counts = f"{'passed':>7} {'failed':>7} {'skipped':>8} {'time':>7}"
    rows = [f"{'circumstance':12} {counts}  {'result':10} tests"]
    for result in results:
        row = together(result.name)
        outcome = "passed" if result.is_good else f"failed ({result.code})"
        part = result.asked or (f"a part: {row.why}" if row.why else "all")
        rows.append(
            f"{result.name:12} {result.passed:7} {result.failed:7} {result.skipped:8}"
            f" {result.seconds:5.0f} s  {outcome:10} {part}"
        )
    return "\n".join(rows)


def _run(row: Circumstance, more: tuple[str, ...], commit: str) -> Result:
    _print(f"--- {row.name}: {row.what}")
    started = time.monotonic()
    lines: list[str] = []
    code = 0
    if row.needs:
        code = subprocess.run(["make", *row.needs.split()], cwd=REPOSITORY, check=False).returncode
    # A short path, because sockets are created below it.
    with (
        tempfile.TemporaryDirectory(prefix="any-") as directory,
        open(os.path.join(KEPT, f"{row.name}.log"), "w", encoding="utf-8") as log,
    ):
        os.chmod(directory, 0o711)
        if code == 0:
            code = _show(row.command(directory, more), log, lines)
    counts = count(lines)
    return Result(
        row.name, commit, " ".join(more), counts.get("passed", 0),
        sum(counts.get(word, 0) for word in _FAILED), counts.get("skipped", 0), code,
        time.monotonic() - started,
    )  # fmt: skip


def _show(argv: list[str], log: TextIO, lines: list[str]) -> int:
    """Run a command; print, save and collect its output."""
    with subprocess.Popen(
        argv, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace",
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            log.write(line)
            lines.append(line)
            sys.stdout.write(line)
            sys.stdout.flush()
    return process.returncode


def _commit() -> str:
    """Return the commit of the checkout; "" if there are uncommitted changes."""
    changed = ["git", "status", "--porcelain"]
    if subprocess.run(changed, cwd=REPOSITORY, capture_output=True, check=True).stdout:
        return ""
    head = ["git", "rev-parse", "HEAD"]
    done = subprocess.run(head, cwd=REPOSITORY, capture_output=True, check=True, text=True)
    return done.stdout.strip()


def _earlier() -> dict[str, Result]:
    # Results of another version of this program are dropped.
    with (
        contextlib.suppress(FileNotFoundError, TypeError, ValueError),
        open(_RESULTS, encoding="utf-8") as file,
    ):
        return {each["name"]: Result(**each) for each in json.load(file)}
    return {}


def _keep(result: Result) -> None:
    results = {**_earlier(), result.name: result}
    with open(f"{_RESULTS}.new", "w", encoding="utf-8") as file:
        json.dump([asdict(each) for each in results.values()], file, indent=2)
    os.replace(f"{_RESULTS}.new", _RESULTS)


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _rows(text: str) -> list[Circumstance]:
    try:
        return [together(names) for names in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def main(words: list[str] | None = None) -> int:
    """Run the circumstances, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.anywhere", description=__doc__)
    parser.add_argument(
        "--only", type=_rows, metavar="NAME,NAME+NAME,…",
        help="some, or several at once (+), of: " + ", ".join(row.name for row in CIRCUMSTANCES),
    )  # fmt: skip
    parser.add_argument("tests", nargs="*", help="paths of tests to run instead of the table's")
    options = parser.parse_args(words)
    os.makedirs(KEPT, exist_ok=True)
    commit, earlier, results = _commit(), _earlier(), []
    for row in options.only or CIRCUMSTANCES:
        known = earlier.get(row.name)
        if not options.only and known is not None and is_done(known, commit):
            _print(f"--- {row.name}: passed at this commit before")
            results.append(known)
            continue
        results.append(_run(row, tuple(options.tests), commit))
        _keep(results[-1])
    _print(f"\n{table(results)}")
    return 0 if all(result.is_good for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
