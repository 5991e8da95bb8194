"""How a DaemonSet's program ends: process 1 is ended by no signal that it does not heed."""

from __future__ import annotations

import signal
from typing import Final

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class Stopped(BaseException):
    """This program was told to end, wherever it was. Raised by the handler of signals."""


def heed_signals() -> None:
    """Have the signals that end an installer raise :class:`Stopped`, once."""

    def stop(number: int, _: object) -> None:
        for one in _SIGNALS:
            # What has to be done now is done once. Not SIG_IGN, which programs would inherit.
            signal.signal(one, lambda *_: None)
        raise Stopped(signal.Signals(number).name)

    for number in _SIGNALS:
        signal.signal(number, stop)
