"""Saying on stderr what is being done: a person sees one line, a log gets one for each step."""

from __future__ import annotations

import shutil
import sys
from typing import Self, TextIO

from api.errors import printable
from integration.cli.output import Format, Output, is_terminal

_CLEAR = "\r\x1b[K"


class Progress:
    """What a command is doing. As a context it takes its line away at the end.

    At a terminal the line is written over by the next one; elsewhere each is a line of its own. Who
    has asked for a document reads stderr as one, too, and gets nothing.

    Args:
        output: where the command's answer goes.
        stream: by default stderr as it is then.
    """

    def __init__(self, output: Output, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._is_wanted = output.form is Format.TABLE
        self._is_terminal = is_terminal(self._stream)
        self._is_there = False

    def say(self, line: str) -> None:
        """Say what is done from here on.

        Args:
            line: without its end; "" for nothing any more.
        """
        if not self._is_wanted or not (line or self._is_there):
            return
        line = printable(line)
        if self._is_terminal:
            width = shutil.get_terminal_size().columns - 1
            line = line if len(line) <= width else f"{line[: width - 1]}…"
            self._stream.write(f"{_CLEAR}{line}")
        elif line:
            self._stream.write(f"{line}\n")
        self._stream.flush()
        self._is_there = bool(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_there and self._is_terminal:
            self._stream.write(_CLEAR)
            self._stream.flush()
