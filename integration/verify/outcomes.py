"""How a check ends: it passed, something was not as expected, or it could not be made here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from api.errors import one_line

# As much of an engine's random id as tells it from others.
_SHORT: Final = 12
_LONG_ID: Final = re.compile(r"\b[0-9a-f]{32,}\b")


class Outcome(StrEnum):
    """How a check ended."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


class NotAsExpected(Exception):
    """A check has failed.

    Args:
        expected: what should have been.
        seen: what was.
        do: what to do about it.
    """

    def __init__(self, expected: str, *, seen: str, do: str) -> None:
        super().__init__(expected, seen, do)
        self.expected = one_line(expected)
        self.seen = _LONG_ID.sub(lambda found: found[0][:_SHORT], one_line(seen))
        self.do = one_line(do)


class NotMade(Exception):
    """A check cannot be made on this node, which is no fault of the node's.

    Args:
        why: in some words.
    """

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = one_line(why)


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of a check."""

    name: str  # of the check
    title: str  # what it checks, in some words
    outcome: Outcome
    told: str = ""  # what was seen if it passed, why if it was skipped
    expected: str = ""
    seen: str = ""
    do: str = ""
    seconds: float = 0.0  # that it took
