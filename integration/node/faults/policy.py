"""What a GPU error means on this node: its severity, the affected devices, and the remedy.

Sources of the severity; a later one overrides an earlier one:

1. The catalogue (:mod:`integration.node.faults.xids`).
2. The operator's table: ``xids`` in ``[health]`` of config.toml.
3. ``DP_DISABLE_HEALTHCHECKS``, as in NVIDIA's device plugin: comma-separated numbers to ignore;
   "xids" ignores all numbers and the errors of NVSwitches, "all" turns health checks off.
4. ``DP_ENABLE_HEALTHCHECKS``, the same way: numbers that always count, or "all". They make a device
   at least unhealthy.

Then the context of the error is taken into account
- A double-bit ECC error (48) close to a contained error (94) was contained: no reset is needed.
- An NVLink error (144 to 150) whose line says "Nonfatal" is ignored, unless 2 or 4 names it.
- If the driver names its recovery action (154, and NVML's event for it), that decides: reset,
  reboot, or nothing. An action that this version does not know makes the device unhealthy. The
  operator's setting for 154 applies to both.
- A fatal error of an NVSwitch is fatal for the GPU at its port (:mod:`.sxids`).

NVIDIA's plugin skips words that it does not understand; here a word that is not a number is an
error.

Source: internal/rm/health.go of NVIDIA's device plugin.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from api.values import dataclass, field
from hooks.config import Config
from integration.agent_errors import XidListWrong
from integration.node.faults.sxids import is_fatal
from integration.node.faults.xids import Severity, Xid, about
from integration.nvml.values import GpuEvent
from shim.causes.xids import (
    RECOVERY,
    Action,
    Remedy,
    is_nonfatal,
    recovery_action,
    recovery_asked,
)

DISABLE: Final = "DP_DISABLE_HEALTHCHECKS"
ENABLE: Final = "DP_ENABLE_HEALTHCHECKS"

_ALL: Final = "all"
_XIDS: Final = "xids"
_DIGITS: Final = 5


@dataclass(frozen=True, slots=True)
class Policy:
    """The severities of errors on this node."""

    table: Mapping[int, Severity] = field(default_factory=dict)  # the operator's, by Xid
    ignored: frozenset[int] = frozenset()  # Xids without effect
    heeded: frozenset[int] = frozenset()  # Xids that make a device at least unhealthy
    all_ignored: bool = False  # every Xid without effect, unless ENABLE names it
    all_heeded: bool = False  # every Xid makes a device at least unhealthy
    judged: bool = True  # False turns health checks off

    def names(self, number: int) -> bool:
        """Whether the operator set the severity of an Xid, or made it count."""
        return self.all_heeded or number in self.heeded or number in self.table

    def severity(self, number: int) -> Severity:
        """Return the severity of an Xid."""
        usual = self.table.get(number) or about(number).severity
        if self.all_heeded or number in self.heeded:
            return max(usual, Severity.UNHEALTHY, key=lambda each: each.weight)
        if self.all_ignored or number in self.ignored:
            return Severity.IGNORE
        return usual


def policy_of(config: Config, disabled: str, enabled: str) -> Policy:
    """Return the policy of this node.

    Args:
        config: contains the operator's table.
        disabled: the value of :data:`DISABLE`.
        enabled: the value of :data:`ENABLE`.

    Raises:
        XidListWrong: one of the two is not a list of numbers.
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
    """Return the numbers of a list, and the words in it that stand for all numbers."""
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
            found=f"{wrong[0]!r} is not an XID number",
            do=f'write numbers with commas between them, "{_XIDS}" or "{_ALL}"',
        )
    return frozenset(int(word) for word in others), named


# -- what an event means -----------------------------------------------------------------------

ECC_DOUBLE: Final = "ecc-double"
XID: Final = "xid"
RECOVERY_ACTION: Final = "recovery-action"
DBE: Final = 48

TOGETHER: Final = 30.0
"""Seconds within which two errors describe the same failure."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The meaning of an event on this node."""

    gpu: str  # UUID of the affected GPU; "" if unknown
    xid: Xid | None  # the catalogue's row; None for an event without a number
    severity: Severity  # for the affected devices
    devices: tuple[str, ...]  # UUIDs of the affected devices
    certain: bool = True  # False: any one of the devices may be the affected one
    remedy: Remedy = Remedy.NOTHING  # what a person can do
    over: bool = False  # whether the driver says that nothing is left to recover
    blamed: tuple[str, ...] = ()  # display names of the containers it is attributed to
    what: str = "a double-bit ECC error"  # in words, without a number

    @property
    def reason(self) -> str:
        """The reason for a device's state."""
        what = self.what
        if self.xid is not None:
            what = f"XID {self.xid.number}: {self.xid.meaning}"
        if self.certain:
            return what
        return f"{what}, of {'another instance of it' if self.gpu else 'an unknown GPU'}"


def xid_of(event: GpuEvent) -> int:
    """Return the XID whose rules apply to an event; 0 for none."""
    return RECOVERY if event.kind == RECOVERY_ACTION else event.xid


def action_of(event: GpuEvent) -> Action | None:
    """Return the recovery action that an event names; None if it names none."""
    if event.action is not None:
        return recovery_action(event.action)
    return recovery_asked(event.text) if event.xid == RECOVERY else None


def severity_of(
    event: GpuEvent, policy: Policy, contained: float | None
) -> tuple[Severity, Remedy, bool]:
    """Return an event's severity, its remedy, and whether it says that the GPU has recovered.

    Args:
        contained: when the last contained error of its GPU happened; None for never.
    """
    if event.kind == ECC_DOUBLE:  # its XID says whether it was contained
        severity = min(Severity.SUSPECT, policy.severity(DBE), key=lambda each: each.weight)
        return severity, Remedy.RESET_LATER, False
    if is_fatal(event):
        remedy = Remedy.RESET if event.gpu else Remedy.SWITCHES
        is_ignored = policy.all_ignored and not policy.all_heeded
        return Severity.IGNORE if is_ignored else Severity.FATAL, remedy, False
    number = xid_of(event)
    if not number:
        return Severity.IGNORE, Remedy.NOTHING, False
    severity, remedy = policy.severity(number), about(number).remedy
    if is_nonfatal(event.xid, event.text) and not policy.names(event.xid):
        return Severity.IGNORE, remedy, False
    was_contained = contained is not None and abs(event.when - contained) <= TOGETHER
    if event.xid == DBE and severity == Severity.FATAL and was_contained:
        return Severity.UNHEALTHY, remedy, False
    if number == RECOVERY and severity == Severity.SUSPECT:
        return _ACTIONS[action_of(event)]
    return severity, remedy, False


# By the action that the driver names; None if its line names none.
_ACTIONS: Final[Mapping[Action | None, tuple[Severity, Remedy, bool]]] = {
    Action.NOTHING: (Severity.IGNORE, Remedy.NOTHING, True),
    Action.RESET: (Severity.FATAL, Remedy.RESET, False),
    Action.DRAIN_AND_RESET: (Severity.FATAL, Remedy.RESET, False),
    Action.REBOOT: (Severity.FATAL, Remedy.REBOOT, False),
    Action.DRAIN: (Severity.SUSPECT, Remedy.RESTART_APP, False),
    Action.IMEX: (Severity.FATAL, Remedy.IMEX, False),
    Action.BUS_RESET: (Severity.FATAL, Remedy.BUS_RESET, False),
    Action.CATALOGUE: (Severity.UNHEALTHY, Remedy.CATALOGUE, False),
    None: (Severity.SUSPECT, Remedy.RESET, False),
}
