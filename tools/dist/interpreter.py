"""``runtime/``: CPython as Debian builds it, with the libraries that the tree needs.

It comes from one fixed release of Debian, so a tree is the same wherever it is built, and its libc
needs only Linux 3.2. Its Python has immortal objects, without which an idle shim uses twice the
memory (:mod:`shim.forkserver.memory`). Modules of the standard library that no program on a node
uses are left out, with their libraries.

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
    # Installs the tree's other packages.
    "python3-pip-whl",
)

# Libraries that only a driver's libraries and libc itself load.
_LOADED: Final = (
    "libdl.so.2", "libgcc_s.so.1", "libm.so.6", "libpthread.so.0", "librt.so.1", "libstdc++.so.6",
)  # fmt: skip

# Modules for developers, for other systems, for old protocols and formats, and those that need a
# database, a terminal or X11.
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

# An administrator's file for programs with the system's own libc. The loader would print an error
# for each library that does not fit our libc, and containerd reads the output of "start" as its
# answer. The replacement has the same length, and cannot exist.
_PRELOADED: Final = b"/etc/ld.so.preload\0"
_NOTHING: Final = b"/dev/null/preload.\0"

_LOADER: Final = r"lib/[-\w]+/ld-linux[-\w]*\.so\.\d+"
_NEEDED: Final = re.compile(r"\(NEEDED\)\s+Shared library: \[([^]]+)\]")


@dataclass(frozen=True, slots=True)
class Packages:
    """Debian's packages, each unpacked in its directory."""

    roots: Mapping[str, str]  # the directory of each, by the name of its file
    # for each file of theirs its path below the root, and the name of the package
    files: tuple[tuple[str, str], ...]

    @classmethod
    def have(cls, *, say: Callable[[str], None] | None = None) -> Packages:
        """Download the missing packages, and unpack them.

        Raises:
            PackagesError: a package cannot be downloaded.
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
        """Find the first file whose path in its package matches.

        Args:
            pattern: a regular expression for the end of its path, from a slash on.

        Returns:
            The package's file name, and the file's path, which is not a link.

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
        """Return the packages that contain a part of the standard library, and its path in each."""
        parts = [
            (package, os.path.join(root, "usr", "lib", PYTHON))
            for package, root in self.roots.items()
        ]
        return [(package, path) for package, path in parts if os.path.isdir(path)]


def place(runtime: str, packages: Packages) -> set[str]:
    """Create ``runtime/``, without the libraries of the tree's other parts.

    Returns:
        The packages that it uses.

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
    """Add the libraries that a tree's programs need, its loader, and links to that.

    Args:
        tree: its directory, with all of its programs and modules.
        packages: the packages with the libraries.

    Returns:
        The packages that it uses.

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
    """Return the names of the libraries that programs and libraries need.

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
    """Return the programs and libraries below a directory."""
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
    """Run pip with the packages' interpreter, so that it selects matching wheels.

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
    # Two packages contain the standard library.
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
