"""An image like Alpine's, with musl, and a program in it that asks the driver's NVML."""

from __future__ import annotations

import glob
import os
import platform
import tempfile
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from integration.simulated.images import read_file
from integration.simulated.packages import fetch, unpack
from tools.images import File, Image, busybox, compile_program

MUSL: Final = "nvshim.local/musl:latest"
PATHS: Final = f"etc/ld-musl-{platform.machine()}.path"
"""The file with the directories that musl's loader searches."""

_SOURCE: Final = os.path.join(os.path.dirname(__file__), "musl.c")
_LOADER: Final = f"lib/ld-musl-{platform.machine()}.so.1"


def musl() -> Image:
    """The image; the program is ``musl``."""
    with tempfile.TemporaryDirectory(prefix="nvshim-musl-") as work:
        root = os.path.join(work, "root")
        unpack(_fetch(), root)
        # Debian 12 has the library in /lib, Debian 13 in /usr/lib.
        (library,) = glob.glob(f"{root}/**/lib/*-linux-musl/libc.so", recursive=True)
        (parts,) = glob.glob(f"{root}/usr/lib/*-linux-musl")
        (headers,) = glob.glob(f"{root}/usr/include/*-linux-musl")
        program = compile_program(
            _SOURCE, "-nostdinc", "-isystem", headers, "-nostdlib", "-pie",
            f"-L{os.path.dirname(library)}", f"-L{parts}",
            f"{parts}/Scrt1.o", f"{parts}/crti.o", "-l:libc.so", f"{parts}/crtn.o",
            f"-Wl,-dynamic-linker,/{_LOADER}",
        )  # fmt: skip
        loader = read_file(library)
    plain = busybox()
    tree = {**plain.tree, f"usr/{_LOADER}": loader, "usr/bin/musl": File(program, 0o755)}
    return replace(plain, name=MUSL, tree=tree)


def _fetch(say: Callable[[str], None] | None = None) -> list[str]:
    return fetch(("musl", "musl-dev"), say=say)


if __name__ == "__main__":
    _fetch(print)
