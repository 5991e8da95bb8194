"""What an error of a GPU means: how serious it is, whose it is, and what a person can do.

- A double-bit ECC error (48) with a contained one (94) shortly before or after it was contained:
  then it needs no reset.
- When the driver says what it needs to recover (154), its words count: a reset, a boot, nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from integration.node.health.xids import Remedy, Severity, Xid, about

if TYPE_CHECKING:
    from collections.abc import Mapping

    from integration.node.health.policy import Policy
    from integration.node.monitor.values import GpuEvent

__all__ = ["DBE", "ECC_DOUBLE", "TOGETHER", "XID", "Verdict", "severity_of"]

ECC_DOUBLE: Final = "ecc-double"
XID: Final = "xid"
DBE: Final = 48
_RECOVERY: Final = 154

TOGETHER: Final = 30.0
"""Seconds between two errors that tell of the same."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What an event means.

    Attributes:
        gpu: UUID of the GPU that it is of; "" if nobody knows it.
        xid: what is known of its number; None for an event without one.
        severity: what it makes of those that it is of.
        devices: UUIDs of those.
        certain: whether it is theirs; otherwise they are only those who might have it.
        remedy: what a person can do.
        over: whether the driver says that it needs nothing to recover any more.
        blamed: the containers that it is attributed to.
    """

    gpu: str
    xid: Xid | None
    severity: Severity
    devices: tuple[str, ...]
    certain: bool = True
    remedy: Remedy = Remedy.NOTHING
    over: bool = False
    blamed: tuple[str, ...] = ()

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
        policy: which error makes what of a device.
        contained: when the last contained error of its GPU was; None for never.
    """
    if event.kind == ECC_DOUBLE:  # its XID says whether it was contained
        return Severity.SUSPECT, Remedy.RESET_LATER, False
    if event.kind != XID:
        return Severity.IGNORE, Remedy.NOTHING, False
    severity, remedy = policy.severity(event.xid), about(event.xid).remedy
    was_contained = contained is not None and abs(event.when - contained) <= TOGETHER
    if event.xid == DBE and severity == Severity.FATAL and was_contained:
        return Severity.UNHEALTHY, remedy, False
    if event.xid == _RECOVERY and severity == Severity.SUSPECT:
        return _of_recovery(event.text)
    return severity, remedy, False


# All of it, and at the end: before it stands the name that a process has chosen for itself, which
# is too short to hold this.
_TO: Final = re.compile(
    r"recovery action changed from 0x[0-9a-f]+ \([^()]*\) to 0x[0-9a-f]+ \(([^()]*)\)\.?\s*$",
    re.IGNORECASE,
)
_ACTIONS: Final[Mapping[str, tuple[Severity, Remedy, bool]]] = {
    "none": (Severity.IGNORE, Remedy.NOTHING, True),
    "gpu reset required": (Severity.FATAL, Remedy.RESET, False),
    "drain and reset": (Severity.FATAL, Remedy.RESET, False),
    "pf flr": (Severity.FATAL, Remedy.RESET, False),
    "node reboot required": (Severity.FATAL, Remedy.REBOOT, False),
    "drain p2p": (Severity.SUSPECT, Remedy.RESTART_APP, False),
}


def _of_recovery(text: str) -> tuple[Severity, Remedy, bool]:
    found = _TO.search(text)
    action = found[1].strip().lower() if found else ""
    return _ACTIONS.get(action, (Severity.SUSPECT, Remedy.RESET, False))
