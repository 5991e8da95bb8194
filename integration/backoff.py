"""The pauses between attempts at what fails: one second, then twice as long each time, up to 30.

What fails seldom, and of itself, may be tried again at once the first time; what costs more is left
alone for longer.
"""

from __future__ import annotations

from typing import Final

_FIRST_PAUSE: Final = 1.0
_LONGEST_PAUSE: Final = 30.0


class Backoff:
    """Counts the failures of one thing.

    Args:
        first: seconds until the first attempt after a while in which it went well; by default 1.
        longest: seconds between two attempts at most; by default 30.
    """

    def __init__(self, first: float | None = None, longest: float | None = None) -> None:
        self._first = self._next = _FIRST_PAUSE if first is None else first
        self._longest = _LONGEST_PAUSE if longest is None else longest

    def pause(self, lasted: float = 0.0) -> float:
        """Seconds until the next attempt.

        Args:
            lasted: seconds that it went well before it failed. After more than the longest pause
                the failures before are forgotten.
        """
        if lasted > self._longest:
            self._next = self._first
        following = max(_FIRST_PAUSE, 2 * self._next)
        pause, self._next = self._next, min(following, self._longest)
        return pause
