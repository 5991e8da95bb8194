"""The tarball of a tree.

Its top directory is ``containerd-shim-nvidia-VERSION/``. The same tree gives the same bytes: names
are sorted, the owner is root, and times are those of the files, which are the commit's.

Source: reproducible-builds.org, Archive metadata; RFC 1952.
"""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from integration.tree import Tree

PROJECT: Final = "containerd-shim-nvidia"


def archive_name(tree: Tree) -> str:
    """Return the name of a tree's tarball."""
    return f"{PROJECT}-{tree.version}-linux-{tree.architecture}.tar.gz"


def write_tarball(tree: Tree, path: str, *, level: int = 6, top: str = "") -> None:
    """Write a tree's tarball, atomically.

    Args:
        path: where to; an existing file is replaced.
        level: of gzip's compression, 0 to 9.
        top: the top directory's name; by default that of the project and its version.
    """
    epoch = int(os.stat(tree.path).st_mtime)
    with _packed(path, epoch, level) as archive:
        archive.add(tree.path, top or f"{PROJECT}-{tree.version}", filter=_of_root)


def write_tar(path: str, contents: Mapping[str, bytes], epoch: int) -> None:
    """Write a tarball of plain files, atomically.

    Args:
        path: where to; an existing file is replaced.
        contents: of each file, by its path in the tarball.
        epoch: the time of each file, in seconds since 1970.
    """
    with _packed(path, epoch, 9) as archive:
        for name, content in sorted(contents.items()):
            member = tarfile.TarInfo(name)
            member.size, member.mtime = len(content), epoch
            archive.addfile(_of_root(member), io.BytesIO(content))


@contextmanager
def _packed(path: str, epoch: int, level: int) -> Iterator[tarfile.TarFile]:
    """Yield a tarball that gets its name when it is complete."""
    new = f"{path}.new"
    try:
        with (
            open(new, "wb") as file,
            gzip.GzipFile("", "wb", level, file, mtime=epoch) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
        ):
            yield archive
        os.rename(new, path)
    except BaseException:
        if os.path.exists(new):
            os.unlink(new)
        raise


def _of_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    # Without a fraction, which would need an additional header.
    member.mtime = int(member.mtime)
    return member
