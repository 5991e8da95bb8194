"""The pauses between attempts: one second, then twice as long each time, up to 30.

A caller may make the first retry of a rare failure at once, and wait longer for a costly attempt.
"""

from __future__ import annotations

from typing import Final

_FIRST_PAUSE: Final = 1.0
_LONGEST_PAUSE: Final = 30.0


class Backoff:
    """Counts failures in a row.

    Args:
        first: seconds before the first retry; by default 1.
        longest: the longest pause between two attempts, in seconds; by default 30.
    """

    def __init__(self, first: float | None = None, longest: float | None = None) -> None:
        self._first = self._next = _FIRST_PAUSE if first is None else first
        self._longest = _LONGEST_PAUSE if longest is None else longest

    def pause(self, lasted: float = 0.0) -> float:
        """Return the seconds until the next attempt.

        Args:
            lasted: how many seconds the last attempt worked before it failed. If that is more than
                the longest pause, the count is reset.
        """
        if lasted > self._longest:
            self._next = self._first
        following = max(_FIRST_PAUSE, 2 * self._next)
        pause, self._next = self._next, min(following, self._longest)
        return pause
