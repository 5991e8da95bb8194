"""Small images for tests, and snapshots of a tree's state."""

from __future__ import annotations

import hashlib
import os
import stat
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from hooks.image.layout import read_layout
from hooks.image.placement import Placed, place
from hooks.image.rootfs import Rootfs
from hooks.plan import Plan
from hooks.words import Arch

_MACHINES: Final = {
    Arch.X86_64: (2, 62),
    Arch.I386: (1, 3),
    Arch.AARCH64: (2, 183),
    Arch.ARM: (1, 40),
}


def elf_header(arch: Arch) -> bytes:
    """Return the shortest ELF file that names its machine."""
    kind, machine = _MACHINES[arch]
    ident = b"\x7fELF" + bytes((kind, 1, 1)) + bytes(9)
    return (ident + struct.pack("<HHI", 3, machine, 1)).ljust(64, b"\0")


def put(root: str, path: str, content: bytes = b"") -> None:
    """Write a file at ``path`` in ``root``, with its parent directories."""
    os.makedirs(os.path.dirname(root + path), exist_ok=True)
    with open(root + path, "wb") as file:
        file.write(content)


def link(root: str, path: str, target: str) -> None:
    """Make a link at ``path`` in ``root``, with its parent directories."""
    os.makedirs(os.path.dirname(root + path), exist_ok=True)
    os.symlink(target, root + path)


Make = bytes | Callable[[str], object]


def fill(root: str, entries: Mapping[str, Make]) -> None:
    """Make files below ``root``, each from its content or by a function that gets the path."""
    for path, make in entries.items():
        if isinstance(make, bytes):
            put(root, path, make)
        else:
            os.makedirs(os.path.dirname(root + path), exist_ok=True)
            make(root + path)


def to(target: str) -> Make:
    """Return a function that makes a link, for :func:`fill`."""
    return lambda path: os.symlink(target, path)


def device(path: str) -> None:
    """Return a function that makes a character device, for :func:`fill`."""
    os.mknod(path, 0o20666, os.makedev(1, 5))


def put_in(
    root: str,
    plan: Plan,
    mounts: Sequence[dict[str, Any]] = (),
    *,
    arches: Sequence[Arch] = (Arch.X86_64,),
    library_path: str = "",
    variables: Mapping[str, str] | None = None,
) -> Placed:
    """Write a plan's files into an image, or stage them next to it."""
    with Rootfs.open(root) as rootfs:
        layout = read_layout(rootfs, arches, mounts)
        return place(
            rootfs,
            plan,
            layout,
            f"{root}-staging",
            {"LD_LIBRARY_PATH": library_path, **(variables or {})},
        )


def debian(root: str) -> str:
    """Make an image with a merged /usr and a multiarch directory."""
    for directory in ("bin", "lib", "lib64", "sbin"):
        os.makedirs(f"{root}/usr/{directory}")
        os.symlink(f"usr/{directory}", f"{root}/{directory}")
    put(root, "/usr/lib/x86_64-linux-gnu/libc.so.6", elf_header(Arch.X86_64))
    put(root, "/usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2", elf_header(Arch.X86_64))
    link(root, "/usr/lib64/ld-linux-x86-64.so.2", "/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2")
    put(root, "/etc/ld.so.conf", b"include /etc/ld.so.conf.d/*.conf\n")
    put(root, "/etc/ld.so.conf.d/libc.conf", b"/usr/local/lib\n")
    return root


def fedora(root: str) -> str:
    """Make an image with a merged /usr, 64-bit libraries in /usr/lib64, 32-bit ones in /usr/lib."""
    for directory in ("lib", "lib64"):
        os.makedirs(f"{root}/usr/{directory}")
        os.symlink(f"usr/{directory}", f"{root}/{directory}")
    put(root, "/usr/lib64/libc.so.6", elf_header(Arch.X86_64))
    put(root, "/usr/lib64/ld-linux-x86-64.so.2", elf_header(Arch.X86_64))
    put(root, "/usr/lib/libc.so.6", elf_header(Arch.I386))
    put(root, "/usr/lib/ld-linux.so.2", elf_header(Arch.I386))
    put(root, "/etc/ld.so.conf", b"include ld.so.conf.d/*.conf\n")
    return root


def alpine(root: str) -> str:
    """Make an image with musl, whose C library is the loader."""
    put(root, "/lib/ld-musl-x86_64.so.1", elf_header(Arch.X86_64))
    os.makedirs(f"{root}/usr/lib")
    os.makedirs(f"{root}/etc")
    return root


def scratch(root: str) -> str:
    """Make an image with one static program."""
    put(root, "/program", elf_header(Arch.X86_64))
    return root


Tree = dict[str, tuple[int, int, int, str]]


def tree(root: str) -> Tree:
    """Map each path below ``root`` to mode, owner, group, and content digest or link target."""
    found: Tree = {}
    for directory, directories, files in os.walk(root):
        for name in (*directories, *files):
            path = os.path.join(directory, name)
            status = os.lstat(path)
            content = ""
            if stat.S_ISLNK(status.st_mode):
                content = os.readlink(path)
            elif stat.S_ISREG(status.st_mode) and status.st_size < 1 << 30:
                with open(path, "rb") as file:
                    content = hashlib.sha256(file.read()).hexdigest()
            found[path[len(root) :]] = (status.st_mode, status.st_uid, status.st_gid, content)
    return found
