"""A terminal with a program in it, as a user has one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import subprocess
import termios
import time
from typing import Self

from integration.timeouts import PATIENCE


def _make_transparent(terminal: int) -> None:
    """Show exactly the program's output on the screen.

    ctr puts the terminal in raw mode a moment after its start, and keeps the translation of line
    ends. Before and after that, the terminal would echo and translate by itself.
    """
    modes = termios.tcgetattr(terminal)
    modes[1] &= ~termios.ONLCR
    modes[3] &= ~termios.ECHO
    termios.tcsetattr(terminal, termios.TCSANOW, modes)


class Terminal:
    """Runs a program as the session leader on its own terminal.

    Args:
        rows: the terminal's height when the program starts.
    """

    def __init__(self, argv: list[str], *, rows: int = 24, columns: int = 80) -> None:
        self._master, slave = os.openpty()
        self._screen = ""
        self.resize(rows, columns)
        _make_transparent(slave)
        try:
            # setsid makes the terminal the controlling one, so that the kernel sends SIGWINCH.
            self._process = subprocess.Popen(
                ["setsid", "--ctty", *argv], stdin=slave, stdout=slave, stderr=slave
            )
        except BaseException:
            os.close(self._master)
            raise
        finally:
            os.close(slave)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        os.close(self._master)

    @property
    def screen(self) -> str:
        """Return everything that was written to the terminal so far."""
        return self._screen

    def resize(self, rows: int, columns: int) -> None:
        """Change the size, as dragging a window's corner does."""
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, text: str) -> None:
        """Press keys: ``\\x03`` is Ctrl-C, ``\\x04`` Ctrl-D."""
        os.write(self._master, text.encode())

    def wait_for(self, text: str, *, timeout: float = 60) -> None:
        """Read until the text is on the screen.

        Raises:
            AssertionError: the text does not appear in time, or before the program exits.
        """
        deadline = time.monotonic() + timeout * PATIENCE
        while text not in self._screen:
            if not self._read(deadline - time.monotonic()):
                raise AssertionError(f"{text!r} is not on the screen: {self._screen!r}")

    def wait(self, *, timeout: float = 60) -> int:
        """Read to the end, and return the program's exit code.

        Raises:
            AssertionError: the program does not exit in time.
        """
        deadline = time.monotonic() + timeout * PATIENCE
        while self._read(deadline - time.monotonic()):
            pass
        try:
            return self._process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"no end; on the screen: {self._screen!r}") from error

    def _read(self, timeout: float) -> bool:
        """Read once; return whether there was data. The end of a terminal is an error."""
        ready, _, _ = select.select([self._master], [], [], max(0.0, timeout))
        with contextlib.suppress(OSError):
            if ready and (chunk := os.read(self._master, 65536)):
                self._screen += chunk.decode(errors="replace")
                return True
        return False
