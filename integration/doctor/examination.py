"""Examine a node: choose checks, gather the facts they need, and run them."""

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
    """The result of an examination."""

    checks: tuple[Check, ...]  # the checks that ran, in order
    node: Node  # the facts that they needed
    findings: tuple[Finding, ...]  # the worst first, then by code
    # codes of the checks that the command line or the configuration skipped
    skipped: tuple[str, ...] = ()

    def count(self, severity: Severity) -> int:
        """Return how many findings have this severity."""
        return sum(finding.severity is severity for finding in self.findings)

    @property
    def is_healthy(self) -> bool:
        """Whether there is no finding of severity error."""
        return self.count(Severity.ERROR) == 0


def choose(only: Sequence[str] = (), skip: Sequence[str] = ()) -> tuple[Check, ...]:
    """Select checks by code.

    Args:
        only: codes, with or without NVSHIM-; empty for all.
        skip: codes of checks to leave out.

    Returns:
        Rows of the table, in its order.

    Raises:
        CheckUnknown: a code does not exist.
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
            f"the check {text}", found="does not exist", do="see `nvshim doctor --list`"
        )
    return code


def lasting_skips(places: Places) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the checks that the node's configuration skips.

    Returns:
        Their codes, and the configured entries that have no effect because no check has that name.
    """
    try:
        words = places.config().doctor_skip
    except ConfigError:
        return (), ()  # D070 reports it
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
    """Gather the facts that the checks need, and run the checks.

    Args:
        places: the node's paths.
        checks: the checks to run.
        skipped: codes of skipped checks, for the report.
        besides: other groups of facts to gather.

    Raises:
        RootNotFound: the node's root does not exist.
        ManifestUnusable: the given file of manifests cannot be read.
    """
    needed = [group for check in checks for group in check.needs]
    node = observe(places, [*needed, *besides])
    return Examination(tuple(checks), node, judge(node, checks), tuple(skipped))


def judge(node: Node, checks: Sequence[Check] = CHECKS) -> tuple[Finding, ...]:
    """Run checks on facts: a pure function.

    Returns:
        The findings, the worst first, then by code. A check whose facts are missing reports that.
    """
    found = [finding for check in checks for finding in check.findings(node)]
    return tuple(sorted(found, key=lambda each: (_ORDER[each.severity], each.unseen, each.code)))
