"""The child that does the reads that may block for ever. It is executed by its path.

    python3 -I -S bounded_reader_child.py < QUESTIONS > ANSWERS

A question is a line: ``text BYTES PATH`` or ``node PATH``. An answer is a line with its length,
then its bytes; the length -1 means that the file could not be read. The answer to ``node`` is
``MAJOR:MINOR`` for a character device, and empty for any other file. statx(2) with
AT_STATX_DONT_SYNC finds it without the file system's server.

The child exits at the end of its input. See :mod:`integration.containers.bounded_reader`.

Source: statx(2).
"""

from __future__ import annotations

import ctypes
import os
import stat
import sys

_CHUNK = 1 << 20
_AT_FDCWD = -100
_AT_STATX_DONT_SYNC = 0x4000
_STATX_TYPE = 0x1
# Where struct statx has stx_mode, and stx_rdev_major before stx_rdev_minor.
_MODE, _MAJOR, _MINOR = 28, 128, 132
_SIZE = 256


def main() -> None:
    """Answer questions until the input ends."""
    libc = ctypes.CDLL(None)
    with os.fdopen(0, "rb", buffering=0) as questions:
        for question in questions:
            kind, _, path = question.rstrip(b"\n").partition(b" ")
            try:
                answer = _read(*path.split(b" ", 1)) if kind == b"text" else _node(libc, path)
            except OSError:
                _write(b"-1\n")
                continue
            _write(b"%d\n" % len(answer) + answer)


def _read(most: bytes, path: bytes) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        chunks, left = [], int(most)
        while left and (chunk := os.read(fd, min(left, _CHUNK))):
            chunks.append(chunk)
            left -= len(chunk)
        return b"".join(chunks)
    finally:
        os.close(fd)


def _node(libc: ctypes.CDLL, path: bytes) -> bytes:
    if not hasattr(libc, "statx"):  # older than glibc 2.28
        seen = os.stat(path)
        number = seen.st_rdev
        return (
            b"%d:%d" % (os.major(number), os.minor(number)) if stat.S_ISCHR(seen.st_mode) else b""
        )
    found = ctypes.create_string_buffer(_SIZE)
    if libc.statx(_AT_FDCWD, path, _AT_STATX_DONT_SYNC, _STATX_TYPE, found):
        raise OSError
    mode = int.from_bytes(found.raw[_MODE : _MODE + 2], sys.byteorder)
    if not stat.S_ISCHR(mode):
        return b""
    numbers = (int.from_bytes(found.raw[at : at + 4], sys.byteorder) for at in (_MAJOR, _MINOR))
    return b"%d:%d" % tuple(numbers)


def _write(answer: bytes) -> None:
    while answer:
        answer = answer[os.write(1, answer) :]


if __name__ == "__main__":
    main()
