"""The shim's log: lines in logfmt, like containerd's own, into the bundle's ``log`` fifo.

containerd copies that fifo to its own log. The shim opens it for reading and writing, so that it
gets no SIGPIPE while containerd is away, and does not block on a full fifo: a lost line is better
than a container that does not start.

The lines are written without structlog, which imports asyncio, ssl and sixty more modules: four
megabytes in each shim that writes a log line.
"""

from __future__ import annotations

import os
import time
from typing import Any, Final

LOG_FILE: Final = "log"

_ESCAPED: Final = '"\\'
# Characters that end, or seem to end, a value without quotes.
_SPECIAL: Final = f"{_ESCAPED} ="


class Log:
    """Writes lines of logfmt.

    Args:
        directory: the bundle, to whose ``log`` the lines are written.
        debug: whether lines of level debug are written.
        fields: the fields of every line, such as the namespace.
    """

    def __init__(self, directory: str, *, debug: bool, **fields: str) -> None:
        self._debug = debug
        self._fields = fields
        self._fd: int | None = None
        try:
            path = os.path.join(directory, LOG_FILE)
            self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            # Run manually, without containerd and so without a reader.
            self._fd = None

    def descriptors(self) -> frozenset[int]:
        """Return the descriptors that a forked process must keep open to write to the log."""
        return frozenset() if self._fd is None else frozenset((self._fd,))

    def debug(self, event: str, **fields: Any) -> None:
        """Log a step of the shim."""
        if self._debug:
            self._say("debug", event, fields)

    def info(self, event: str, **fields: Any) -> None:
        """Log a normal event."""
        self._say("info", event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        """Log an unexpected event after which the shim continues."""
        self._say("warning", event, fields)

    def error(self, event: str, **fields: Any) -> None:
        """Log a failure that needs attention."""
        self._say("error", event, fields)

    def _say(self, level: str, event: str, fields: dict[str, Any]) -> None:
        if self._fd is None:
            return
        said = {"time": _now(), "level": level, "msg": event, **self._fields, **fields}
        line = " ".join(f"{name}={_quoted(value)}" for name, value in said.items())
        try:
            os.write(self._fd, line.encode(errors="replace") + b"\n")
        except OSError:
            pass  # full: see the module's docstring


def _now() -> str:
    """Return the time in UTC, to the microsecond."""
    seconds, nanoseconds = divmod(time.time_ns(), 10**9)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{nanoseconds // 1000:06}Z"


def _quoted(value: object) -> str:
    """Return a value in logfmt: on one line, and in quotes if its end would be ambiguous."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    if text.isprintable() and not set(text).intersection(_SPECIAL):
        return text
    escaped = (
        f"\\{c}" if c in _ESCAPED else c if c.isprintable() else ascii(c)[1:-1] for c in text
    )
    return f'"{"".join(escaped)}"'
