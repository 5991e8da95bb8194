"""A FUSE file system with one file, whose server can stop answering.

It speaks the kernel's protocol through /dev/fuse, without a library. While it does not answer,
accesses hang, as with a stuck lazy snapshotter or network file system.

Source: kernel include/uapi/linux/fuse.h.
"""

from __future__ import annotations

import os
import select
import stat
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from integration.containers.procfs import Procfs
from shim import syscalls

FILE: Final = "image"

_FORGETS: Final = (2, 42)
_HEADER: Final = struct.Struct("<IIQQIIII")
_REPLY: Final = struct.Struct("<IiQ")
_MOST: Final = 1 << 17
_FILE: Final = 2
_ENOENT: Final = 2
_ENOSYS: Final = 38

_LONGEST: Final = 40.0  # seconds until a forgotten hang ends by itself


class FuseServer:
    """A FUSE file system with one file, which can stop answering.

    Attributes:
        mount_point: where it is mounted.
        asked: set when a request waits for an answer.
        askers: the processes with waiting requests, each with its ancestors.
    """

    def __init__(self, mount_point: str, backing: str, mode: int, longest: float) -> None:
        self.mount_point = mount_point
        self._longest = longest
        self._mode = stat.S_IFREG | mode
        self.asked = threading.Event()
        self.askers: list[list[int]] = []
        self._fd = os.open("/dev/fuse", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._end = os.eventfd(0)
        self._file = os.open(backing, os.O_RDWR | os.O_CLOEXEC)
        self._answers = threading.Event()
        self._answers.set()
        self._greeted = threading.Event()
        options = f"fd={self._fd},rootmode=40000,user_id=0,group_id=0,allow_other"
        syscalls.mount("fuse", mount_point, "fuse.test", 0, options)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        assert self._greeted.wait(_LONGEST), "the kernel opens the connection"

    def hang(self) -> None:
        """Stop answering."""
        self.asked.clear()
        self.askers.clear()
        self._answers.clear()

    def go_on(self) -> None:
        """Answer again, waiting requests included."""
        self._answers.set()

    def close(self) -> None:
        """Stop the server; hanging accesses fail."""
        syscalls.umount(self.mount_point, syscalls.MNT_DETACH)
        # Another mount namespace, as a container's, may have a copy of the mount: it does not end
        # with this one, and neither would a read.
        os.eventfd_write(self._end, 1)
        self.go_on()
        self._thread.join()
        for fd in (self._fd, self._end, self._file):
            os.close(fd)

    def _serve(self) -> None:
        poll = select.poll()
        for fd in (self._fd, self._end):
            poll.register(fd, select.POLLIN)
        while self._end not in dict(poll.poll()):
            try:
                request = os.read(self._fd, _MOST + 4096)
            except (BlockingIOError, FileNotFoundError):  # the process that asked has gone
                continue
            except OSError:
                return  # it is unmounted
            _, opcode, unique, node, _, _, pid, _ = _HEADER.unpack_from(request)
            if not self._answers.is_set() and opcode not in _FORGETS:
                self.askers.append(_line_of(pid))
                self.asked.set()
                # A test that hangs in here itself cannot be interrupted otherwise.
                self._answers.wait(self._longest)
                self._answers.set()
            if opcode in _FORGETS:
                continue
            answer = self._answer(opcode, node, request[_HEADER.size :])
            error, data = (-answer, b"") if isinstance(answer, int) else (0, answer)
            try:
                os.write(self._fd, _REPLY.pack(_REPLY.size + len(data), error, unique) + data)
            except OSError:
                pass  # the process that asked has gone
            self._greeted.set()  # by INIT, the first request

    def _answer(self, opcode: int, node: int, body: bytes) -> bytes | int:
        match opcode:
            case 26:  # INIT
                return struct.pack("<IIIIHHIIHHI28x", 7, 31, 1 << 16, 0, 12, 9, _MOST, 1, 0, 0, 0)
            case 1:  # LOOKUP
                if body.rstrip(b"\0") != FILE.encode():
                    return _ENOENT
                return struct.pack("<QQQQII", _FILE, 0, 0, 0, 0, 0) + self._attributes(_FILE)
            case 3 | 4:  # GETATTR, SETATTR
                return struct.pack("<QII", 0, 0, 0) + self._attributes(node)
            case 14 | 27:  # OPEN, OPENDIR
                return struct.pack("<QII", 0, 0, 0)
            case 15:  # READ
                _, offset, size = struct.unpack_from("<QQI", body)
                return os.pread(self._file, size, offset)
            case 16:  # WRITE
                _, offset, size = struct.unpack_from("<QQI", body)
                return struct.pack("<II", os.pwrite(self._file, body[40 : 40 + size], offset), 0)
            case 17:  # STATFS
                return struct.pack("<QQQQQIIII24x", 1 << 20, 1 << 20, 1 << 20, 9, 9, 4096, 99, 0, 0)
            case 18 | 20 | 25 | 29:  # RELEASE, FSYNC, FLUSH, RELEASEDIR
                return b""
        return _ENOSYS

    def _attributes(self, node: int) -> bytes:
        size = os.fstat(self._file).st_size if node == _FILE else 0
        mode = self._mode if node == _FILE else stat.S_IFDIR | 0o755
        times = (0,) * 6
        return struct.pack("<QQQQQQ3I7I", node, size, size >> 9, *times, mode, 1, 0, 0, 0, 4096, 0)


def _line_of(pid: int) -> list[int]:
    line = [pid]
    while (status := Procfs().status(line[-1])) is not None and status.parent:
        line.append(status.parent)
    return line


@contextmanager
def fuse(
    directory: str, content: str = "/dev/null", *, mode: int = 0o600, longest: float = _LONGEST
) -> Iterator[FuseServer]:
    """Mount the file system.

    Args:
        directory: the mount point; created.
        content: the file with the content to serve.
        mode: the mode of the served file.
        longest: seconds until a forgotten hang ends by itself.
    """
    os.mkdir(directory)
    server = FuseServer(directory, content, mode, longest)
    try:
        yield server
    finally:
        server.close()
