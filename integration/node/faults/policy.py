"""What an error of a GPU means on this node: how serious it is, whose it is, what a person can do.

Rules, the later stronger
1. The catalogue (:mod:`integration.node.faults.xids`).
2. The operator's table: ``xids`` in ``[health]`` of config.toml.
3. ``DP_DISABLE_HEALTHCHECKS``, as NVIDIA's device plugin has it: numbers that are ignored, with
   commas between them; "xids" ignores all numbers, "all" judges no device at all.
4. ``DP_ENABLE_HEALTHCHECKS``, likewise: numbers that count in spite of all that, and "all". They
   make a device unhealthy at least.

Then, of what was told besides
- A double-bit ECC error (48) with a contained one (94) shortly before or after it was contained:
  then it needs no reset.
- An error of NVLink (144 to 150) whose line says "Nonfatal" is ignored, unless 2 or 4 names it.
- When the driver says what it needs to recover (154), its words count: a reset, a boot, nothing.

Unlike NVIDIA's, which leaves out what it does not understand, a word that is no number is an error.

Source: internal/rm/health.go of NVIDIA's device plugin.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from integration.agent_errors import XidListWrong
from integration.node.faults.xids import Severity, Xid, about
from shim.causes.xids import RECOVERY, Action, Remedy, is_nonfatal, recovery_asked

if TYPE_CHECKING:
    from hooks.config import Config
    from integration.nvml.values import GpuEvent

DISABLE: Final = "DP_DISABLE_HEALTHCHECKS"
ENABLE: Final = "DP_ENABLE_HEALTHCHECKS"

_ALL: Final = "all"
_XIDS: Final = "xids"
_DIGITS: Final = 5


@dataclass(frozen=True, slots=True)
class Policy:
    """What errors mean on this node."""

    table: Mapping[int, Severity] = field(default_factory=dict)  # the operator's, by number
    ignored: frozenset[int] = frozenset()  # numbers that mean nothing
    heeded: frozenset[int] = frozenset()  # numbers that mean at least that a device is unhealthy
    all_ignored: bool = False  # no number means anything, but those that are heeded
    all_heeded: bool = False  # every number means at least that a device is unhealthy
    judged: bool = True  # whether devices are judged at all

    def names(self, number: int) -> bool:
        """Whether the operator has said that an error counts, or what it means."""
        return self.all_heeded or number in self.heeded or number in self.table

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


# -- what an event means -----------------------------------------------------------------------

ECC_DOUBLE: Final = "ecc-double"
XID: Final = "xid"
DBE: Final = 48

TOGETHER: Final = 30.0
"""Seconds between two errors that tell of the same."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What an event means."""

    gpu: str  # UUID of the GPU that it is of; "" if nobody knows it
    xid: Xid | None  # what is known of its number; None for an event without one
    severity: Severity  # what it makes of those that it is of
    devices: tuple[str, ...]  # UUIDs of those
    certain: bool = True  # whether it is theirs; otherwise they are only those who might have it
    remedy: Remedy = Remedy.NOTHING  # what a person can do
    over: bool = False  # whether the driver says that it needs nothing to recover any more
    blamed: tuple[str, ...] = ()  # the containers that it is attributed to

    @property
    def reason(self) -> str:
        """Why a device is what it is, for people."""
        what = "a double-bit ECC error"
        if self.xid is not None:
            what = f"XID {self.xid.number}: {self.xid.meaning}"
        if self.certain:
            return what
        return f"{what}, of {'another instance of it' if self.gpu else 'a GPU that is not known'}"


def severity_of(
    event: GpuEvent, policy: Policy, contained: float | None
) -> tuple[Severity, Remedy, bool]:
    """What an event makes of a device, what to do, and whether it says that all is well.

    Args:
        contained: when the last contained error of its GPU was; None for never.
    """
    if event.kind == ECC_DOUBLE:  # its XID says whether it was contained
        return Severity.SUSPECT, Remedy.RESET_LATER, False
    if event.kind != XID:
        return Severity.IGNORE, Remedy.NOTHING, False
    severity, remedy = policy.severity(event.xid), about(event.xid).remedy
    if is_nonfatal(event.xid, event.text) and not policy.names(event.xid):
        return Severity.IGNORE, remedy, False
    was_contained = contained is not None and abs(event.when - contained) <= TOGETHER
    if event.xid == DBE and severity == Severity.FATAL and was_contained:
        return Severity.UNHEALTHY, remedy, False
    if event.xid == RECOVERY and severity == Severity.SUSPECT:
        asked = recovery_asked(event.text)
        return _ACTIONS.get(asked, _ACTIONS[None])
    return severity, remedy, False


_ACTIONS: Final[Mapping[Action | None, tuple[Severity, Remedy, bool]]] = {
    Action.NOTHING: (Severity.IGNORE, Remedy.NOTHING, True),
    Action.RESET: (Severity.FATAL, Remedy.RESET, False),
    Action.DRAIN_AND_RESET: (Severity.FATAL, Remedy.RESET, False),
    Action.REBOOT: (Severity.FATAL, Remedy.REBOOT, False),
    Action.DRAIN: (Severity.SUSPECT, Remedy.RESTART_APP, False),
    None: (Severity.SUSPECT, Remedy.RESET, False),
}
