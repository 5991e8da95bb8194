"""The Python packages that tests need, for the guest's interpreter.

The guest has Debian's Python and none of the packages from PyPI. They are had by the host, in
the versions and with the hashes of the requirements files, and compiled by the guest's own
interpreter, which runs on the host beside its libc: in the guest it would take minutes.

Source: pip-install(1), "--python-version"; ld.so(8), "--library-path".
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from typing import Final

from tests.tools.errors import PythonNotPrepared
from tests.tools.vm import tools
from tests.tools.vm.guests import Guest

_LIBRARIES: Final = "usr/lib/x86_64-linux-gnu"
_LOADER: Final = f"{_LIBRARIES}/ld-linux-x86-64.so.2"


def install(guest: Guest, requirements: str, directory: str) -> None:
    """Have what a requirements file names.

    Args:
        guest: for whose interpreter.
        requirements: the file, with hashes.
        directory: where to; it must not exist.

    Raises:
        PythonNotPrepared: something cannot be had; nothing is left.
    """
    argv = [
        sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
        "--no-compile", "--require-hashes", "--only-binary=:all:", "--no-warn-conflicts",
        f"--python-version={guest.python}", "--target", directory, "--requirement", requirements,
    ]  # fmt: skip
    try:
        tools.run(PythonNotPrepared, f"{requirements} for Python {guest.python}", argv)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise


def compile_modules(root: str, directories: Sequence[str]) -> None:
    """Compile what is not compiled yet, as the guest's interpreter does.

    Args:
        root: the guest's root.
        directories: where the modules are.

    Raises:
        PythonNotPrepared: the interpreter does not run on this machine.
    """
    libraries = os.path.join(root, _LIBRARIES)
    # Some packages ship templates and old syntax, on which this ends with 1: they stay as they
    # are, and whoever imports one will see why.
    script = "import compileall, sys\nfor d in sys.argv[1:]: compileall.compile_dir(d, quiet=2)\n"
    argv = [
        os.path.join(root, _LOADER), "--library-path", libraries,
        os.path.join(root, "usr/bin/python3"), "-S", "-c", script, *directories,
    ]  # fmt: skip
    tools.run(
        PythonNotPrepared,
        "to compile modules with the guest's Python",
        argv,
        environment={"PYTHONHOME": os.path.join(root, "usr")},
    )
