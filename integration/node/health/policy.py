"""Which error makes what of a device, on this node.

Rules, the later stronger
1. The catalogue (:mod:`integration.node.health.xids`).
2. The operator's table: ``xids`` in ``[health]`` of config.toml.
3. ``DP_DISABLE_HEALTHCHECKS``, as NVIDIA's device plugin has it: numbers that are ignored, with
   commas between them; "xids" ignores all numbers, "all" judges no device at all.
4. ``DP_ENABLE_HEALTHCHECKS``, likewise: numbers that count in spite of all that, and "all". They
   make a device unhealthy at least.

Unlike NVIDIA's, which leaves out what it does not understand, a word that is no number is an error.

Source: internal/rm/health.go of NVIDIA's device plugin.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from integration.node.health.errors import XidListWrong
from integration.node.health.xids import Severity, about

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hooks.config import Config

__all__ = ["DISABLE", "ENABLE", "Policy", "policy_of"]

DISABLE: Final = "DP_DISABLE_HEALTHCHECKS"
ENABLE: Final = "DP_ENABLE_HEALTHCHECKS"

_ALL: Final = "all"
_XIDS: Final = "xids"
_DIGITS: Final = 5


@dataclass(frozen=True, slots=True)
class Policy:
    """What errors mean on this node.

    Attributes:
        table: the operator's, by number.
        ignored: numbers that mean nothing.
        heeded: numbers that mean at least that a device is unhealthy.
        all_ignored: no number means anything, but those that are heeded.
        all_heeded: every number means at least that a device is unhealthy.
        judged: whether devices are judged at all.
    """

    table: Mapping[int, Severity] = field(default_factory=dict)
    ignored: frozenset[int] = frozenset()
    heeded: frozenset[int] = frozenset()
    all_ignored: bool = False
    all_heeded: bool = False
    judged: bool = True

    def severity(self, number: int) -> Severity:
        """What an error makes of a device."""
        usual = self.table.get(number) or about(number).severity
        if self.all_heeded or number in self.heeded:
            return max(usual, Severity.UNHEALTHY, key=lambda each: each.weight)
        if self.all_ignored or number in self.ignored:
            return Severity.IGNORE
        return usual


def policy_of(config: Config, disabled: str, enabled: str) -> Policy:
    """What errors mean on this node.

    Args:
        config: has the operator's table.
        disabled: what :data:`DISABLE` says.
        enabled: what :data:`ENABLE` says.

    Raises:
        XidListWrong: one of the two is no list of numbers.
    """
    ignored, ignored_words = _numbers(DISABLE, disabled)
    heeded, heeded_words = _numbers(ENABLE, enabled)
    return Policy(
        table={
            int(number): Severity(word)
            for number, _, word in (each.partition("=") for each in config.health_xids)
        },
        ignored=ignored,
        heeded=heeded,
        all_ignored=bool(ignored_words),
        all_heeded=bool(heeded_words),
        judged=_ALL not in ignored_words or bool(heeded or heeded_words),
    )


def _numbers(variable: str, text: str) -> tuple[frozenset[int], frozenset[str]]:
    """The numbers of a list, and the words in it that stand for all of them."""
    words = [word for each in text.lower().split(",") if (word := each.strip())]
    named = frozenset(words) & {_ALL, _XIDS}
    others = [word for word in words if word not in named]
    wrong = [
        word
        for word in others
        if not (word.isascii() and word.isdigit() and len(word) <= _DIGITS and int(word))
    ]
    if wrong:
        raise XidListWrong(
            f"{variable}={text}",
            found=f"{wrong[0]!r} is no number of an XID",
            do=f'write numbers with commas between them, "{_XIDS}" or "{_ALL}"',
        )
    return frozenset(int(word) for word in others), named
