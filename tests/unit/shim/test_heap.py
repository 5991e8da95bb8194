"""The number of malloc arenas that glibc creates for threads."""

from __future__ import annotations

import subprocess
import sys

import pytest

_THREADS = """
import ctypes, threading
from shim.syscalls import use_one_heap

def allocate():
    kept = [bytes(1000) for _ in range(100)]
    there.wait()

{first}
there = threading.Barrier(5)
threads = [threading.Thread(target=allocate) for _ in range(4)]
for each in threads:
    each.start()
there.wait()
for each in threads:
    each.join()
libc = ctypes.CDLL(None)
libc.malloc_info(0, ctypes.c_void_p.in_dll(libc, "stdout"))
libc.fflush(None)
"""


@pytest.mark.parametrize(("first", "has_one"), [("", False), ("use_one_heap()", True)])
def test_threads_use_one_heap_if_they_are_told_to(first: str, has_one: bool) -> None:
    code = _THREADS.format(first=first)
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
    assert (printed.count(b"<heap nr=") == 1) == has_one
