"""The program of tests of warm processes: it reports its own state, or runs given code."""

from __future__ import annotations

import json
import os
import signal
import subprocess  # noqa: F401 - for the code that tests pass
import sys
import threading
from typing import Any


def portrait() -> dict[str, Any]:
    """Return a process's view of itself."""
    with open("/proc/self/cmdline", "rb") as line, open("/proc/self/environ", "rb") as environment:
        shown = (line.read().split(b"\0"), sorted(environment.read().split(b"\0")))
    with open("/proc/self/status", encoding="ascii") as file:
        ours = ("Name:", "PPid:", "Uid:", "SigBlk:", "SigIgn:", "SigCgt:", "Seccomp:", "Threads:")
        status = [one for one in file.read().splitlines() if one.startswith(ours)]
    three: list[Any] = [sys.stdin, sys.stdout, sys.stderr]
    streams = [
        (stream.encoding, stream.errors, stream.line_buffering, stream.write_through)
        for stream in three
    ]
    return {
        "shown": repr(shown),
        "status": status,
        "descriptors": os.listdir("/proc/self/fd"),
        "leads": os.getsid(0) == os.getpid(),
        "directory": os.getcwd(),
        "words": (sys.argv, sys.orig_argv, sys.executable, sys.path, repr(sys.flags)),
        "environment": dict(os.environ),
        "streams": streams,
        "interrupted": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "threads": threading.active_count(),
        "main": (__name__, sys.modules["__main__"].__dict__["__name__"]),
    }


if __name__ == "__main__":
    if sys.argv[1] == "portrait":
        json.dump(portrait(), sys.stdout)
    else:
        exec(sys.argv[1])
