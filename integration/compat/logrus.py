"""Write stderr in nvidia-ctk's format: logrus lines, which operators and log parsers know.

Source: github.com/sirupsen/logrus, text formatter.
"""

from __future__ import annotations

import json
import re
import sys
import time
from typing import Final

from api.errors import one_line

_PLAIN: Final = re.compile(r"[A-Za-z0-9._/@^+-]+")
_SHORT: Final = {"debug": "DEBU", "info": "INFO", "warning": "WARN"}


class Stderr:
    """A logger to stderr.

    Attributes:
        debugging: whether to write debug lines.
        quiet: whether to write warnings only.
    """

    def __init__(self) -> None:
        self.debugging = False
        self.quiet = False
        self._started = time.monotonic()

    def debug(self, message: str) -> None:
        """Log a detail that explains a result."""
        if self.debugging:
            self._write("debug", message)

    def info(self, message: str) -> None:
        """Log an action."""
        if not self.quiet or self.debugging:
            self._write("info", message)

    def warning(self, message: str) -> None:
        """Log something that may not be what the caller intended."""
        self._write("warning", message)

    def _write(self, level: str, message: str) -> None:
        message = one_line(message)
        if sys.stderr.isatty():
            seconds = int(time.monotonic() - self._started)
            sys.stderr.write(f"{_SHORT[level]}[{seconds:04d}] {message:<44}\n")
            return
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        text = message if _PLAIN.fullmatch(message) else json.dumps(message, ensure_ascii=False)
        sys.stderr.write(f'time="{stamp}" level={level} msg={text}\n')
