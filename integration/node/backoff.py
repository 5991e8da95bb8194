"""The pauses between attempts at what fails: one second, then twice as long each time, up to 30."""

from __future__ import annotations

from typing import Final

_FIRST_PAUSE: Final = 1.0
_LONGEST_PAUSE: Final = 30.0


class Backoff:
    """Counts the failures of one thing."""

    def __init__(self) -> None:
        self._next = _FIRST_PAUSE

    def pause(self, lasted: float = 0.0) -> float:
        """Seconds until the next attempt.

        Args:
            lasted: seconds that it went well before it failed. After more than the longest pause
                the failures before are forgotten.
        """
        if lasted > _LONGEST_PAUSE:
            self._next = _FIRST_PAUSE
        pause, self._next = self._next, min(2 * self._next, _LONGEST_PAUSE)
        return pause
