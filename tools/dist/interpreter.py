"""``runtime/``: CPython as Debian builds it, with the libraries that the tree needs.

It is taken from one release of Debian, whatever the tree is built on: its libc asks for nothing
newer than Linux 3.2, and a tree is the same wherever it is built. Its Python has immortal objects,
without which an idle shim takes twice the memory (:mod:`shim.forkserver.memory`). Of the standard
library that is left out which no program of a node uses; with it go libraries that would only be
there for that.

Source: packages.debian.org; ld.so(8); the Python documentation, sys.prefix (getpath).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from integration.simulated.packages import default_cache, unpack
from tools.errors import LibraryMissing, TreeNotBuilt
from tools.packages import fetch

RELEASE: Final = "trixie"
PYTHON: Final = "python3.13"

_WANTED: Final = (
    f"{PYTHON}-minimal",
    f"lib{PYTHON}-minimal",
    f"lib{PYTHON}-stdlib",
    "libc6",
    "libgcc-s1",
    "libstdc++6",
    # What the tree's other packages are installed with.
    "python3-pip-whl",
)

# What is loaded by no program of the tree, but by a driver's libraries, and by libc itself.
_LOADED: Final = (
    "libdl.so.2", "libgcc_s.so.1", "libm.so.6", "libpthread.so.0", "librt.so.1", "libstdc++.so.6",
)  # fmt: skip

# For developers, for other systems, for protocols and formats of other times, and what needs a
# database, a terminal of its own, or X11.
_LEFT_OUT: Final = frozenset({
    "EXTERNALLY-MANAGED", "__hello__.py", "__phello__", "_aix_support.py", "_android_support.py",
    "_apple_support.py", "_ios_support.py", "_osx_support.py", "_pyrepl", "antigravity.py",
    "curses", "dbm", "doctest.py", "ftplib.py", "idlelib", "imaplib.py", "mailbox.py",
    "modulefinder.py", "poplib.py", "pyclbr.py", "pydoc.py", "pydoc_data", "sitecustomize.py",
    "smtplib.py", "sqlite3", "tabnanny.py", "test", "this.py", "tkinter", "turtle.py",
    "turtledemo", "unittest", "venv", "webbrowser.py", "xmlrpc", "__pycache__",
})  # fmt: skip
_EXTENSIONS_LEFT_OUT: Final = re.compile(
    r"_codecs_|_ctypes_test|_curses|_dbm|_lsprof|_multibytecodec|_sqlite3|_test|_xx|readline|xx"
)

# Named by an administrator for programs with the system's own libc. The loader would say of each
# library that does not fit ours that it does not, and containerd reads what "start" says as its
# answer. The path that is written in place of it is as long, and cannot be.
_PRELOADED: Final = b"/etc/ld.so.preload\0"
_NOTHING: Final = b"/dev/null/preload.\0"

_LOADER: Final = r"lib/[-\w]+/ld-linux[-\w]*\.so\.\d+"
_NEEDED: Final = re.compile(r"\(NEEDED\)\s+Shared library: \[([^]]+)\]")


@dataclass(frozen=True, slots=True)
class Packages:
    """Debian's packages, unpacked one by one."""

    roots: Mapping[str, str]  # where each is, by the name of its file
    # for each file of theirs its path below the root, and the name of the package
    files: tuple[tuple[str, str], ...]

    @classmethod
    def have(cls, *, say: Callable[[str], None] | None = None) -> Packages:
        """Download what is not there yet, and unpack it.

        Raises:
            PackagesError: it cannot be had.
        """
        cache = os.path.join(default_cache(), "dist")
        roots = {}
        for file in fetch(_WANTED, cache, release=RELEASE, dependencies=True, say=say):
            name = os.path.basename(file)
            roots[name] = os.path.join(cache, "unpacked", name.split("_", maxsplit=1)[0])
            unpack([file], roots[name])
        files = [
            (os.path.relpath(os.path.join(above, name), root), package)
            for package, root in roots.items()
            for above, _, names in sorted(os.walk(root))
            for name in sorted(names)
        ]
        return cls(roots, tuple(files))

    def find(self, pattern: str) -> tuple[str, str]:
        """The first file whose path below its package matches.

        Args:
            pattern: a regular expression for the end of its path, from a slash on.

        Returns:
            The package's file name, and the file's path, which is no link.

        Raises:
            LibraryMissing: there is none.
        """
        matches = re.compile(rf"(?:^|/){pattern}$").search
        for name, package in self.files:
            path = os.path.join(self.roots[package], name)
            if matches(name) and os.path.exists(path):
                return package, os.path.realpath(path)
        raise LibraryMissing(
            f"{pattern} for the tree", found=f"none in {len(self.roots)} packages of {RELEASE}"
        )

    def standard_libraries(self) -> list[tuple[str, str]]:
        """The packages that have a part of the standard library, and where each has it."""
        parts = [
            (package, os.path.join(root, "usr", "lib", PYTHON))
            for package, root in self.roots.items()
        ]
        return [(package, path) for package, path in parts if os.path.isdir(path)]


