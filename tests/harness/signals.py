"""Signals that a task of the shim's loop can wait for.

The interpreter's own handler writes the number of each signal into a pipe.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from types import TracebackType
from typing import Final, Self

from shim import loop
from shim.handlers import restore_handlers
from shim.loop import core

_MANY: Final = 256


def open_signal_receiver(*numbers: int) -> SignalReceiver:
    """Receive signals while the context lasts, by iterating asynchronously."""
    return SignalReceiver(numbers)


class SignalReceiver:
    """Receives signals while it is entered, in the main thread; iterates over their numbers."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = numbers
        self._received: list[int] = []
        self._reading = self._writing = self._before = -1
        self._handlers: list[tuple[int, object]] = []

    def __enter__(self) -> Self:
        self._reading, self._writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            self._before = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
            for number in self._numbers:
                self._handlers.append((number, signal.signal(number, _handle)))
        except BaseException:
            self._restore()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        raised: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._restore()

    def _restore(self) -> None:
        while self._handlers:  # the last one first: a signal may be in the list twice
            restore_handlers(dict([self._handlers.pop()]))
        signal.set_wakeup_fd(self._before)
        os.close(self._reading)
        os.close(self._writing)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> int:
        core.raise_if_cancelled()
        while not self._received:
            await loop.wait_readable(self._reading)
            try:
                read = os.read(self._reading, _MANY)
            except BlockingIOError:
                continue
            self._received = [number for number in read if number in self._numbers]
        return self._received.pop(0)


def _handle(_: int, __: object) -> None:
    """Do nothing: the task that reads the pipe does the work."""
