"""The pauses between attempts at what fails: one second, then twice as long each time, up to 30.

What fails seldom, and of itself, may be tried again at once the first time.
"""

from __future__ import annotations

from typing import Final

_FIRST_PAUSE: Final = 1.0
_LONGEST_PAUSE: Final = 30.0


class Backoff:
    """Counts the failures of one thing.

    Args:
        first: seconds until the first attempt after a while in which it went well.
    """

    def __init__(self, first: float = _FIRST_PAUSE) -> None:
        self._first = self._next = first

    def pause(self, lasted: float = 0.0) -> float:
        """Seconds until the next attempt.

        Args:
            lasted: seconds that it went well before it failed. After more than the longest pause
                the failures before are forgotten.
        """
        if lasted > _LONGEST_PAUSE:
            self._next = self._first
        following = max(_FIRST_PAUSE, 2 * self._next)
        pause, self._next = self._next, min(following, _LONGEST_PAUSE)
        return pause
