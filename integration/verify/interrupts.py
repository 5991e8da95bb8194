"""Ctrl-C and SIGTERM, heeded where nothing is half made.

A call that makes a pod may have made it before its answer is here. So while one is under way a
signal waits for the answer, and while what was made is removed signals are of no effect: it takes
some seconds, and is asked for once.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, Self

from shim.handlers import restore_handlers

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_OF_SHELLS: Final = 128


class Interrupts:
    """The signals that end the process. As a context it has them, and gives them back."""

    def __init__(self) -> None:
        self._postponed = 0
        self._waiting = 0
        self._are_ignored = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._hear) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        restore_handlers(self._before)

    @contextmanager
    def postponed(self) -> Iterator[None]:
        """Have a signal wait for the end of this."""
        self._postponed += 1
        try:
            yield
        finally:
            self._postponed -= 1
            if self._waiting and not self._postponed:
                number, self._waiting = self._waiting, 0
                self._hear(number, None)

    def ignore(self) -> None:
        """Have signals be of no effect from here on."""
        self._are_ignored = True

    def _hear(self, number: int, _: object) -> None:
        if self._are_ignored:
            return
        if self._postponed:
            self._waiting = number
            return
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(_OF_SHELLS + number)