def place(runtime: str, packages: Packages) -> set[str]:
    """Make ``runtime/``, but for the libraries of what else is in the tree.

    Returns:
        The packages that something was taken from.

    Raises:
        LibraryMissing: something is not in the packages.
    """
    used = set()
    library = os.path.join(runtime, "lib", PYTHON)
    os.makedirs(os.path.join(runtime, "bin"))
    package, program = packages.find(f"usr/bin/{PYTHON}")
    used.add(package)
    shutil.copy(program, os.path.join(runtime, "bin", "python"))
    for package, standard in packages.standard_libraries():
        used.add(package)
        shutil.copytree(standard, library, ignore=_left_out, dirs_exist_ok=True)
    return used


def place_libraries(tree: str, packages: Packages) -> set[str]:
    """Give a tree the libraries that its programs need, its loader, and links to that.

    Args:
        tree: where it lies; all of its programs and modules are there.
        packages: what the libraries are taken from.

    Returns:
        The packages that something was taken from.

    Raises:
        LibraryMissing: a library is not in the packages.
    """
    used = set()
    directory = os.path.join(tree, "runtime", "lib")
    package, loader = packages.find(_LOADER)
    used.add(package)
    _copy_loader(loader, directory)
    have = {os.path.basename(loader)}
    wanted = set(_LOADED) | needed(elf_files(tree))
    while missing := wanted - have:
        for name in sorted(missing):
            package, path = packages.find(re.escape(name))
            used.add(package)
            shutil.copy(path, os.path.join(directory, name))
        have |= missing
        wanted |= needed(os.path.join(directory, name) for name in missing)
    os.makedirs(os.path.join(tree, "runtime", "as"))
    for name in ("containerd-shim-nvidia-v1", "nvshim", "python3"):
        target = os.path.join("..", "lib", os.path.basename(loader))
        os.symlink(target, os.path.join(tree, "runtime", "as", name))
    return used


def _copy_loader(loader: str, directory: str) -> None:
    with open(loader, "rb") as file:
        content = file.read()
    if content.count(_PRELOADED) != 1:
        raise TreeNotBuilt(
            f"the loader {os.path.basename(loader)}",
            found=f"{content.count(_PRELOADED)} times {_PRELOADED!r} in it",
        )
    with open(os.path.join(directory, os.path.basename(loader)), "wb") as file:
        file.write(content.replace(_PRELOADED, _NOTHING))


def needed(files: Iterable[str]) -> set[str]:
    """The names of the libraries that programs and libraries say they need.

    Raises:
        TreeNotBuilt: they cannot be read.
    """
    paths = list(files)
    if not paths:
        return set()
    argv = ["readelf", "--wide", "--dynamic", *paths]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
    except OSError as error:
        raise TreeNotBuilt(
            "the libraries that the tree needs", found="no readelf", do="install binutils"
        ) from error
    return set(_NEEDED.findall(done.stdout))


def elf_files(directory: str) -> list[str]:
    """The programs and libraries below a directory."""
    found = []
    for above, _, names in sorted(os.walk(directory)):
        for name in sorted(names):
            path = os.path.join(above, name)
            if not os.path.islink(path):
                with open(path, "rb") as file:
                    if file.read(4) == b"\x7fELF":
                        found.append(path)
    return found


def pip(packages: Packages, *arguments: str) -> None:
    """Run pip by the interpreter as it is in the packages, so that it finds what fits that.

    Raises:
        TreeNotBuilt: it failed.
    """
    _, program = packages.find(f"usr/bin/{PYTHON}")
    _, loader = packages.find(_LOADER)
    _, wheel = packages.find(r"usr/share/python-wheels/pip-.*\.whl")
    directories = {
        os.path.dirname(os.path.join(packages.roots[package], name))
        for name, package in packages.files
        if re.search(r"lib/[-\w]+/lib[^/]+\.so\.\d+$", name)
    }
    # The standard library is in two packages.
    parts = [path for _, path in packages.standard_libraries()]
    argv = [
        loader, "--library-path", ":".join(sorted(directories)), program, "-S",
        os.path.join(wheel, "pip"), *arguments,
    ]  # fmt: skip
    environment = {
        **os.environ,
        "PYTHONHOME": os.path.dirname(os.path.dirname(os.path.dirname(parts[0]))),
        "PYTHONPATH": ":".join([*parts, *(os.path.join(path, "lib-dynload") for path in parts)]),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["no word why"]
        why = next((line for line in said if line.startswith("ERROR")), said[-1])
        raise TreeNotBuilt(f"pip {arguments[0]}", found=why, do="check the network")


def _left_out(directory: str, names: list[str]) -> set[str]:
    if os.path.basename(directory) == "lib-dynload":
        return {name for name in names if _EXTENSIONS_LEFT_OUT.match(name)}
    top = os.path.basename(directory) == PYTHON
    return {
        name
        for name in names
        if name in {"__pycache__", "test", "tests"}
        or (top and (name in _LEFT_OUT or name.startswith("_sysconfigdata")))
    }
