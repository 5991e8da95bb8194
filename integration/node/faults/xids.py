"""The severity of each XID, the numbered errors of NVIDIA's driver.

:mod:`shim.causes.xids` has the meaning and the usual cause of each number.

Rules
- Numbers that NVIDIA's device plugin ignores are ignored, except 109: the catalogue asks for a GPU
  reset, so one occurrence is noted and several count.
- Numbers that the catalogue ignores are ignored, except 92, which it asks to investigate if it
  continues.
- An error that ends when the application restarts (RESTART_APP) makes a device suspect. A defect of
  the GPU shows by repetition: several errors within a window make it unhealthy. NVIDIA's plugin
  removes the GPU for good after the first one.
- An error for which the catalogue asks for a GPU reset is fatal: the device is not allocated until
  a reset, a driver reload or a reboot was seen. There are two exceptions: NVIDIA says that the
  error may be transient (119 and 120; 175 is a 119 with a known reason), or the decision depends on
  registers that are not reported (74, 144 to 146, 149, 150). The device is then unhealthy until it
  stays quiet. An NVLink error (144 to 150) whose line says that it is not fatal is ignored
  (:mod:`.policy`).
- An unknown number makes a device unhealthy, as in NVIDIA's plugin: the driver is newer than this
  table. The device becomes healthy again when it stays quiet.
- On a GPU in MIG mode an error that names an instance affects that instance only, unless its scope
  is the whole GPU or it is fatal.

Source: NVIDIA's Xid catalogue (docs.nvidia.com/deploy/xid-errors, "Analyzing Xid Errors with the
Xid Catalog" and, for Volta and older, the list of the r535 document); nverror.h of the open kernel
modules; internal/rm/health.go of NVIDIA's device plugin for what that one ignores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from shim.causes import xids


class Severity(StrEnum):
    """The effect of an error on a device."""

    IGNORE = "ignore"
    SUSPECT = "suspect"
    UNHEALTHY = "unhealthy"
    FATAL = "fatal"

    @property
    def weight(self) -> int:
        """The rank of the severity, for comparison."""
        return list(Severity).index(self)


class Scope(StrEnum):
    """What an error that names a MIG instance affects."""

    GPU = "gpu"
    INSTANCE = "instance"


@dataclass(frozen=True, slots=True)
class Xid(xids.Xid):
    """One XID."""

    severity: Severity = Severity.UNHEALTHY  # that of an unknown number
    scope: Scope = Scope.GPU  # what it affects if it names a MIG instance


# Exceptions of engines; a GPU has several of each kind. NVIDIA's plugin ignores only those of the
# first decoder (68).
_ENGINES: Final = (
    39, 40, 41, 47, 65, 70, 71, 72, 73, 75, 76, 77, 82, 83, 84, 85, 86, 88, 89,
    *range(96, 106), *range(126, 136), 139, 142,
)  # fmt: skip

NUMBERS: Final[Mapping[Severity, tuple[int, ...]]] = {
    Severity.IGNORE: (
        13, 14, 31, 37, 38, 43, 44, 45, 63, 66, 67, 68, 93, 106, 107, 108, 121, 137, 141, 147, 148,
        152, 153, 160, 162, 163, 164, 165,
    ),
    Severity.SUSPECT: (
        8, 11, 25, 32, 42, 56, 60, 61, 69, 78, 80, 81, 92, 94, 109, 154, 155, 157, 159, 161, 166,
        168, 170, 171, 172, 174, 176, *_ENGINES,
    ),
    Severity.UNHEALTHY: (26, 54, 57, 58, 74, 119, 120, 144, 145, 146, 149, 150, 169, 175),
    Severity.FATAL: (46, 48, 62, 64, 79, 95, 110, 136, 140, 143, 151, 156, 158, 167, 173),
}  # fmt: skip
"""Every known number, by its severity."""

# These affect the instance that they name; all others affect the whole GPU.
_OF_INSTANCES: Final = {
    8, 11, 13, 25, 31, 32, 37, 38, 42, 43, 44, 45, 60, 66, 67, 68, 69, 80, 94, 108, 109, 137, 141,
    152, 153, *_ENGINES,
}  # fmt: skip


def about(number: int) -> Xid:
    """Return the row of a number; an unknown number has one too."""
    known = xids.about(number)
    severities = (each for each, numbers in NUMBERS.items() if number in numbers)
    severity = next(severities, Severity.UNHEALTHY)
    scope = Scope.INSTANCE if number in _OF_INSTANCES else Scope.GPU
    values = {name: getattr(known, name) for name in known.__match_args__}
    return Xid(**values, severity=severity, scope=scope)
