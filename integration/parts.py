"""Which containerd, and which low-level runtime: the machine's own, or those of another release.

A shim meets many versions of both. Debian's releases have them side by side, and a machine
needs nothing installed to run those of another one (``python -m integration.parts RELEASE…`` has
them ready)::

    parts = Parts.of_release("trixie")
    with PrivateContainerd(parts=parts) as containerd:
        ...

Rules
- What is not installed is taken from Debian's archive, unpacked in the cache of packages
  (:mod:`integration.packages`), and run from there.
- Its programs are asked to run with the dynamic loader and the libraries of their own release,
  by name: the paths are written into a copy of each. Environment variables would not do: runc
  executes itself again, and what a program starts must not meet another release's libraries.
- A release is what it is today. Nothing here depends on which version that is.

Source: ld.so(8), elf(5) PT_INTERP and DT_RPATH; patchelf(1).
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Self

from integration.containerd_errors import ContainerdNotInstalled, ProgramNotAdapted
from integration.packages import default_cache, fetch, unpack

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

# Programs are looked up where a system service finds them, not where a developer does.
SYSTEM_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

INSTALLED: Final = "installed"

_PACKAGES: Final = ("containerd", "runc", "crun")

# Apart from one another, so that one release's containerd can run another's runc.
_OF_CONTAINERD: Final = ("containerd", "ctr", "containerd-shim-runc-v2")
_LOW_LEVEL: Final = ("runc", "crun")
_DIRECTORIES: Final = {"containerd": _OF_CONTAINERD, "low-level": _LOW_LEVEL}


@dataclass(frozen=True, slots=True)
class Parts:
    """The programs that a containerd is made of, as absolute paths.

    Attributes:
        name: "installed", or the release that they are of.
        containerd: the daemon.
        ctr: its client.
        shim: containerd-shim-runc-v2.
        runc: the low-level runtime that shims call unless told otherwise.
        crun: the other one.
    """

    name: str
    containerd: str
    ctr: str
    shim: str
    runc: str
    crun: str

    @classmethod
    def installed(cls) -> Self:
        """What the machine has.

        Raises:
            ContainerdNotInstalled: a program is missing.
        """
        return cls(INSTALLED, *(_installed(program) for program in (*_OF_CONTAINERD, *_LOW_LEVEL)))

    @classmethod
    def of_release(
        cls, release: str, cache: str | None = None, *, say: Callable[[str], None] | None = None
    ) -> Self:
        """What a release of Debian has.

        Args:
            release: its code name ("trixie"), or "sid".
            cache: the cache of packages; :func:`integration.packages.default_cache` if None.
            say: told in one line what is being downloaded, when something is.

        Raises:
            PackagesError: something is missing and cannot be fetched.
            ProgramNotAdapted: a program could not be made to run beside its libraries.
        """
        # The path becomes part of the programs: it must hold whoever comes to them by a link.
        into = os.path.join(os.path.realpath(default_cache() if cache is None else cache), release)
        directory = os.path.join(into, "unpacked")
        debs = fetch(_PACKAGES, into, release=release, dependencies=True, say=say)
        unpack(debs, directory, finish=lambda new: _adapt_all(new, directory, _DIRECTORIES))
        paths = (
            os.path.join(directory, "parts", part, program)
            for part, programs in _DIRECTORIES.items()
            for program in programs
        )
        return cls(release, *paths)

    @classmethod
    def named(cls, name: str, *, say: Callable[[str], None] | None = None) -> Self:
        """Those that a person asks for.

        Args:
            name: "installed", or a release's code name.
            say: see :meth:`of_release`.
        """
        return cls.installed() if name == INSTALLED else cls.of_release(name, say=say)

    def with_low_level_of(self, other: Parts) -> Self:
        """This containerd, with runc and crun of another release."""
        return replace(self, name=f"{self.name}+{other.name}", runc=other.runc, crun=other.crun)

    @property
    def path(self) -> str:
        """A search path on which these programs come first."""
        system = SYSTEM_PATH.split(":")
        own = dict.fromkeys(os.path.dirname(program) for program in (self.runc, self.containerd))
        return ":".join((*(directory for directory in own if directory not in system), *system))

    @property
    def version(self) -> tuple[int, int]:
        """The version of containerd: (1, 7)."""
        return _version_of(self.containerd)


@functools.cache
def _version_of(containerd: str) -> tuple[int, int]:
    done = subprocess.run([containerd, "--version"], capture_output=True, text=True, check=True)
    # containerd github.com/containerd/containerd 1.7.24~ds1 1.7.24~ds1-6+deb13u1
    match = re.search(r" v?(\d+)\.(\d+)\.", done.stdout)
    if match is None:
        raise ContainerdNotInstalled(
            f"the version of {containerd}", found=done.stdout.strip() or "nothing"
        )
    return int(match[1]), int(match[2])


def program_of_release(
    program: str,
    release: str,
    cache: str | None = None,
    *,
    say: Callable[[str], None] | None = None,
) -> str:
    """A single program that a release of Debian has, in a package of the same name.

    Args:
        program: which.
        release: the release's code name ("trixie"), or "sid".
        cache: the cache of packages; :func:`integration.packages.default_cache` if None.
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
        cache: the cache of packages; :func:`integration.packages.default_cache` if None.
        say: told in one line what is being downloaded, when something is.

    Returns:
        The directory in which the directories of ``parts`` are.

    Raises:
        PackagesError: something is missing and cannot be fetched.
        ProgramNotAdapted: a program could not be made to run beside its libraries.
    """
    # A directory of its own: when the release changes, the other programs need not.
    # The path becomes part of the programs: it must hold whoever comes to them by a link.
    into = os.path.realpath(default_cache() if cache is None else cache)
    into = os.path.join(into, f"{release}-{packages[0]}")
    directory = os.path.join(into, "unpacked")
    debs = fetch(packages, into, release=release, dependencies=True, say=say)
    unpack(debs, directory, finish=lambda new: _adapt_all(new, directory, parts))
    return os.path.join(directory, "parts")


def _installed(program: str) -> str:
    found = shutil.which(program, path=SYSTEM_PATH)
    if found is None:
        raise ContainerdNotInstalled(
            f"the program {program}",
            found=f"none in {SYSTEM_PATH}",
            do="install the packages containerd, runc and crun",
        )
    return found


def _adapt_all(new: str, directory: str, parts: Mapping[str, Sequence[str]]) -> None:
    """Copy the programs of unpacked packages to where they are run from, and adapt them.

    Args:
        new: where the packages are unpacked now.
        directory: where they will be.
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
    interpreter = _patchelf(asked, "--print-interpreter", program).strip()
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
    _patchelf(
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


def _patchelf(asked: str, *arguments: str) -> str:
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
