"""Read what other processes can make a reader wait for, by a child that is left alone then.

The kernel asks a file system that has a server, or waits for a process, when it is asked for the
number of a file that a process has open, or for the memory of a process (its command line, its
maps). A reader that waits for a server that is gone cannot be killed. Nor is a thread enough: it
keeps its process from ending. So a child reads, and whoever asks it outlives it.

Rules
- A child that does not answer in time is killed, and reaped if it ever ends.
- After some such children a reader reads nothing any more: there may be any number of processes
  that nobody can look at.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
import weakref
from typing import Final

from integration.driver_programs import kill
from integration.inspection import reading_child
from integration.timeouts import PATIENCE

__all__ = ["Reader"]

TO_ANSWER: Final = 5.0 * PATIENCE
"""Seconds for one answer, which takes the kernel less than a millisecond."""

_MOST_LOST: Final = 3
_CHUNK: Final = 1 << 16


class Reader:
    """A child that reads. It is started by the first question, and ends with this.

    Attributes:
        lost: how many questions were not answered in time.
    """

    def __init__(self) -> None:
        self.lost = 0
        self._child: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[..., Reader] | None = None

    def text(self, path: str, most: int) -> bytes | None:
        """The first bytes of a file; None if it cannot be read, or not in time.

        Args:
            most: how many.
        """
        return self._ask(f"text {most} {path}\n")

    def node(self, path: str) -> int:
        """The number of a character device; 0 if a path leads to none, or is not answered."""
        major, _, minor = (self._ask(f"node {path}\n") or b"").partition(b":")
        return os.makedev(int(major), int(minor)) if minor else 0

    def _ask(self, question: str) -> bytes | None:
        if self.lost >= _MOST_LOST:
            return None
        try:
            child = self._begin()
            return _answer(child, os.fsencode(question))
        except TimeoutError:
            self.lost += 1
        except OSError:
            self.lost = _MOST_LOST  # it cannot be started, or was killed: as if nothing is read
        if self._end is not None:
            self._end()
        self._child = self._end = None
        return None

    def _begin(self) -> subprocess.Popen[bytes]:
        if self._child is None:
            self._child = subprocess.Popen(
                [sys.executable, "-I", "-S", reading_child.__file__],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                bufsize=0, env={}, cwd="/",
            )  # fmt: skip
            self._end = weakref.finalize(self, _end, self._child)
        return self._child


def _answer(child: subprocess.Popen[bytes], question: bytes) -> bytes | None:
    """What a child answers.

    Raises:
        TimeoutError: nothing in time.
        OSError: it has ended.
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
