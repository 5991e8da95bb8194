"""How serious each of the errors that NVIDIA's driver numbers (XIDs) is for a device.

What each means and whose it is, is the table of :mod:`shim.causes.xids`.

Rules
- What NVIDIA's device plugin ignores is ignored, but for 109: its catalogue wants the GPU reset, so
  one of it is noted, and several of it count.
- What the catalogue ignores is ignored, but for what it has somebody look at when it goes on (92).
- What ends with the application that made it (RESTART_APP) makes a device suspect. A fault of the
  GPU shows by coming back: several in a while make it unhealthy. NVIDIA's plugin takes the GPU away
  for ever at the first.
- What the catalogue wants the GPU reset for is fatal: the device is not given until a reset, a
  reload of the driver or a boot was seen. Where NVIDIA says that it may pass (119, 120), the device
  has to prove itself instead, and where a workflow decides by registers that nobody told (74, 144
  to 146, 149, 150) too. The line of an error of NVLink (144 to 150) may say that it is not fatal;
  then it is ignored (:mod:`.policy`).
- A number that is not here makes a device unhealthy, as NVIDIA's plugin does: it is of a driver
  that is newer than this table, or of what is not expected of any. It can prove itself, too.
- Of a GPU in MIG mode an error with an instance is that instance's, unless it is one of the whole
  GPU (its scope), or is fatal.

Source: NVIDIA's Xid catalogue (docs.nvidia.com/deploy/xid-errors, "Analyzing Xid Errors with the
Xid Catalog" and, for Volta and older, the list of the r535 document); nverror.h of the open kernel
modules; internal/rm/health.go of NVIDIA's device plugin for what that one ignores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Final

from shim.causes import xids


class Severity(StrEnum):
    """What an error makes of a device."""

    IGNORE = "ignore"
    SUSPECT = "suspect"
    UNHEALTHY = "unhealthy"
    FATAL = "fatal"

    @property
    def weight(self) -> int:
        """How serious it is, to be compared."""
        return list(Severity).index(self)


class Scope(StrEnum):
    """What of a GPU in MIG mode an error is about that names an instance."""

    GPU = "gpu"
    INSTANCE = "instance"


@dataclass(frozen=True, slots=True)
class Xid(xids.Xid):
    """One number."""

    # what it makes of a device. A number that the tables do not have makes it unhealthy.
    severity: Severity = Severity.UNHEALTHY
    scope: Scope = Scope.GPU  # what of a GPU in MIG mode it is about that names an instance


# Exceptions of engines that are there several times. NVIDIA's plugin ignores the first decoder's
# (68), and no other.
_ENGINES: Final = (
    39, 40, 41, 47, 65, 70, 71, 72, 73, 75, 76, 77, 82, 83, 84, 85, 86, 88, 89,
    *range(96, 106), *range(126, 136), 139, 142,
)  # fmt: skip

_NUMBERS: Final = {
    Severity.IGNORE: (
        13, 14, 31, 37, 38, 43, 44, 45, 63, 66, 67, 68, 93, 106, 107, 108, 121, 137, 141, 147, 148,
        152, 153, 160, 162, 163, 164, 165,
    ),
    Severity.SUSPECT: (
        8, 11, 25, 32, 42, 56, 60, 61, 69, 78, 80, 81, 92, 94, 109, 154, 155, 157, 159, 161, 166,
        168, 170, 171, 172, *_ENGINES,
    ),
    Severity.UNHEALTHY: (26, 54, 57, 58, 74, 119, 120, 144, 145, 146, 149, 150, 169),
    Severity.FATAL: (46, 48, 62, 64, 79, 95, 110, 136, 140, 143, 151, 156, 158, 167),
}  # fmt: skip

# Those of the instance that they name; all others are of the whole GPU.
_OF_INSTANCES: Final = {
    8, 11, 13, 25, 31, 32, 37, 38, 42, 43, 44, 45, 60, 66, 67, 68, 69, 80, 94, 108, 109, 137, 141,
    152, 153, *_ENGINES,
}  # fmt: skip


def _judged(known: xids.Xid, severity: Severity) -> Xid:
    values = {field.name: getattr(known, field.name) for field in fields(known)}
    scope = Scope.INSTANCE if known.number in _OF_INSTANCES else Scope.GPU
    return Xid(**values, severity=severity, scope=scope)


XIDS: Final[Mapping[int, Xid]] = {
    number: _judged(xids.about(number), severity)
    for number, severity in sorted(
        (number, severity) for severity, numbers in _NUMBERS.items() for number in numbers
    )
}
"""Every number that is known."""


def about(number: int) -> Xid:
    """What is known of a number; of one that is not known, that it is not."""
    return XIDS.get(number) or _judged(xids.about(number), Severity.UNHEALTHY)
