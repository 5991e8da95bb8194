"""Read files that can block the reader, in a child with a deadline.

To answer a read, the kernel may ask the server of a file system for the number of an open file, or
wait for a process before it can read the process's memory (its command line, its maps). No signal
ends a reader that waits for a dead server. A thread does not help, because it would keep its own
process from exiting. So a child reads, and the caller does not have to wait for it.

Rules
- A child that misses the deadline is killed, and reaped if it ever ends.
- After a few such children a reader refuses to read anything: a tenant can start any number of
  processes that block a reader.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
import weakref
from typing import Final

from integration.containers import bounded_reader_child
from integration.driver_programs import kill
from integration.timeouts import PATIENCE

__all__ = ["Reader"]

TO_ANSWER: Final = 5.0 * PATIENCE
"""Seconds for one answer, which takes the kernel less than a millisecond."""

_MOST_LOST: Final = 3
_CHUNK: Final = 1 << 16


class Reader:
    """A reader whose child starts with the first question and exits together with this object.

    Attributes:
        lost: how many questions missed the deadline.
    """

    def __init__(self) -> None:
        self.lost = 0
        self._child: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[..., Reader] | None = None

    def text(self, path: str, most: int) -> bytes | None:
        """Return the first bytes of a file; None if it cannot be read in time.

        Args:
            most: the maximum number of bytes to read.
        """
        return self._ask(f"text {most} {path}\n")

    def node(self, path: str) -> int:
        """Return the number of a character device; 0 for any other file, or past the deadline."""
        major, _, minor = (self._ask(f"node {path}\n") or b"").partition(b":")
        return os.makedev(int(major), int(minor)) if minor else 0

    def _ask(self, question: str) -> bytes | None:
        if self.lost >= _MOST_LOST:
            return None
        try:
            child = self._start()
            return _answer(child, os.fsencode(question))
        except TimeoutError:
            self.lost += 1
        except OSError:
            self.lost = _MOST_LOST  # no child can be started, or it was killed: read nothing more
        if self._end is not None:
            self._end()
        self._child = self._end = None
        return None

    def _start(self) -> subprocess.Popen[bytes]:
        if self._child is None:
            self._child = subprocess.Popen(
                [sys.executable, "-I", "-S", bounded_reader_child.__file__],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                bufsize=0, env={}, cwd="/",
            )  # fmt: skip
            self._end = weakref.finalize(self, _end, self._child)
        return self._child


def _answer(child: subprocess.Popen[bytes], question: bytes) -> bytes | None:
    """Return a child's answer; None if it could not read the file.

    Raises:
        TimeoutError: the deadline has passed.
        OSError: the child has ended.
    """
    assert child.stdin is not None  # noqa: S101 - they are pipes
    assert child.stdout is not None  # noqa: S101
    child.stdin.write(question)
    poll = select.poll()
    poll.register(child.stdout, select.POLLIN)
    deadline = time.monotonic() + TO_ANSWER
    found, length = bytearray(), b""
    while True:
        if not length and b"\n" in found:
            length, _, rest = bytes(found).partition(b"\n")
            found = bytearray(rest)
        if length and len(found) >= int(length):
            return None if length == b"-1" else bytes(found)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise TimeoutError
        if not (chunk := os.read(child.stdout.fileno(), _CHUNK)):
            raise BrokenPipeError
        found += chunk


def _end(child: subprocess.Popen[bytes]) -> None:
    kill(child)
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            pipe.close()
