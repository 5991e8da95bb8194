"""Read a file that a person has named, in an option, a variable or another file.

Rules
- Nothing waits for ever, and nothing fills the memory: a path can name a pipe that nobody writes
  to, a terminal, or a device that never ends. A device may also act when it is opened.
- A regular file is read, and /dev/null, as an empty file. So is a pipe that has a writer, as in
  ``--config <(…)``. A directory, a socket and any other device is refused.

Source: pipe(7), fifo(7); open(2), O_NONBLOCK.
"""

from __future__ import annotations

import errno
import os
import select
import stat
from typing import Final

__all__ = ["LARGEST", "read_named"]

LARGEST: Final = 1 << 20
"""The most bytes of a configuration file."""

_CHUNK: Final = 1 << 16
_NULL: Final = os.makedev(1, 3)
_SILENCE: Final = 30.0  # seconds without a byte from the writer of a pipe


def read_named(path: str, most: int = LARGEST) -> bytes:
    """Return the content of a file that a person has named.

    Args:
        path: links are followed.
        most: the largest allowed number of bytes.

    Raises:
        OSError: it cannot be read; ``strerror`` gives the reason.
    """
    seen = os.stat(path)
    kind = seen.st_mode
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if not (stat.S_ISREG(kind) or stat.S_ISFIFO(kind) or _is_null(seen)):
        raise OSError(errno.EINVAL, "Not a file, but a device or socket", path)
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        content = _read(fd, most, path)
    finally:
        os.close(fd)
    if stat.S_ISFIFO(kind) and not content:
        raise OSError(errno.ENODATA, "A pipe that nobody writes to", path)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"More than {most} bytes", path)
    return content


def _is_null(seen: os.stat_result) -> bool:
    return stat.S_ISCHR(seen.st_mode) and seen.st_rdev == _NULL


def _read(fd: int, most: int, path: str) -> bytes:
    content = bytearray()
    while len(content) <= most:
        try:
            part = os.read(fd, min(_CHUNK, most + 1 - len(content)))
        except BlockingIOError:
            writer = select.poll()
            writer.register(fd, select.POLLIN)
            if not writer.poll(_SILENCE * 1000):
                raise TimeoutError(
                    errno.ETIMEDOUT, f"A pipe whose writer was silent for {_SILENCE:g} s", path
                ) from None
            continue
        if not part:
            break
        content += part
    return bytes(content)
