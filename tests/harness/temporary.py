"""Choose the directory for the tests' temporary files: TMPDIR, if tests can run in it.

Sockets lie deep below it, and their paths are limited to 107 bytes. Roots of containers are
overlays, whose upper directory cannot be on another overlay, such as the /tmp of a container.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from integration.simulated.containerd import is_on_overlay
from shim import syscalls

# The length of the longest TMPDIR with which the tests' sockets have valid paths.
_LONGEST: Final = 10
_SHORT: Final = "/tmp"
# Where a tmpfs is mounted: there its name, a letter and eight more, is short enough.
_SHORTEST: Final = "/"


@contextmanager
def usable_tmpdir() -> Iterator[str]:
    """Set TMPDIR to a directory in which tests can run, for this process and its children.

    Yields:
        What was wrong with the previous one, as a message; "" if nothing was.
    """
    before = os.environ.get("TMPDIR")
    directory, mounted, reasons = os.path.realpath(tempfile.gettempdir()), "", []
    if len(directory) > _LONGEST:
        reasons.append(f"{directory} leaves no room for addresses of sockets")
        directory = _SHORT
    if is_on_overlay(directory):
        reasons.append(f"roots of containers cannot be on the overlay at {directory}")
        # A name unlike those of tests, whose mounts copies of the mount namespace omit.
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
