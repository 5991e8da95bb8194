"""Write the program that containerd executes, for a checkout; and compile the C programs.

It is a Python script whose first line names the interpreter with ``-I -S``: the environment, the
user's packages and the machine's packages do not affect it, and leaving out ``site`` halves its
start time. The script adds its libraries after the standard library, so that they cannot replace a
standard module.

With ``--compiler`` the script gets the name PATH.py, and PATH becomes a native program
(:file:`shim/forkserver/launcher.c`). It lets the fork server run the verb if there is one, and
executes the script otherwise. It answers a ``delete`` without anything to delete by itself
(:file:`fast_delete.c`). Without it every ``start`` is cold.

In a self-contained tree (``make dist``) the programs contain no paths: both find their files
relative to their own (:file:`tree.c`).

Run as ``python3 -m tools.launcher PATH --library DIR [--library DIR ...] [--compiler
gcc]``.

Source: execve(2), Interpreter scripts; python(1), -I and -S.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Final

import shim
from api.errors import one_line
from shim import PROGRAM, bundle, files, sockets
from shim.errors import BundleUnusable
from shim.verbs import handover, warmstart
from tools.errors import LauncherUnusable

SOURCES: Final = ("launcher.c", "fast_delete.c", "tree.c")
# Static, because that starts in a third of the time and runs on hosts with another libc.
_C_FLAGS: Final = ("-std=gnu11", "-Os", "-Wall", "-Wextra", "-Werror", "-static", "-s")
# Values that the C sources take from the Python sources.
_MACROS: Final[dict[str, int | Sequence[str]]] = {
    "NAME": [PROGRAM],
    "SUFFIX": [warmstart.SUFFIX],
    "DIRECTORY": [sockets.DIRECTORY],
    "SWITCH": [warmstart.SWITCH],
    "ACCEPTED": warmstart.ACCEPTED[0],
    "READY": warmstart.READY[0],
    "GO": handover.GO[0],
    "READY_LINK": ord(warmstart.READY_LINK),
    "STARTING_LINK": ord(warmstart.STARTING_LINK),
    "LONGEST": warmstart.LARGEST_REQUEST,
    "LONGEST_ID": files.LONGEST_ID,
    "FILES_AFTER_DELETE": bundle.FILES_AFTER_DELETE,
}
_DIRECTORY: Final = os.path.join(os.path.dirname(os.path.abspath(shim.__file__)), "forkserver")

# The kernel reads 256 bytes of a script, which must include the end of the first line.
_LONGEST_FIRST_LINE: Final = 255

_BODY: Final = """\
# Made by tools.launcher; see there.
import sys

sys.path += {library_paths!r}
from shim.__main__ import main

main(revision={revision!r})
"""

# The sibling directory lib of the program's directory. The tree's interpreter runs this script; it
# cannot be executed itself.
_IN_A_TREE: Final = """\
# Made by tools.launcher; see there.
import sys

sys.path.append(__file__.rpartition("/bin/")[0] + "/lib")
from shim.__main__ import main

main(revision={revision!r})
"""


def launcher_text(interpreter: str, library_paths: Sequence[str], revision: str = "") -> str:
    """Return the program's text.

    Args:
        interpreter: the absolute path of a Python of at least 3.11.
        library_paths: absolute directories with our packages and their dependencies.
        revision: the commit that it is built from, for ``-v``.

    Raises:
        LauncherUnusable: a path is not absolute, or the kernel would cut it off or split it.
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
    if " " in interpreter or len(os.fsencode(first_line)) > _LONGEST_FIRST_LINE:
        raise LauncherUnusable(
            asked,
            found="a path that is too long or has spaces for a script's first line",
            do="use another Python",
        )
    return first_line + body


def tree_text(revision: str = "") -> str:
    """Return the program's text in a self-contained tree, where it is ``bin/NAME.py``.

    Args:
        revision: the commit that it is built from, for ``-v``.
    """
    return _IN_A_TREE.format(revision=revision)


def write_launcher(
    path: str, *, interpreter: str, library_paths: Sequence[str], revision: str = ""
) -> None:
    """Write the program, executable for all, atomically.

    Args:
        path: where; an existing file is replaced.

    Raises:
        LauncherUnusable: the paths are unusable, or the file cannot be written.
    """
    text = launcher_text(interpreter, library_paths, revision)
    try:
        files.write(path, text.encode(), mode=0o755)
    except BundleUnusable as error:
        raise LauncherUnusable(f"to write {path}", found=error.found) from error


def compile_native(
    path: str, *, compiler: str, sources: Sequence[str] = (), define: str = ""
) -> None:
    """Compile the native program that runs before the script, atomically.

    Args:
        path: where; the script is next to it, with ``.py`` at the end of its name.
        compiler: a C compiler, with the arguments of gcc.
        sources: another program's sources, instead of the launcher's.
        define: a macro; ``TREE`` for a launcher that is part of a self-contained tree.

    Raises:
        LauncherUnusable: it could not be compiled.
    """
    sources = sources or [os.path.join(_DIRECTORY, name) for name in SOURCES]
    defined = [f"-D{name}={_literal(value)}" for name, value in _MACROS.items()]
    defined += [f"-D{define}"] if define else []
    argv = [compiler, *_C_FLAGS, f"-I{_DIRECTORY}", *defined, "-o", f"{path}.new", *sources]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
    except OSError as error:
        raise LauncherUnusable(
            f"to compile {path}",
            found=f"{compiler}: {os.strerror(error.errno or 0).lower()}",
            do="install a C compiler, or leave --compiler out",
        ) from error
    if done.returncode:
        raise LauncherUnusable(
            f"to compile {path}",
            found=one_line(done.stderr) or f"{compiler} ended with {done.returncode}",
            do="install libc6-dev, or leave --compiler out",
        )
    os.rename(f"{path}.new", path)


def _literal(value: int | Sequence[str]) -> str:
    """Return a number or texts as C literals; our texts need no escapes."""
    return str(value) if isinstance(value, int) else ",".join(f'"{text}"' for text in value)


def _main() -> None:
    parser = argparse.ArgumentParser(
        prog="python3 -m tools.launcher",
        description="Write the program that containerd executes.",
    )
    parser.add_argument("path", help="where to write it, ending in containerd-shim-nvidia-v1")
    parser.add_argument("--interpreter", default=os.path.realpath(sys.executable))
    parser.add_argument("--library", action="append", required=True, metavar="DIR")
    parser.add_argument("--revision", default="")
    parser.add_argument("--compiler", help="a C compiler, for a native program before the script")
    asked = parser.parse_args()
    try:
        write_launcher(
            asked.path + warmstart.SUFFIX if asked.compiler else asked.path,
            interpreter=asked.interpreter,
            library_paths=asked.library,
            revision=asked.revision,
        )
        if asked.compiler:
            compile_native(asked.path, compiler=asked.compiler)
    except LauncherUnusable as error:
        sys.exit(str(error))


if __name__ == "__main__":
    _main()
