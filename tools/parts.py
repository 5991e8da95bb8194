"""The containerd and low-level runtime to use: the machine's own, or those of another release.

A shim works with many versions of both. Debian's releases have them, and a machine does not need to
install another release's packages to run them (``python -m tools.parts RELEASE…`` downloads them
in advance)::

    parts = Parts.of_release("trixie")
    with PrivateContainerd(parts=parts) as containerd:
        ...

Rules
- Packages come from Debian's archive, are unpacked in the cache of packages
  (:mod:`integration.simulated.packages`), and run from there.
- Each program runs with its own release's dynamic loader and libraries: their paths are written
  into a copy of the program. Environment variables would not work: runc executes itself again, and
  child processes must not load another release's libraries.
- A release means its current packages. Nothing here depends on their version.

Source: ld.so(8), elf(5) PT_INTERP and DT_RPATH; patchelf(1); Debian Policy 8.1 (names of libraries'
packages).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final, Self

from integration.simulated.packages import default_cache, unpack
from integration.simulated.programs import (
    INSTALLED,
    LOW_LEVEL,
    OF_CONTAINERD,
    SYSTEM_PATH,
    Programs,
)
from tools.errors import ProgramNotAdapted
from tools.packages import fetch

__all__ = [
    "INSTALLED",
    "SYSTEM_PATH",
    "Parts",
    "patchelf",
    "program_of_release",
    "programs_of_release",
    "set_loader",
]

_PACKAGES: Final = ("containerd", "runc", "crun")

# In separate directories, so that one release's containerd can run another's runc.
_DIRECTORIES: Final = {"containerd": OF_CONTAINERD, "low-level": LOW_LEVEL}


class Parts(Programs):
    """The programs of a containerd, as absolute paths; see :class:`Programs`."""

    @classmethod
    def of_release(
        cls, release: str, cache: str | None = None, *, say: Callable[[str], None] | None = None
    ) -> Self:
        """Return the programs of a Debian release.

        Args:
            release: its code name ("trixie"), or "sid".
            cache: the cache of packages; that of :func:`default_cache` if None.
            say: called with one line about each download.

        Raises:
            PackagesError: something is missing and cannot be downloaded.
            ProgramNotAdapted: a program could not be adapted to its own libraries.
        """
        where = _unpacked(_DIRECTORIES, _PACKAGES, release, release, cache, say)
        paths = (
            os.path.join(where, part, program)
            for part, programs in _DIRECTORIES.items()
            for program in programs
        )
        return cls(release, *paths)

    @classmethod
    def named(cls, name: str, *, say: Callable[[str], None] | None = None) -> Self:
        """Return the programs for a command-line argument.

        Args:
            name: "installed", or a release's code name.
        """
        return cls.installed() if name == INSTALLED else cls.of_release(name, say=say)

    def with_low_level_of(self, other: Programs) -> Self:
        """Return this containerd, with runc and crun of another release."""
        return replace(self, name=f"{self.name}+{other.name}", runc=other.runc, crun=other.crun)


def program_of_release(
    program: str,
    release: str,
    cache: str | None = None,
    *,
    say: Callable[[str], None] | None = None,
) -> str:
    """Return a single program of a Debian release, from the package of the same name.

    Args:
        release: the release's code name ("trixie"), or "sid".
        cache: the cache of packages; that of :func:`default_cache` if None.
        say: called with one line about each download.

    Returns:
        Its path; nothing else is in that directory.

    Raises:
        PackagesError: it is missing and cannot be downloaded.
        ProgramNotAdapted: it could not be adapted to its own libraries.
    """
    where = programs_of_release({program: (program,)}, [program], release, cache, say=say)
    return os.path.join(where, program, program)


def programs_of_release(
    parts: Mapping[str, Sequence[str]],
    packages: Sequence[str],
    release: str,
    cache: str | None = None,
    *,
    say: Callable[[str], None] | None = None,
) -> str:
    """Return programs of a Debian release, from packages of any name.

    Args:
        parts: the programs, by the name of their directory.
        packages: the packages with the programs; the first one names the directory in the cache.
        release: the release's code name ("trixie"), or "sid".
        cache: the cache of packages; that of :func:`default_cache` if None.
        say: called with one line about each download.

    Returns:
        The directory that contains the directories of ``parts``.

    Raises:
        PackagesError: something is missing and cannot be downloaded.
        ProgramNotAdapted: a program could not be adapted to its own libraries.
    """
    # A separate directory, so that a changed package does not affect the other programs.
    return _unpacked(parts, packages, release, f"{release}-{packages[0]}", cache, say)


def _unpacked(
    parts: Mapping[str, Sequence[str]],
    packages: Sequence[str],
    release: str,
    place: str,
    cache: str | None,
    say: Callable[[str], None] | None,
) -> str:
    """Unpack a release's packages in the cache; return their programs' directory."""
    # The path becomes part of the programs, so resolve links: it must not depend on the caller.
    into = os.path.join(os.path.realpath(default_cache() if cache is None else cache), place)
    directory = os.path.join(into, "unpacked")
    debs = fetch(packages, into, release=release, dependencies=_has_libraries, say=say)
    unpack(debs, directory, finish=lambda new: _adapt_all(new, directory, parts))
    return os.path.join(directory, "parts")


def _has_libraries(package: str) -> bool:
    """Whether a package has shared libraries: the programs run no program of their dependencies."""
    return package.startswith(("lib", "zlib")) and "perl" not in package


def _adapt_all(new: str, directory: str, parts: Mapping[str, Sequence[str]]) -> None:
    """Copy the programs of unpacked packages to their final directory, and adapt them.

    Args:
        new: where the packages are unpacked now.
        parts: the programs, by their directory below ``parts``.
    """
    libraries = _libraries(new)
    for part, programs in parts.items():
        os.makedirs(os.path.join(new, "parts", part))
        for program in programs:
            copy = os.path.join(new, "parts", part, program)
            found = shutil.which(program, path=f"{new}/usr/bin:{new}/usr/sbin")
            if found is None:
                raise ProgramNotAdapted(
                    f"the program {program}", found="the packages that should have it lack it"
                )
            shutil.copy(found, copy)
            _adapt(copy, [os.path.join(directory, library) for library in libraries], new)


def _adapt(program: str, libraries: list[str], root: str) -> None:
    """Make a program run with the loader and the libraries of its own release.

    Args:
        program: the file to change.
        libraries: the directories of the libraries at run time.
        root: where the packages are unpacked now.
    """
    asked = f"to run {os.path.basename(program)} with its own libraries"
    interpreter = patchelf(asked, "--print-interpreter", program).strip()
    name = os.path.basename(interpreter)
    loader = next(
        (
            os.path.join(library, name)
            for library, here in zip(libraries, _libraries(root), strict=True)
            if os.path.exists(os.path.join(root, here, name))
        ),
        None,
    )
    if loader is None:
        raise ProgramNotAdapted(asked, found=f"no {name} among the packages it depends on")
    set_loader(asked, program, loader, libraries)


def _libraries(root: str) -> list[str]:
    """Return the directories of shared libraries below ``root``, relative to it."""
    found = []
    for top in ("usr/lib", "lib"):
        directory = os.path.join(root, top)
        if os.path.isdir(directory) and not os.path.islink(directory):
            found += [
                os.path.join(top, name)
                for name in sorted(os.listdir(directory))
                if "-linux-" in name and os.path.isdir(os.path.join(directory, name))
            ]
    return found


def set_loader(asked: str, program: str, loader: str, libraries: Iterable[str]) -> None:
    """Change a program so that it runs with a dynamic loader and its libraries.

    Args:
        asked: the purpose, for an error message.
        loader: the path of the loader.
        libraries: the directories of the libraries.

    Raises:
        ProgramNotAdapted: patchelf is missing, or failed.
    """
    # DT_RPATH instead of DT_RUNPATH, because it also applies to the libraries of libraries. In this
    # order: in the other one, or at once, patchelf 0.18 breaks Go programs.
    patchelf(asked, "--force-rpath", "--set-rpath", ":".join(libraries), program)
    patchelf(asked, "--set-interpreter", loader, program)


def patchelf(asked: str, *arguments: str) -> str:
    """Run patchelf(1); return its output.

    Args:
        asked: the purpose, for an error message.

    Raises:
        ProgramNotAdapted: it is missing, or failed.
    """
    argv = ["patchelf", *arguments]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise ProgramNotAdapted(
            asked, found="no patchelf here", do="install the package patchelf"
        ) from None
    if done.returncode:
        raise ProgramNotAdapted(asked, found=done.stderr.strip() or "patchelf failed")
    return done.stdout


if __name__ == "__main__":
    for _release in sys.argv[1:]:
        Parts.of_release(_release, say=print)
