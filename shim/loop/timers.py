"""Functions that are called at a time."""

from __future__ import annotations

import time
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

# The heap is cleaned when it has this many stopped timers, and more than half as many as all.
_STALE: Final = 64

now = time.monotonic


class Timer:
    """A function that is called at a time, unless the timer is stopped before.

    Args:
        when: on the loop's clock.
        function: it.
    """

    __slots__ = ("function", "when")

    def __init__(self, when: float, function: Callable[[], object]) -> None:
        self.when = when
        self.function: Callable[[], object] | None = function

    def __lt__(self, other: Timer) -> bool:
        return self.when < other.when


class Timers:
    """A heap of timers. A stopped one stays in it until it is on top, or many are stopped."""

    def __init__(self) -> None:
        self._timers: list[Timer] = []
        self._stopped = 0

    def at(self, when: float, function: Callable[[], object]) -> Timer:
        """Call a function at a time."""
        timer = Timer(when, function)
        heappush(self._timers, timer)
        return timer

    def stop(self, timer: Timer) -> None:
        """Do not call the function."""
        if timer.function is None:
            return
        timer.function = None
        self._stopped += 1
        if self._stopped > _STALE + len(self._timers) // 2:
            # In place: a timer that is being called may stop others.
            self._timers[:] = [timer for timer in self._timers if timer.function is not None]
            heapify(self._timers)
            self._stopped = 0

    def patience(self) -> float | None:
        """How long the loop may wait for descriptors, in seconds; None for no limit."""
        timers = self._timers
        while timers and timers[0].function is None:
            heappop(timers)
            self._stopped -= 1
        return max(0.0, timers[0].when - now()) if timers else None

    def ring(self) -> None:
        """Call the functions whose time has come."""
        timers = self._timers
        if not timers:
            return
        clock = now()
        while timers and (timers[0].function is None or timers[0].when <= clock):
            timer = heappop(timers)
            function, timer.function = timer.function, None
            if function is None:
                self._stopped -= 1
            else:
                function()
