"""Images for tests and measurements: those of :mod:`integration.simulated.images`, and more.

This module adds a small image, a pod's pause image, and ways to create unusual images.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Final

from integration.simulated import images
from integration.simulated.errors import ImageBuildFailed
from integration.simulated.images import (
    GLIBC,
    Directory,
    File,
    Image,
    Link,
    Node,
    Tree,
    find_program,
    glibc_libraries,
    output_of,
    pack,
    read_file,
    skeleton,
    unpack,
    write_archive,
)

__all__ = [
    "BUSYBOX",
    "GLIBC",
    "PAUSE",
    "Directory",
    "File",
    "Image",
    "Link",
    "Node",
    "Tree",
    "behind_link",
    "busybox",
    "compile_program",
    "glibc",
    "glibc_libraries",
    "pause",
    "tree_of",
    "unpack",
    "write_archive",
    "write_layer",
]

BUSYBOX: Final = "nvshim.local/busybox:latest"
PAUSE: Final = "nvshim.local/pause:latest"

_PAUSE_SOURCE: Final = os.path.join(os.path.dirname(__file__), "pause.c")
_PROBE_SOURCE: Final = os.path.join(os.path.dirname(__file__), "probe.c")


def busybox() -> Image:
    """Return the smallest useful image: a static busybox and links to it.

    Raises:
        SourceNotInstalled: there is no static busybox.
    """
    program = find_program("busybox", package="busybox-static")
    applets = output_of([program, "--list"]).split()
    tree = skeleton()
    tree["usr/bin/busybox"] = read_file(program)
    tree.update({f"usr/bin/{applet}": Link("busybox") for applet in applets if applet != "busybox"})
    return Image(BUSYBOX, tree)


@cache
def glibc() -> Image:
    """Return the image of a simulated node with ``probe``, which loads and opens files (probe.c).

    It is created once, because it takes fifty programs and a compiler.

    Raises:
        SourceNotInstalled: a program, a library or the compiler is missing.
        ImageBuildFailed: the compiler or ldconfig failed.
    """
    image = images.glibc()
    probe = File(compile_program(_PROBE_SOURCE), 0o755)
    return replace(image, tree={**image.tree, "usr/bin/probe": probe})


@cache
def pause() -> Image:
    """Return an image for a pod's pause container, which holds its namespaces (see pause.c).

    Raises:
        SourceNotInstalled: the compiler is missing.
        ImageBuildFailed: it failed.
    """
    program = File(compile_program(_PAUSE_SOURCE, "-static"), 0o755)
    return Image(PAUSE, {"pause": program}, entrypoint=("/pause",), command=())


def behind_link(tree: Mapping[str, Node], path: str, *, target: str) -> Tree:
    """Return the tree with ``path`` moved away, and a link in its place.

    Args:
        tree: the tree, which is not changed.
        path: the link replaces this path; it and what is below it move to ``target``.
        target: the link's target. An absolute path starts at the image's root, as seen inside.
    """
    place = os.path.normpath(os.path.join("/", os.path.dirname(path), target)).lstrip("/")
    moved: Tree = {}
    for name, node in tree.items():
        below = name == path or name.startswith(path + "/")
        moved[place + name[len(path) :] if below else name] = node
    moved[path] = Link(target)
    return moved


def tree_of(directory: str, place: str = "") -> Tree:
    """Return the files, links and directories below a directory, as an image has them.

    Args:
        place: the path in the image.

    Raises:
        ImageBuildFailed: it does not exist, or contains anything but files, links and directories.
    """
    if not os.path.isdir(directory):
        raise ImageBuildFailed(f"an image of {directory}", found="no such directory")
    tree: Tree = {}
    for above, directories, names in os.walk(directory):
        inside = os.path.normpath(os.path.join(place, os.path.relpath(above, directory)))
        if inside != ".":
            tree[inside] = Directory(stat.S_IMODE(os.stat(above).st_mode))
        for name in (*directories, *names):
            path = os.path.join(above, name)
            mode = os.lstat(path).st_mode
            if stat.S_ISLNK(mode):
                tree[os.path.normpath(f"{inside}/{name}")] = Link(os.readlink(path))
            elif stat.S_ISREG(mode):
                with open(path, "rb") as file:
                    content = File(file.read(), stat.S_IMODE(mode))
                tree[os.path.normpath(f"{inside}/{name}")] = content
            elif not stat.S_ISDIR(mode):
                raise ImageBuildFailed(f"an image with {path}", found="neither a file nor a link")
    return tree


def write_layer(path: str, image: Image) -> str:
    """Write an image's files as a tar, for programs that build an image from one.

    Returns:
        ``path``.
    """
    with open(path, "wb") as file:
        file.write(pack(image.tree))
    return path


def compile_program(source: str, *flags: str) -> bytes:
    """Compile a program for an image.

    Raises:
        SourceNotInstalled: there is no compiler.
        ImageBuildFailed: the compiler refused the source.
    """
    with tempfile.TemporaryDirectory(prefix="nvshim-image-") as directory:
        program = os.path.join(directory, "program")
        # No build id and no path of this machine: the same source gives the same bytes.
        output_of(
            [
                find_program("gcc"), "-O1", "-Wall", "-s", "-Wl,--build-id=none",
                f"-ffile-prefix-map={os.path.dirname(source)}=.",
                *flags, "-o", program, source, "-ldl",
            ]
        )  # fmt: skip
        return read_file(program).content
