"""Small images to look at and to write into, and ways to see what became of a tree."""

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
    """The shortest ELF file that says which machine it is for."""
    kind, machine = _MACHINES[arch]
    ident = b"\x7fELF" + bytes((kind, 1, 1)) + bytes(9)
    return (ident + struct.pack("<HHI", 3, machine, 1)).ljust(64, b"\0")


def put(root: str, path: str, content: bytes = b"") -> None:
    """A file at ``path`` in ``root``, with the directories on the way."""
    os.makedirs(os.path.dirname(root + path), exist_ok=True)
    with open(root + path, "wb") as file:
        file.write(content)


def link(root: str, path: str, target: str) -> None:
    """A link at ``path`` in ``root``, with the directories on the way."""
    os.makedirs(os.path.dirname(root + path), exist_ok=True)
    os.symlink(target, root + path)


Make = bytes | Callable[[str], object]


def fill(root: str, entries: Mapping[str, Make]) -> None:
    """Below ``root`` the files of these contents, or what is called with the path makes there."""
    for path, make in entries.items():
        if isinstance(make, bytes):
            put(root, path, make)
        else:
            os.makedirs(os.path.dirname(root + path), exist_ok=True)
            make(root + path)


def to(target: str) -> Make:
    """A link in :func:`fill`."""
    return lambda path: os.symlink(target, path)


def device(path: str) -> None:
    """A character device in :func:`fill`."""
    os.mknod(path, 0o20666, os.makedev(1, 5))


def put_in(
    root: str,
    plan: Plan,
    mounts: Sequence[dict[str, Any]] = (),
    *,
    arches: Sequence[Arch] = (Arch.X86_64,),
    library_path: str = "",
) -> Placed:
    """A plan's files are written into an image, or staged beside it."""
    with Rootfs.open(root) as rootfs:
        layout = read_layout(rootfs, arches, mounts)
        return place(rootfs, plan, layout, f"{root}-staging", {"LD_LIBRARY_PATH": library_path})


def debian(root: str) -> str:
    """Merged /usr and a multiarch directory."""
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
    """Merged /usr, 64-bit libraries in /usr/lib64, 32-bit ones in /usr/lib."""
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
    """Musl; the loader is the C library."""
    put(root, "/lib/ld-musl-x86_64.so.1", elf_header(Arch.X86_64))
    os.makedirs(f"{root}/usr/lib")
    os.makedirs(f"{root}/etc")
    return root


def scratch(root: str) -> str:
    """One static program."""
    put(root, "/program", elf_header(Arch.X86_64))
    return root


Tree = dict[str, tuple[int, int, int, str]]


def tree(root: str) -> Tree:
    """Path below ``root`` → mode, owner, group, and the content's digest or the link's target."""
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
