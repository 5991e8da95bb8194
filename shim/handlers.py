"""Restore signal handlers safely.

CPython's ``signal.signal`` runs the handlers of pending signals, changes the kernel's handler, and
then records the new one. A signal caught in between finds SIG_DFL or SIG_IGN, and the interpreter
later reports "OSError: Signal 17 ignored due to race condition" on stderr. So this module changes
the kernel's handler first. A signal caught before that goes to the old handler, which
``signal.signal`` runs.

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
    """Restore previous signal handlers. Call this in the main thread.

    Args:
        before: the handlers by signal number, from ``signal.signal``.
    """
    for number, handler in before.items():
        if handler in _NOT_CAUGHT:
            syscalls.stop_catching(number, ignore=handler == signal.SIG_IGN)
        signal.signal(number, handler)
