"""Restore signal handlers safely.

CPython's ``signal.signal`` runs the handlers of signals that have arrived, changes what the kernel
does with the next one, and then records the new handler. If a signal is caught in between, SIG_DFL
or SIG_IGN is recorded already, and the interpreter reports "OSError: Signal 17 ignored due to race
condition" on stderr, at some later place. So the kernel's handler is changed first. A signal that
was caught before that goes to the old handler, which ``signal.signal`` runs.

Blocking the signal would not help: the kernel delivers it to another thread, whose C handler
records it for the main thread.

Source: CPython's Modules/signalmodule.c, ``signal_signal_impl``, ``_PyErr_CheckSignalsTstate``.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Any

from shim import syscalls

_NOT_CAUGHT = {signal.SIG_DFL, signal.SIG_IGN}


def restore_handlers(before: Mapping[int, Any]) -> None:
    """Restore the previous handlers of signals. Call this in the main thread.

    Args:
        before: the handlers by signal number, as ``signal.signal`` returned them.
    """
    for number, handler in before.items():
        if handler in _NOT_CAUGHT:
            syscalls.stop_catching(number, ignore=handler == signal.SIG_IGN)
        signal.signal(number, handler)
