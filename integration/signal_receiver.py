"""Signals that a task of anyio waits for."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import anyio

from shim import syscalls


@contextmanager
def open_signal_receiver(*numbers: signal.Signals) -> Iterator[AsyncIterator[signal.Signals]]:
    """Receive signals, as anyio's function of this name does.

    At the end asyncio puts the default handlers back, with the race that :mod:`shim.handlers` tells
    of. SIGINT is not concerned: its default is a handler of Python.
    """
    with anyio.open_signal_receiver(*numbers) as signals:
        try:
            yield signals
        finally:
            for number in {*numbers} - {signal.SIGINT}:
                syscalls.stop_catching(number)
