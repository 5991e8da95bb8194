"""Programs that run beside their own libraries, wherever they are put.

The machine that a bundle is taken to may have another libc, or none that these programs could
use. So each brings its dynamic loader and its libraries. Their paths stand in the program itself
(ELF interpreter, DT_RPATH), for runc executes itself again, and what a program starts must not
meet these libraries, as it would by an environment variable. Where they will be is not known when
the bundle is made: a placeholder is written there, long enough for any path, and replaced in place
when the programs are unpacked.

Source: elf(5) PT_INTERP and DT_RPATH; ld.so(8); patchelf(1).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from typing import TYPE_CHECKING, Final

from integration.gpu.errors import BundleNotBuilt, MachineUnfit

if TYPE_CHECKING:
    from collections.abc import Iterable

LIBRARIES: Final = "lib"
"""The directory of the libraries, beside the programs."""

_LONGEST: Final = 200
_PLACEHOLDER: Final = "/@where-the-bundle-is@".ljust(_LONGEST, "_")
_LDD_LINE: Final = re.compile(r"(?:=> |^\s*)(/\S+) \(0x", re.MULTILINE)
_STAMP: Final = re.compile(re.escape(_PLACEHOLDER.encode()) + rb"([^\0]*)\0")


def collect(programs: Iterable[str], directory: str, *, libraries: Iterable[str] = ()) -> None:
    """Copy programs with the libraries that they need, to run from anywhere once relocated.

    Args:
        programs: their paths.
        directory: where to; made. Programs keep their names.
        libraries: further libraries of the same libc, which programs load by themselves.

    Raises:
        BundleNotBuilt: a program is static, a library is missing, or there is no patchelf.
    """
    beside = os.path.join(directory, LIBRARIES)
    os.makedirs(beside)
    for library in libraries:
        shutil.copy(library, os.path.join(beside, os.path.basename(library)))
    for program in programs:
        copy = os.path.join(directory, os.path.basename(program))
        asked = f"to run {os.path.basename(program)} beside its own libraries"
        shutil.copy(program, copy)
        for library in _LDD_LINE.findall(_run(asked, "ldd", program)):
            shutil.copy(library, os.path.join(beside, os.path.basename(library)))
        interpreter = _run(asked, "patchelf", "--print-interpreter", program).strip()
        loader = os.path.join(beside, os.path.basename(interpreter))
        if not os.path.exists(loader):
            raise BundleNotBuilt(asked, found=f"no {interpreter} among what ldd lists")
        _run(
            asked, "patchelf",
            "--set-interpreter", f"{_PLACEHOLDER}/{os.path.basename(interpreter)}",
            # DT_RPATH, and not its successor: it holds for the libraries of libraries too.
            "--force-rpath", "--set-rpath", _PLACEHOLDER, copy,
        )  # fmt: skip


def relocate(directory: str) -> None:
    """Let programs find their libraries where they are now.

    Args:
        directory: what :func:`collect` filled, unpacked; an absolute path.

    Raises:
        MachineUnfit: its path is too long.
    """
    place = os.path.join(directory, LIBRARIES)
    if len(os.fsencode(place)) > _LONGEST:
        raise MachineUnfit(
            "a place for the bundle's programs",
            found=f"{place} has more than {_LONGEST} bytes",
            do="name a shorter one with --work",
        )
    for name in os.listdir(directory):
        path = os.path.join(directory, name)
        if os.path.isfile(path):
            with open(path, "rb+") as file:
                content = file.read()
                file.seek(0)
                file.write(relocated(content, place))


def relocated(content: bytes, place: str) -> bytes:
    """A program with the place of its libraries written into it.

    Args:
        content: the program.
        place: the directory of its libraries.

    Returns:
        As many bytes; the same if it was relocated before.
    """

    def path(match: re.Match[bytes]) -> bytes:
        return (os.fsencode(place) + match[1]).ljust(len(match[0]), b"\0")

    return _STAMP.sub(path, content)


def _run(asked: str, *argv: str) -> str:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise BundleNotBuilt(
            asked, found=f"no {argv[0]} here", do=f"install the package {_PACKAGES[argv[0]]}"
        ) from None
    if done.returncode:
        raise BundleNotBuilt(asked, found=done.stderr or done.stdout or f"{argv[0]} failed")
    return done.stdout


_PACKAGES: Final = {"ldd": "libc-bin", "patchelf": "patchelf"}
