"""Build the command line for a driver program, on the host or in the driver's own root."""

from __future__ import annotations

import json
import os
import sys
from typing import Any, Final

from hooks.node.driver import Driver
from hooks.node.fingerprint import Fingerprint
from hooks.words import Arch

__all__ = ["launch_line", "where_programs_run"]

_CHILD: Final = os.path.join(os.path.dirname(os.path.abspath(__file__)), "driver_launch_child.py")

_LIBCUDA: Final = "libcuda.so.{v}"
_LOADERS: Final = {
    Arch.X86_64: "/lib64/ld-linux-x86-64.so.2",
    Arch.AARCH64: "/lib/ld-linux-aarch64.so.1",
}


def launch_line(program: str, root: str, environment: dict[str, str], **more: Any) -> list[str]:
    """Return the command line that starts a driver program.

    Args:
        program: its path below the root.
        root: its root directory; "" for the host's.
        environment: the complete environment of the program; the command itself needs none.
        more: further keys of :mod:`integration.driver_launch_child`.
    """
    request = {"program": program, "environment": environment, "root": root}
    return [sys.executable, "-I", "-S", _CHILD, json.dumps({**request, **more})]


def where_programs_run(driver: Driver) -> tuple[str, str]:
    """Return the root directory of the driver's programs, and their LD_LIBRARY_PATH.

    Returns:
        The root, "" for the host's; the path, "" if the loader finds the libraries itself.
    """
    loader = _LOADERS.get(driver.arch, "")
    apart = (
        driver.root != "/" and bool(loader) and Fingerprint(driver.root).file(loader) is not None
    )
    root = driver.root if apart else ""
    if driver.root == "/":
        return root, ""  # the host's loader finds the host's driver
    libraries = {
        os.path.dirname(library.source)
        for library in driver.libraries
        if library.row == _LIBCUDA and library.arch is driver.arch
    }
    return root, ":".join(sorted(path.removeprefix(root) for path in libraries))
