"""Progress messages on stderr: one changing line on a terminal, a line per step elsewhere."""

from __future__ import annotations

import shutil
import sys
from typing import Self, TextIO

from api.errors import printable
from integration.cli.output import Format, Output, best_effort, is_terminal

_CLEAR = "\r\x1b[K"


class Progress:
    """Show what a command is doing; the context clears the line at the end.

    On a terminal each message overwrites the previous one; elsewhere each has its own line. With
    document output nothing is shown, because programs parse stderr too.

    Args:
        output: the command's output.
        stream: by default the current stderr.
    """

    def __init__(self, output: Output, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._is_wanted = output.form is Format.TABLE
        self._is_terminal = is_terminal(self._stream)
        self._is_there = False

    def update(self, line: str) -> None:
        """Show the current step.

        Args:
            line: the message without a newline; "" clears it.
        """
        if not self._is_wanted or not (line or self._is_there):
            return
        line = printable(line)
        if self._is_terminal:
            width = shutil.get_terminal_size().columns - 1
            line = line if len(line) <= width else f"{line[: width - 1]}…"
            self._write(f"{_CLEAR}{line}")
        elif line:
            self._write(f"{line}\n")
        self._is_there = bool(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_there and self._is_terminal:
            self._write(_CLEAR)

    def _write(self, text: str) -> None:
        with best_effort(self._stream):  # the work goes on, even if nobody can read about it
            self._stream.write(text)
            self._stream.flush()
