"""Outcomes of a check: passed, failed, or skipped because it cannot run here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from api.errors import one_line

# A container id is cut to the length that engines show.
_SHORT: Final = 12
_LONG_ID: Final = re.compile(r"\b[0-9a-f]{32,}\b")


class Outcome(StrEnum):
    """How a check ended."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


class CheckFailed(Exception):
    """Raised by a check that failed.

    Args:
        expected: the expected behaviour, as a sentence.
        seen: what was found instead.
        do: the remedy.
    """

    def __init__(self, expected: str, *, seen: str, do: str) -> None:
        super().__init__(expected, seen, do)
        self.expected = one_line(expected)
        self.seen = _LONG_ID.sub(lambda found: found[0][:_SHORT], one_line(seen))
        self.do = one_line(do)


class CheckSkipped(Exception):
    """Raised by a check that cannot run on this node, without a fault of the node.

    Args:
        why: the reason, in a few words.
    """

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = one_line(why)


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a check; its fields are the keys of the JSON report."""

    name: str
    title: str  # what it checks, in a few words
    outcome: Outcome
    told: str = ""  # passed: what was found; skipped: the reason
    expected: str = ""
    seen: str = ""
    do: str = ""
    seconds: float = 0.0
