"""Delay Ctrl-C and SIGTERM until no pod or container is half created.

The engine may have created it before its answer arrives. A signal during such a call therefore
takes effect only after the answer. While the pods are being removed, which takes some seconds,
signals are ignored.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, Self

from shim.handlers import restore_handlers

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SHELL_SIGNAL_BASE: Final = 128  # a shell reports death by signal N as 128 + N


class Interrupts:
    """Handle the terminating signals while the context is active; restore the handlers after."""

    def __init__(self) -> None:
        self._postponed = 0
        self._waiting = 0
        self._are_ignored = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._previous = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        restore_handlers(self._previous)

    @contextmanager
    def postponed(self) -> Iterator[None]:
        """Postpone signals until the block has finished."""
        self._postponed += 1
        try:
            yield
        finally:
            self._postponed -= 1
            if self._waiting and not self._postponed:
                number, self._waiting = self._waiting, 0
                self._on_signal(number, None)

    def ignore(self) -> None:
        """Ignore signals from now on."""
        self._are_ignored = True

    def _on_signal(self, number: int, _: object) -> None:
        if self._are_ignored:
            return
        if self._postponed:
            self._waiting = number
            return
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(_SHELL_SIGNAL_BASE + number)
