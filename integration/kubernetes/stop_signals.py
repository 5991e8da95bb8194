"""Turn termination signals into an exception: process 1 ignores signals without a handler."""

from __future__ import annotations

import signal
from typing import Final

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class Stopped(BaseException):
    """A termination signal arrived. Raised by the signal handler, wherever the program is."""


def raise_on_stop_signals() -> None:
    """Raise :class:`Stopped` on the first termination signal."""

    def stop(number: int, _: object) -> None:
        for one in _SIGNALS:
            # Ignore further signals during the cleanup. Not SIG_IGN, which children inherit.
            signal.signal(one, lambda *_: None)
        raise Stopped(signal.Signals(number).name)

    for number in _SIGNALS:
        signal.signal(number, stop)
