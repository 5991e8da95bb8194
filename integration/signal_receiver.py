"""Receive signals in an anyio task."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import anyio

from shim import syscalls


@contextmanager
def open_signal_receiver(*numbers: signal.Signals) -> Iterator[AsyncIterator[signal.Signals]]:
    """Receive signals, like the function of anyio with this name.

    When it ends, asyncio restores the default handlers, with the race that :mod:`shim.handlers`
    describes. SIGINT is not affected, because its default is a handler of Python.
    """
    with anyio.open_signal_receiver(*numbers) as signals:
        try:
            yield signals
        finally:
            for number in {*numbers} - {signal.SIGINT}:
                syscalls.stop_catching(number)
