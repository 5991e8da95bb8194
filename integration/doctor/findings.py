"""What a check is, and what it says."""

from __future__ import annotations

import functools
import os
import tomllib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Final, TypeAlias

from api.errors import one_line
from integration.doctor.facts import Node, Unseen

if TYPE_CHECKING:
    Told: TypeAlias = "str | Trouble | Unseen"
    """What a check yields; a text is a :class:`Trouble` of which its row says the rest."""
    Look = Callable[..., Iterable[Told]]

TABLE: Final = os.path.join(os.path.dirname(__file__), "checks", "checks.toml")
"""What checks say, by their codes."""

_MOST_LISTED: Final = 6


class Severity(StrEnum):
    """How bad it is; the order is that of the report."""

    ERROR = "error"
    """Containers do not get their GPUs, or get what they must not, now."""
    WARNING = "warning"
    """It will hurt: after a reload, a boot or an update, or when somebody tries."""
    NOTE = "note"
    """Worth knowing."""


ERROR, WARNING, NOTE = Severity


@dataclass(frozen=True, slots=True)
class Trouble:
    """What a check has found."""

    found: str  # what is there, with its names and numbers
    remedy: str = ""  # what to do, where it is not what the check's row says
    command: str = ""  # what to type, where it is not what the check's row says
    severity: Severity | None = None  # where it is not that of the check's row
    line: str = ""  # all that a person needs at first, in place of the other texts; "" for these


@dataclass(frozen=True, slots=True)
class Check:
    """A row of the table: a pure function of facts, with what it stands for."""

    code: str  # stable, and never given to another check
    severity: Severity  # of what it finds, unless a finding says otherwise
    title: str  # what is wrong, in some words
    why: str  # what comes of it
    remedy: str  # what to do about it
    command: str  # what to type, if the remedy is a command
    reference: str  # where to read more
    # finds it. Its parameters are named after the facts that it needs
    # (integration.doctor.facts.Node).
    look: Look

    @property
    def needs(self) -> tuple[str, ...]:
        """The facts that it is a function of."""
        return tuple(signature(self.look).parameters)

    def findings(self, node: Node) -> Iterator[Finding]:
        """What it says of a node: nothing, if the node does not have what it is about.

        What the node may also lack has a default in the function.
        """
        facts = {name: getattr(node, name) for name in self.needs}
        there = {name: fact for name, fact in facts.items() if fact is not None}
        parameters = signature(self.look).parameters.values()
        told: Iterable[Told] = ()
        if unseen := [fact for fact in facts.values() if isinstance(fact, Unseen)]:
            told = unseen[:1]
        elif all(each.name in there for each in parameters if each.default is each.empty):
            told = self.look(**there)
        for each in told:
            yield Finding.of(self, each)


def check(code: str) -> Callable[[Look], Check]:
    """Make a function the :class:`Check` of a code, whose texts are in :data:`TABLE`."""
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
    """What is told."""

    code: str  # of the check
    severity: Severity  # how bad it is
    title: str  # what is wrong, in some words
    found: str  # what is there
    remedy: str  # what to do
    command: str = ""  # what to type; "" if no command does it
    reference: str = ""  # where to read more; "" for nowhere
    unseen: bool = False  # whether the check could not look
    line: str = ""  # all of it in one line, where that is enough at first; "" for what has none

    @classmethod
    def of(cls, check: Check, told: Told) -> Finding:
        """What a check has found, or that it could not look, in one line for each part."""
        trouble = Trouble(told) if isinstance(told, str) else told
        if isinstance(trouble, Unseen):
            return cls(
                code=check.code,
                severity=NOTE,
                title=check.title,
                found=one_line(f"could not look: {trouble.why}"),
                remedy="run it as root on the node itself; what it says is the reason",
                reference=check.reference,
                unseen=True,
            )
        return cls(
            code=check.code,
            severity=trouble.severity or check.severity,
            title=check.title,
            found=one_line(trouble.found),
            remedy=one_line(trouble.remedy or check.remedy),
            # A remedy of its own takes the row's command away: they would not fit together.
            command=one_line(trouble.command or ("" if trouble.remedy else check.command)),
            reference=check.reference,
            line=one_line(trouble.line),
        )


def listed(names: Iterable[object]) -> str:
    """Some of many names, in words.

    Args:
        names: texts, in the order in which they are told.
    """
    texts = [str(name) for name in names]
    more = f" and {len(texts) - _MOST_LISTED} more" if len(texts) > _MOST_LISTED else ""
    return ", ".join(texts[:_MOST_LISTED]) + more
