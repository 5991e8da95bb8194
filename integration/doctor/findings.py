"""The types of a check and of its findings."""

from __future__ import annotations

import functools
import os
import tomllib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from inspect import signature
from typing import Final, TypeAlias

from api.errors import one_line
from integration.doctor.facts import Node, Unseen

CheckResult: TypeAlias = "str | Trouble | Unseen"
"""What a check yields; a text is a :class:`Trouble` that uses the row's remedy."""
CheckFunction = Callable[..., Iterable[CheckResult]]

TABLE: Final = os.path.join(os.path.dirname(__file__), "checks", "checks.toml")
"""The texts of the checks, by code."""

_MOST_LISTED: Final = 6


class Severity(StrEnum):
    """The severity of a finding, in the order of the report."""

    ERROR = "error"
    """Containers do not get their GPUs now, or get devices that they must not have."""
    WARNING = "warning"
    """Trouble later: after a reload, a reboot or an update, or when the function is used."""
    NOTE = "note"
    """Worth knowing."""


ERROR, WARNING, NOTE = Severity


@dataclass(frozen=True, slots=True)
class Trouble:
    """A problem that a check found; empty fields use the check's row."""

    found: str  # what was found, with names and numbers
    remedy: str = ""  # what to do
    command: str = ""  # the command to type
    severity: Severity | None = None
    line: str = ""  # a short form that replaces the other texts in the default report


@dataclass(frozen=True, slots=True)
class Check:
    """A row of the table: a pure function of facts, with its texts."""

    code: str  # stable, and never reused
    severity: Severity  # of its findings, unless a finding sets another
    title: str  # the fault, in a few words
    why: str  # the effect
    remedy: str  # what to do about it
    command: str  # the command to type, if the remedy is one
    reference: str  # where to read more
    # finds the fault. Its parameters name the facts that it needs
    # (integration.doctor.facts.Node).
    run: CheckFunction

    @property
    def needs(self) -> tuple[str, ...]:
        """The facts that the function needs."""
        return tuple(signature(self.run).parameters)

    def findings(self, node: Node) -> Iterator[Finding]:
        """Run the check on a node's facts.

        The check does not run if the node lacks one of its facts; parameters with a default are
        optional facts.
        """
        facts = {name: getattr(node, name) for name in self.needs}
        present = {name: fact for name, fact in facts.items() if fact is not None}
        parameters = signature(self.run).parameters.values()
        results: Iterable[CheckResult] = ()
        if unseen := [fact for fact in facts.values() if isinstance(fact, Unseen)]:
            results = unseen[:1]
        elif all(each.name in present for each in parameters if each.default is each.empty):
            results = self.run(**present)
        for each in results:
            yield Finding.of(self, each)


def check(code: str) -> Callable[[CheckFunction], Check]:
    """Turn a function into the :class:`Check` with this code and its texts of :data:`TABLE`."""
    row = _rows()[code]
    return partial(
        Check, f"NVSHIM-{code}", Severity(row["severity"]), row["title"], row["why"],
        row["remedy"], row.get("command", ""), row.get("reference", ""),
    )  # fmt: skip


@functools.cache
def _rows() -> dict[str, dict[str, str]]:
    with open(TABLE, "rb") as file:
        return tomllib.load(file)


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding of the report; its fields are the keys of the JSON document."""

    code: str
    severity: Severity
    title: str  # the fault, in a few words
    found: str
    remedy: str  # what to do
    command: str = ""  # the command to type, if any
    reference: str = ""  # a page to read, if any
    unseen: bool = False  # whether the check could not run because a fact is missing
    line: str = ""  # a short form for the default report, if any

    @classmethod
    def of(cls, check: Check, result: CheckResult) -> Finding:
        """Make a finding from what a check yielded; each text becomes one line."""
        trouble = Trouble(result) if isinstance(result, str) else result
        if isinstance(trouble, Unseen):
            return cls(
                code=check.code,
                severity=NOTE,
                title=check.title,
                found=one_line(f"could not look: {trouble.why}"),
                remedy="run nvshim doctor as root on the node itself, or fix the cause above",
                reference=check.reference,
                unseen=True,
            )
        return cls(
            code=check.code,
            severity=trouble.severity or check.severity,
            title=check.title,
            found=one_line(trouble.found),
            remedy=one_line(trouble.remedy or check.remedy),
            # The row's command belongs to the row's remedy.
            command=one_line(trouble.command or ("" if trouble.remedy else check.command)),
            reference=check.reference,
            line=one_line(trouble.line),
        )


def listed(names: Iterable[object]) -> str:
    """Join names with commas; after the first six write how many more there are."""
    texts = [str(name) for name in names]
    more = f" and {len(texts) - _MOST_LISTED} more" if len(texts) > _MOST_LISTED else ""
    return ", ".join(texts[:_MOST_LISTED]) + more
