"""When to put back what another tool took away: at once, then later each time.

Two tools that both insist would rewrite a file, and restart an engine, for ever. So the first time
nothing is waited; each further time within :data:`CALM` twice as long as before, up to
:data:`LONGEST`; and after a calm time it begins anew.
"""

from __future__ import annotations

from typing import Final

FIRST: Final = 10.0
LONGEST: Final = 600.0
CALM: Final = 3600.0


class Backoff:
    """How long to wait before the next time. Times are seconds of a clock that never goes back."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._wait = 0.0

    def is_calm(self, now: float) -> bool:
        """Whether nothing of the kind was done for long."""
        return self._last is None or now - self._last >= CALM

    def due(self, now: float) -> float:
        """When it may be done: ``now``, or later."""
        if self._last is None or self.is_calm(now):
            return now
        return max(now, self._last + self._wait)

    def done(self, now: float) -> None:
        """It was done."""
        self._wait = FIRST if self.is_calm(now) else min(LONGEST, self._wait * 2)
        self._last = now
