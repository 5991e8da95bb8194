"""Writes the program that containerd executes: ``containerd-shim-nvidia-v1``.

It is a Python script whose first line names the interpreter with ``-I -S``: neither the
environment, nor the user's packages, nor the machine's can change what it runs, and leaving
out ``site`` halves its start. It names its libraries itself, after the standard library, so
that nothing in them can stand in for a standard module.

Run as ``python3 -m shim.launcher PATH --library DIR [--library DIR ...]``.

Source: execve(2), Interpreter scripts; python(1), -I and -S.
"""

from __future__ import annotations

import os
import sys

from shim import bundle
from shim.errors import BundleUnusable, LauncherUnusable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Final

# The kernel reads 256 bytes of a script, and needs the end of the first line among them.
_LONGEST_FIRST_LINE: Final = 255

_BODY: Final = """\
# Made by shim.launcher; see there.
import sys

sys.path += {library_paths!r}
from shim.verbs import main

main(revision={revision!r})
"""

# For an interpreter whose path the kernel would cut off or split at a space. To the shell the
# second line ends in a command; to Python it begins a string that the third ends.
_BY_SHELL: Final = """\
#!/bin/sh
'''exec' "{interpreter}" -IS "$0" "$@"
' '''
"""
_SPECIAL_TO_A_SHELL: Final = frozenset("\"'$`\\")


def launcher_text(interpreter: str, library_paths: Sequence[str], revision: str = "") -> str:
    """The program's text.

    Args:
        interpreter: the absolute path of a Python of at least 3.11.
        library_paths: absolute directories with our packages and those that they need.
        revision: the commit that it is built from, for ``-v``.

    Raises:
        LauncherUnusable: a path is not absolute, or has characters that no quoting saves.
    """
    asked = f"a launcher for {interpreter}"
    if not library_paths:
        raise LauncherUnusable(asked, found="no library directory", do="name one with --library")
    for path in (interpreter, *library_paths):
        if not os.path.isabs(path):
            raise LauncherUnusable(asked, found=f"{path!r} is relative", do="name its whole path")
        if not path.isprintable():
            raise LauncherUnusable(asked, found=f"{path!r} has unprintable characters")
    body = _BODY.format(library_paths=list(library_paths), revision=revision)
    first_line = f"#!{interpreter} -IS\n"
    if " " not in interpreter and len(os.fsencode(first_line)) <= _LONGEST_FIRST_LINE:
        return first_line + body
    if not _SPECIAL_TO_A_SHELL.isdisjoint(interpreter):
        raise LauncherUnusable(
            asked, found="characters that a shell would act on", do="install Python elsewhere"
        )
    return _BY_SHELL.format(interpreter=interpreter) + body


def write_launcher(
    path: str, *, interpreter: str, library_paths: Sequence[str], revision: str = ""
) -> None:
    """Write the program, executable for all, whole or not at all.

    Args:
        path: where; what is there is replaced.
        interpreter: see :func:`launcher_text`.
        library_paths: see :func:`launcher_text`.
        revision: see :func:`launcher_text`.

    Raises:
        LauncherUnusable: the paths are unusable, or the file cannot be written.
    """
    text = launcher_text(interpreter, library_paths, revision)
    try:
        bundle.write(path, text.encode(), mode=0o755)
    except BundleUnusable as error:
        raise LauncherUnusable(f"to write {path}", found=error.found) from error


def _main() -> None:
    import argparse  # noqa: PLC0415 - this part is never run by containerd

    parser = argparse.ArgumentParser(
        prog="python3 -m shim.launcher", description="Write the program that containerd executes."
    )
    parser.add_argument("path", help="where to write it, ending in containerd-shim-nvidia-v1")
    parser.add_argument("--interpreter", default=os.path.realpath(sys.executable))
    parser.add_argument("--library", action="append", required=True, metavar="DIR")
    parser.add_argument("--revision", default="")
    asked = parser.parse_args()
    try:
        write_launcher(
            asked.path,
            interpreter=asked.interpreter,
            library_paths=asked.library,
            revision=asked.revision,
        )
    except LauncherUnusable as error:
        sys.exit(str(error))


if __name__ == "__main__":
    _main()
