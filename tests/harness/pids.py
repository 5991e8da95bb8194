"""A process with a chosen pid, as when the kernel reuses a number."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from tests.harness.runtime import is_alive
from tests.harness.waiting import eventually

# clone3(2) with set_tid, and SIGCHLD as the child's exit signal.
_MAKE: Final = """
import ctypes, os, signal, sys
pid = ctypes.c_int(int(sys.argv[1]))
words = [0, 0, 0, 0, signal.SIGCHLD, 0, 0, 0, ctypes.addressof(pid), 1, 0]
arguments = (ctypes.c_uint64 * len(words))(*words)
libc = ctypes.CDLL(None, use_errno=True)
made = libc.syscall(435, ctypes.byref(arguments), ctypes.sizeof(arguments))
if made == 0:
    os.execv("/bin/sleep", ["sleep", "1000"])
if made < 0:
    sys.exit(os.strerror(ctypes.get_errno()))
os.waitpid(made, 0)
"""


@contextmanager
def process_with(pid: int) -> Iterator[None]:
    """Run a process with that pid, which must be free, until the block ends."""
    with subprocess.Popen([sys.executable, "-ISc", _MAKE, str(pid)]) as maker:
        try:
            eventually(lambda: is_alive(pid), f"process {pid} is another one")
            yield
        finally:
            # Its parent has not waited for it, so the pid is still its own.
            if maker.poll() is None:
                os.kill(pid, signal.SIGKILL)
