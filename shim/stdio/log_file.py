"""Passing on to a file, on a thread: a disk that hangs must not hold up the pod.

No file system tells beforehand whether a write to a file will block, and splice(2) refuses a
file that is appended to. A file has to be appended to: it may be rotated by truncating it, and
several containers may share one. So a thread reads and writes in turn, and sleeps in the
kernel when there is nothing to do.

What a full disk does not take is forgotten, and said once: a container must not hang for want
of a log.
"""

from __future__ import annotations

import os
import select
from _thread import allocate_lock
from functools import partial
from typing import TYPE_CHECKING, Final

from api import aio
from shim.stdio.ends import Descriptors

if TYPE_CHECKING:
    from collections.abc import Callable

    from shim.tasks import Tasks


_CHUNK: Final = 1 << 16


class FileRelay:
    """Passes on from a pipe or terminal to a file, to the end or until told to finish.

    Args:
        source: read from until it ends; ours from now on.
        sink: an open file, ours from now on.
        at_failure: told of the first write that failed.
    """

    def __init__(
        self,
        source: int,
        sink: int,
        *,
        at_failure: Callable[[OSError], None] | None = None,
    ) -> None:
        self.done = aio.Event()
        self._ours = Descriptors()
        self._source = self._ours.keep(source)
        self._sink = self._ours.keep(sink)
        try:
            self._wake = self._ours.keep(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        except OSError:
            self._ours.close()
            raise
        self._at_failure = at_failure
        self._stopping = False
        self._running = False
        # Whoever takes it has the descriptors to see to: the thread, or the task if that is
        # cancelled before the thread has begun, or none could be had.
        self._care = allocate_lock()
        self._ended = False
        os.set_blocking(source, False)

    def start(self, tasks: Tasks) -> None:
        """Begin."""
        self._running = True
        tasks.start_soon(self._run)

    def finish(self) -> None:
        """Pass on what is there, and then end, whoever could still write."""
        if not self._ended:
            os.eventfd_write(self._wake, 1)

    def stop(self) -> None:
        """End now, without what has not been read yet."""
        if not self._running:
            self._ours.close()
        elif not self._ended:
            self._stopping = True
            os.eventfd_write(self._wake, 1)

    async def _run(self) -> None:
        try:
            await aio.run_in_thread(self._work)
        except BaseException:
            if self._care.acquire(blocking=False):
                self._end()
            else:
                self.stop()
            raise
        # The thread is done with them. One that hangs in a write keeps them.
        self._end()

    def _end(self) -> None:
        self._ended = True
        self._ours.close()
        self.done.set()

    def _work(self) -> None:
        if not self._care.acquire(blocking=False):
            return
        poll = select.poll()
        poll.register(self._source, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        finishing = False
        while not self._stopping:
            try:
                data = os.read(self._source, _CHUNK)
            except BlockingIOError:
                if finishing:
                    return
                finishing = any(fd == self._wake for fd, _ in poll.poll())
                continue
            except OSError:  # EIO: nobody has the terminal open any more
                return
            if not data:
                return
            self._write(data)

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._sink, rest) :]
        except OSError as error:
            if self._at_failure is not None:
                tell, self._at_failure = self._at_failure, None
                aio.call_in_loop(partial(tell, error))
