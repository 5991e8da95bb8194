"""An examination: which checks, the facts they need, and what they say."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from hooks.errors import ConfigError
from integration.doctor.checks import CHECKS
from integration.doctor.errors import CheckUnknown
from integration.doctor.facts import Node
from integration.doctor.findings import Check, Finding, Severity
from integration.doctor.observing import observe
from integration.doctor.places import Places

_PREFIX: Final = "NVSHIM-"
_ORDER: Final = {severity: place for place, severity in enumerate(Severity)}


@dataclass(frozen=True, slots=True)
class Examination:
    """What was asked, seen and found."""

    checks: tuple[Check, ...]  # that were made, in their order
    node: Node  # the facts that they needed
    findings: tuple[Finding, ...]  # the worst first, then by code
    # codes of the checks that were left out, by the command or the configuration
    skipped: tuple[str, ...] = ()

    def count(self, severity: Severity) -> int:
        """How many findings are so bad."""
        return sum(finding.severity is severity for finding in self.findings)

    @property
    def is_healthy(self) -> bool:
        """Whether no error was found."""
        return self.count(Severity.ERROR) == 0


def choose(only: Sequence[str] = (), skip: Sequence[str] = ()) -> tuple[Check, ...]:
    """The checks that somebody asks for.

    Args:
        only: their codes, with or without NVSHIM-; all if empty.
        skip: codes of those that are left out.

    Returns:
        Rows of the table, in its order.

    Raises:
        CheckUnknown: there is no check with one of the codes.
    """
    known = {check.code for check in CHECKS}
    wanted, unwanted = ({_code(code, known) for code in codes} for codes in (only, skip))
    return tuple(
        check
        for check in CHECKS
        if check.code not in unwanted and (not only or check.code in wanted)
    )


def _code(text: str, known: Iterable[str]) -> str:
    code = text.upper()
    code = code if code.startswith(_PREFIX) else _PREFIX + code
    if code not in known:
        raise CheckUnknown(
            f"the check {text}", found="no such code", do="see `nvshim doctor --list`"
        )
    return code


def lasting_skips(places: Places) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The checks that the node's configuration leaves out.

    Returns:
        Their codes; and the words that are no check's any more, which are of no effect.
    """
    try:
        words = places.config().doctor_skip
    except ConfigError:
        return (), ()  # a check says so
    known = {check.code for check in CHECKS}
    codes = {word: word if word.startswith(_PREFIX) else _PREFIX + word for word in words}
    return (
        tuple(code for code in codes.values() if code in known),
        tuple(word for word, code in codes.items() if code not in known),
    )


def examine(
    places: Places,
    checks: Sequence[Check] = CHECKS,
    *,
    skipped: Sequence[str] = (),
    besides: Iterable[str] = (),
) -> Examination:
    """Gather what checks need, and make them.

    Args:
        places: of the node.
        checks: which.
        skipped: codes of the checks that somebody leaves out.
        besides: facts that are gathered though no check needs them.

    Raises:
        RootNotFound: there is no node.
        ManifestUnusable: a file that was named for an answer gives none.
    """
    needed = [group for check in checks for group in check.needs]
    node = observe(places, [*needed, *besides])
    return Examination(tuple(checks), node, judge(node, checks), tuple(skipped))


def judge(node: Node, checks: Sequence[Check] = CHECKS) -> tuple[Finding, ...]:
    """What checks say of facts: a pure function.

    Returns:
        The findings, the worst first, then by code. A check that could not look says so.
    """
    found = [finding for check in checks for finding in check.findings(node)]
    return tuple(sorted(found, key=lambda each: (_ORDER[each.severity], each.unseen, each.code)))
