"""The results of a run as values, and as its two files: Markdown and JSON.

A check has one of three outcomes. "Not possible" is neither a failure nor a success: this machine
cannot show it (only one GPU, no cgroups, a simulated node), and the reason says so. A run has
passed if at least one check passed and none failed.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any, Final

from api.errors import NvshimError
from tools.errors import CheckFailed, CheckNotPossible

MARKDOWN: Final = "report.md"
JSON: Final = "report.json"

_LONGEST: Final = 4000


class Outcome(Enum):
    """The outcome of a check."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_POSSIBLE = "not possible"


@dataclass(frozen=True, slots=True)
class Check:
    """One check."""

    name: str  # the statement that it checks
    outcome: Outcome  # whether the statement is true
    seen: str  # what was seen, or the reason; one line
    seconds: float  # the duration
    trace: str = ""  # our code's location of an unexpected error; "" for expected ones


@dataclass(slots=True)
class Report:
    """All results of a run."""

    title: str  # the title of the report
    say: Callable[[str], None]  # called with one line after each check
    deadline: float  # on the monotonic clock; later checks are skipped
    checks: list[Check] = field(default_factory=list)  # in the order in which they ran
    # tables of names and values, by their title
    facts: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)  # measurements for the JSON file, by name

    def check(self, name: str, look: Callable[[], str]) -> bool:
        """Run a check, and record its outcome.

        Args:
            name: the statement that it checks.
            look: returns what it saw, or raises :class:`CheckFailed`,
                :class:`CheckNotPossible`, or any other error.
        """
        began = time.monotonic()
        trace = ""
        if began > self.deadline:
            outcome, seen = Outcome.NOT_POSSIBLE, "the time limit of the run was reached"
        else:
            try:
                seen, outcome = look(), Outcome.PASSED
            except CheckNotPossible as error:
                outcome, seen = Outcome.NOT_POSSIBLE, error.found
            except CheckFailed as error:
                outcome, seen = Outcome.FAILED, error.found
            except (NvshimError, OSError) as error:
                outcome, seen = Outcome.FAILED, str(error)
            except Exception as error:  # noqa: BLE001 - continue with the other checks
                outcome, seen, trace = Outcome.FAILED, repr(error), traceback.format_exc()
        self.add(Check(name, outcome, in_one_line(seen), time.monotonic() - began, trace))
        return outcome is Outcome.PASSED

    def add(self, check: Check) -> None:
        """Record a finished check, and print it."""
        self.checks.append(check)
        self.say(f"{check.outcome.value:>12}  {check.name}: {check.seen}")

    def tell(self, title: str, rows: Iterable[tuple[str, str]]) -> None:
        """Add rows to a table of facts."""
        self.facts.setdefault(title, []).extend((name, in_one_line(value)) for name, value in rows)

    @property
    def passed(self) -> bool:
        """Whether at least one check passed and none failed."""
        outcomes = {check.outcome for check in self.checks}
        return Outcome.PASSED in outcomes and Outcome.FAILED not in outcomes

    @property
    def summary(self) -> str:
        """Return the counts, in one line."""
        counts = (
            f"{sum(c.outcome is outcome for c in self.checks)} {outcome.value}"
            for outcome in Outcome
        )
        return ", ".join(counts)

    def markdown(self) -> str:
        """Return the report as Markdown."""
        lines = [f"# {self.title}", "", f"{self.summary}.", ""]
        lines += _table(
            ("check", "outcome", "seen", "seconds"),
            ((c.name, c.outcome.value, c.seen, f"{c.seconds:.1f}") for c in self.checks),
        )
        for title, rows in self.facts.items():
            lines += ["", f"## {title}", "", *_table(("", ""), rows)]
        for check in self.checks:
            if check.trace:
                lines += ["", f"## {check.name}", "", "```", check.trace.rstrip(), "```"]
        return "\n".join(lines) + "\n"

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {
            "title": self.title,
            "passed": self.passed,
            "checks": [{**asdict(c), "outcome": c.outcome.value} for c in self.checks],
            "facts": {title: [list(row) for row in rows] for title, rows in self.facts.items()},
            "values": self.values,
        }

    def write(self, directory: str) -> None:
        """Write both files.

        Args:
            directory: where; created if missing.
        """
        os.makedirs(directory, exist_ok=True)
        with open(os.path.join(directory, MARKDOWN), "w", encoding="utf-8") as file:
            file.write(self.markdown())
        with open(os.path.join(directory, JSON), "w", encoding="utf-8") as file:
            json.dump(self.as_json(), file, indent=1)


def in_one_line(text: str) -> str:
    """Return printable text without line breaks, cut to a readable length."""
    words = "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))
    return words if len(words) <= _LONGEST else words[: _LONGEST - 1] + "…"


def ended(error: Exception) -> Check:
    """Return a failed check for a run that was aborted."""
    trace = "".join(traceback.format_exception(error))
    return Check(
        "the run completes",
        Outcome.FAILED,
        in_one_line(f"{type(error).__name__}: {error}"),
        0.0,
        trace,
    )


def failed(found: str) -> CheckFailed:
    """Return the error of a check that found a fault."""
    return CheckFailed("a check", found=found)


def not_possible(found: str) -> CheckNotPossible:
    """Return the error of a check that is not possible on this machine."""
    return CheckNotPossible("a check", found=found)


def _table(head: tuple[str, ...], rows: Iterable[Iterable[str]]) -> list[str]:
    lines = [_row(head), "|" + " --- |" * len(head)]
    return lines + [_row(row) for row in rows]


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
