"""Delay before restoring what another tool removed: none at first, then longer and longer.

Two tools that both insist would rewrite a file and restart the engine forever. The first
restoration is immediate. Each further one within :data:`CALM` seconds waits twice as long as the
one before, up to :data:`LONGEST`. After a calm period the delay is reset.
"""

from __future__ import annotations

from typing import Final

FIRST: Final = 10.0
LONGEST: Final = 600.0
CALM: Final = 3600.0


class Backoff:
    """Compute the earliest time of the next restoration, in seconds of a monotonic clock."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._wait = 0.0

    def is_calm(self, now: float) -> bool:
        """Return whether the last restoration is long ago."""
        return self._last is None or now - self._last >= CALM

    def due(self, now: float) -> float:
        """Return the earliest time of the next restoration: ``now`` or later."""
        if self._last is None or self.is_calm(now):
            return now
        return max(now, self._last + self._wait)

    def done(self, now: float) -> None:
        """Record a restoration."""
        self._wait = FIRST if self.is_calm(now) else min(LONGEST, self._wait * 2)
        self._last = now
