"""Trees for tests: small artificial ones, and other versions of a real one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from integration.tree import ARCHITECTURES, MANIFEST, Tree, read_tree
from shim import syscalls
from tests.harness.dist import copied
from tools.dist.manifest import write_tree

_PROGRAM = """\
#!/bin/sh
echo {name} {version}
"""


def small_tree(path: str, version: str = "1.0", *, more: int = 3) -> Tree:
    """Make a tree with programs that print their version, a library that can be mapped, and a link.

    Args:
        path: where it is created.
        more: how many further files it has.
    """
    for folder in ("bin", "lib/api", "runtime/lib"):
        os.makedirs(os.path.join(path, folder))
    for name in ("containerd-shim-nvidia-v1", "nvshim"):
        _write(path, f"bin/{name}", _PROGRAM.format(name=name, version=version), mode=0o755)
    shutil.copy("/bin/sleep", os.path.join(path, "runtime/lib/program"))
    os.symlink("program", os.path.join(path, "runtime/lib/sleep"))
    for number in range(more):
        _write(path, f"lib/api/module{number}.py", f"VERSION = {version!r}\n", mode=0o644)
    return write_tree(
        path, version=version, revision="abc", architecture=ARCHITECTURES[os.uname().machine],
        python="3.11.2",
    )  # fmt: skip


def other_version(tree: str, path: str, version: str) -> Tree:
    """Copy a tree, and give the copy another version.

    Args:
        path: where the copy is created.

    Returns:
        The copy. Its files are hard links: remove one before you write a changed one.
    """
    # By hard links where possible: an installation copies the files anyway.
    copied(read_tree(tree), path)
    os.unlink(os.path.join(path, MANIFEST))
    _write(path, "share/version", version, mode=0o644)
    of = read_tree(tree)
    return write_tree(
        path, version=version, revision=of.revision, architecture=of.architecture, python=of.python
    )


@contextmanager
def disk_of_its_own(path: str) -> Iterator[str]:
    """Mount a tmpfs: syncing it does not wait for writes of other processes to the disk.

    Args:
        path: the mount point; created.
    """
    os.mkdir(path)
    syscalls.mount("tmpfs", path, "tmpfs", 0, "mode=755")
    try:
        yield path
    finally:
        syscalls.umount(path, syscalls.MNT_DETACH)


def _write(tree: str, name: str, text: str, *, mode: int) -> None:
    path = os.path.join(tree, name)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    os.chmod(path, mode)
