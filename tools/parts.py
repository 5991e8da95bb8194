"""Which containerd, and which low-level runtime: the machine's own, or those of another release.

A shim meets many versions of both. Debian's releases have them side by side, and a machine
needs nothing installed to run those of another one (``python -m tools.parts RELEASE…`` has
them ready)::

    parts = Parts.of_release("trixie")
    with PrivateContainerd(parts=parts) as containerd:
        ...

Rules
- What is not installed is taken from Debian's archive, unpacked in the cache of packages
  (:mod:`integration.simulated.packages`), and run from there.
- Its programs are asked to run with the dynamic loader and the libraries of their own release,
  by name: the paths are written into a copy of each. Environment variables would not do: runc
  executes itself again, and what a program starts must not meet another release's libraries.
- A release is what it is today. Nothing here depends on which version that is.

Source: ld.so(8), elf(5) PT_INTERP and DT_RPATH; patchelf(1).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
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
]

_PACKAGES: Final = ("containerd", "runc", "crun")

# Apart from one another, so that one release's containerd can run another's runc.
_DIRECTORIES: Final = {"containerd": OF_CONTAINERD, "low-level": LOW_LEVEL}


class Parts(Programs):
    """The programs that a containerd is made of, as absolute paths; see :class:`Programs`."""

    @classmethod
    def of_release(
        cls, release: str, cache: str | None = None, *, say: Callable[[str], None] | None = None
    ) -> Self:
        """What a release of Debian has.

        Args:
            release: its code name ("trixie"), or "sid".
            cache: the cache of packages; that of :func:`default_cache` if None.
            say: told in one line what is being downloaded, when something is.

        Raises:
            PackagesError: something is missing and cannot be fetched.
            ProgramNotAdapted: a program could not be made to run beside its libraries.
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
        """Those that a person asks for.

        Args:
            name: "installed", or a release's code name.
        """
        return cls.installed() if name == INSTALLED else cls.of_release(name, say=say)

    def with_low_level_of(self, other: Programs) -> Self:
        """This containerd, with runc and crun of another release."""
        return replace(self, name=f"{self.name}+{other.name}", runc=other.runc, crun=other.crun)


def program_of_release(
    program: str,
    release: str,
    cache: str | None = None,
    *,
    say: Callable[[str], None] | None = None,
) -> str:
    """A single program that a release of Debian has, in a package of the same name.

    Args:
        release: the release's code name ("trixie"), or "sid".
        cache: the cache of packages; that of :func:`default_cache` if None.
        say: told in one line what is being downloaded, when something is.

    Returns:
        Its path; nothing else is in that directory.

    Raises:
        PackagesError: it is missing and cannot be fetched.
        ProgramNotAdapted: it could not be made to run beside its libraries.
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
    """Programs that a release of Debian has in packages of any names.

    Args:
        parts: the programs, by the name of the directory that they are to be in.
        packages: the packages that have them; the first gives the place in the cache its name.
        release: the release's code name ("trixie"), or "sid".
        cache: the cache of packages; that of :func:`default_cache` if None.
        say: told in one line what is being downloaded, when something is.

    Returns:
        The directory in which the directories of ``parts`` are.

    Raises:
        PackagesError: something is missing and cannot be fetched.
        ProgramNotAdapted: a program could not be made to run beside its libraries.
    """
    # A directory of its own: when the release changes, the other programs need not.
    return _unpacked(parts, packages, release, f"{release}-{packages[0]}", cache, say)


def _unpacked(
    parts: Mapping[str, Sequence[str]],
    packages: Sequence[str],
    release: str,
    place: str,
    cache: str | None,
    say: Callable[[str], None] | None,
) -> str:
    """Programs of a release's packages, in a place of the cache; their directory."""
    # The path becomes part of the programs: it must hold whoever comes to them by a link.
    into = os.path.join(os.path.realpath(default_cache() if cache is None else cache), place)
    directory = os.path.join(into, "unpacked")
    debs = fetch(packages, into, release=release, dependencies=True, say=say)
    unpack(debs, directory, finish=lambda new: _adapt_all(new, directory, parts))
    return os.path.join(directory, "parts")


def _adapt_all(new: str, directory: str, parts: Mapping[str, Sequence[str]]) -> None:
    """Copy the programs of unpacked packages to where they are run from, and adapt them.

    Args:
        new: where the packages are unpacked now.
        parts: the programs, by the directory below ``parts`` that they are to be in.
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
        program: what to change, in its place.
        libraries: the directories of the libraries, as they are when it runs.
        root: where the packages are unpacked now.
    """
    asked = f"to run {os.path.basename(program)} beside its own libraries"
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
    # DT_RPATH, and not its successor: it holds for the libraries of libraries too.
    patchelf(
        asked, "--set-interpreter", loader, "--force-rpath", "--set-rpath", ":".join(libraries),
        program,
    )  # fmt: skip


def _libraries(root: str) -> list[str]:
    """The directories of shared libraries below ``root``, relative to it."""
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


def patchelf(asked: str, *arguments: str) -> str:
    """What patchelf(1) answers.

    Args:
        asked: what it is for, in words.

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
