"""Putting signal handlers back.

CPython's ``signal.signal`` runs the handlers of signals that have come, changes what the kernel
does with the next one, and then notes the new handler. A signal that is caught in between finds
SIG_DFL or SIG_IGN noted, and the interpreter reports "OSError: Signal 17 ignored due to race
condition" on stderr, at some later place. So the kernel is changed first. A signal that was
caught before goes to the old handler, which ``signal.signal`` runs.

Blocking the signal would not do: the kernel gives it to another thread, whose C handler notes it
for the main thread.

Source: CPython's Modules/signalmodule.c, ``signal_signal_impl``, ``_PyErr_CheckSignalsTstate``.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Any

from shim import syscalls

_NOT_CAUGHT = {signal.SIG_DFL, signal.SIG_IGN}


def restore_handlers(before: Mapping[int, Any]) -> None:
    """Give signals the handlers that they had. Call this in the main thread.

    Args:
        before: the handlers, as ``signal.signal`` returned them, by the number of their signal.
    """
    for number, handler in before.items():
        if handler in _NOT_CAUGHT:
            syscalls.stop_catching(number, ignore=handler == signal.SIG_IGN)
        signal.signal(number, handler)
