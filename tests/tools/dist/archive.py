"""The tarball that a tree is handed on as.

Its top directory is ``containerd-shim-nvidia-VERSION/``. The same tree gives the same bytes: names
are sorted, owners are root, and times those of the files, which are the commit's.

Source: reproducible-builds.org, Archive metadata; RFC 1952.
"""

from __future__ import annotations

import gzip
import os
import tarfile
from typing import Final

from integration.tree import Tree

PROJECT: Final = "containerd-shim-nvidia"


def archive_name(tree: Tree) -> str:
    """What the tarball of a tree is called."""
    return f"{PROJECT}-{tree.version}-linux-{tree.architecture}.tar.gz"


def write_tarball(tree: Tree, path: str, *, level: int = 6, top: str = "") -> None:
    """Write a tree's tarball, whole or not at all.

    Args:
        tree: it lies at its path.
        path: where to; what is there is replaced.
        level: of gzip's compression, 0 to 9.
        top: the top directory's name; that of the project and its version if empty.
    """
    top = top or f"{PROJECT}-{tree.version}"
    new = f"{path}.new"
    epoch = int(os.stat(tree.path).st_mtime)
    try:
        with (
            open(new, "wb") as file,
            gzip.GzipFile("", "wb", level, file, mtime=epoch) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
        ):
            archive.add(tree.path, top, filter=_of_root)
        os.rename(new, path)
    except BaseException:
        if os.path.exists(new):
            os.unlink(new)
        raise


def _of_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    # Without a fraction, which would need a header of its own.
    member.mtime = int(member.mtime)
    return member
