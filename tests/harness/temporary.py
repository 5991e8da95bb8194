"""Where the tests' temporary directories are: what TMPDIR names, if tests can run in it.

Addresses of sockets lie deep below it, and end at 107 bytes. Roots of containers are overlays,
whose upper directory cannot lie on another overlay, such as the /tmp of a container.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from integration.simulated.containerd import is_on_overlay
from shim import syscalls

# The longest address in the tests is this much shorter than 107 bytes below /tmp.
_LONGEST: Final = 10
_SHORT: Final = "/tmp"
# Where one of ours is made: there its name, a letter and eight others, is short enough.
_SHORTEST: Final = "/"


@contextmanager
def usable_tmpdir() -> Iterator[str]:
    """Have TMPDIR name a directory in which tests can run, for this process and its children.

    Yields:
        What was wrong with the one that it named before, for people; "" if nothing was.
    """
    before = os.environ.get("TMPDIR")
    directory, mounted, reasons = os.path.realpath(tempfile.gettempdir()), "", []
    if len(directory) > _LONGEST:
        reasons.append(f"{directory} leaves no room for addresses of sockets")
        directory = _SHORT
    if is_on_overlay(directory):
        reasons.append(f"roots of containers cannot be on the overlay at {directory}")
        # Its name is none of ours: copies of the mount namespace leave those of tests out.
        directory = mounted = tempfile.mkdtemp(prefix="t", dir=_SHORTEST)
        syscalls.mount("tmpfs", mounted, "tmpfs", 0, "mode=1777")
    if reasons:
        _name(directory)
    try:
        yield f"{directory}, for {', and '.join(reasons)}" if reasons else ""
    finally:
        if reasons:
            _name(before)
        if mounted:
            syscalls.umount(mounted, syscalls.MNT_DETACH)
            os.rmdir(mounted)


def _name(directory: str | None) -> None:
    os.environ.pop("TMPDIR", None)
    if directory is not None:
        os.environ["TMPDIR"] = directory
    tempfile.tempdir = None
