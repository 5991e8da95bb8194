"""An image from a Containerfile, without a daemon, a registry or root.

The image of the installer is a few instructions on nothing, so they are followed here to the
letter: what ``make image`` writes, what the tests run and what any builder makes of the file are
the same. An instruction that is not understood is an error and never skipped::

    image = read_containerfile(CONTAINERFILE, context="dist", name="registry.example/shim:0.1.0")
    write_archive("dist/image.tar", [image])

Understood are ``FROM scratch``, ``LABEL``, ``ENV``, ``COPY`` of a directory to a directory,
``USER`` of root, ``ENTRYPOINT`` and ``CMD`` in their JSON form.

Source: Dockerfile reference; OCI image-spec config.md.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import stat
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from integration.images import Directory, File, Image, Link, write_archive
from integration.kubernetes.errors import ContainerfileInvalid
from shim import VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from integration.images import Tree

__all__ = ["CONTAINERFILE", "IMAGE", "read_containerfile"]

CONTAINERFILE: Final = os.path.join(os.path.dirname(os.path.abspath(__file__)), "Containerfile")
NAME: Final = "containerd-shim-nvidia"
# An image without a registry in its name is taken for one of Docker's; so it is called in full.
IMAGE: Final = f"docker.io/library/{NAME}:{VERSION}"

_ROOT: Final = ("0", "0:0", "root", "root:root")


@dataclass(slots=True)
class _Made:
    """What the instructions have made so far."""

    context: str
    tree: Tree = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()


def read_containerfile(path: str, *, context: str, name: str = IMAGE) -> Image:
    """The image that a Containerfile describes.

    Args:
        path: the file.
        context: the directory that it copies from.
        name: what the image is called.

    Raises:
        ContainerfileInvalid: an instruction is not understood, or names a file that is not there.
    """
    with open(path, encoding="utf-8") as file:
        text = file.read()
    made = _Made(context)
    begun = False
    for instruction, rest in _instructions(text):
        if not begun:
            if (instruction, rest) != ("FROM", "scratch"):
                raise _invalid(f"{instruction} {rest}", "the first one has to be FROM scratch")
            begun = True
            continue
        follow = _INSTRUCTIONS.get(instruction)
        if follow is None:
            known = ", ".join(_INSTRUCTIONS)
            raise _invalid(f"{instruction} {rest}", f"understood are {known}")
        follow(made, rest)
    if not begun:
        raise _invalid("nothing", "the first one has to be FROM scratch")
    return Image(
        name,
        made.tree,
        environment=made.environment,
        entrypoint=made.entrypoint,
        command=made.command,
        labels=made.labels,
    )


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    for line in joined.splitlines():
        word, _, rest = line.strip().partition(" ")
        if word:
            yield word.upper(), rest.strip()


def _pairs(rest: str) -> dict[str, str]:
    pairs = {}
    for word in shlex.split(rest):
        key, equals, value = word.partition("=")
        if not equals:
            raise _invalid(rest, "KEY=VALUE is understood")
        pairs[key] = value
    return pairs


def _words(rest: str) -> tuple[str, ...]:
    try:
        words = json.loads(rest)
    except ValueError:
        words = None
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise _invalid(rest, "a JSON array of words is understood; there is no shell in the image")
    return tuple(words)


def _label(made: _Made, rest: str) -> None:
    made.labels |= _pairs(rest)


def _env(made: _Made, rest: str) -> None:
    made.environment |= _pairs(rest)


def _user(made: _Made, rest: str) -> None:
    del made  # an image that says nothing is root's
    if rest not in _ROOT:
        raise _invalid(f"USER {rest}", "root is understood")


def _entrypoint(made: _Made, rest: str) -> None:
    made.entrypoint = _words(rest)


def _cmd(made: _Made, rest: str) -> None:
    made.command = _words(rest)


def _copy(made: _Made, rest: str) -> None:
    words = rest.split()
    if len(words) != 2 or not all(word.endswith("/") for word in words):  # noqa: PLR2004
        raise _invalid(f"COPY {rest}", "a directory and a directory are understood: FROM/ /TO/")
    source = os.path.join(made.context, words[0].rstrip("/"))
    target = words[1].strip("/")
    if not os.path.isdir(source):
        raise _invalid(f"COPY {rest}", f"there is no directory {source}", do="run `make dist`")
    for folder, folders, names in os.walk(source):
        relative = os.path.normpath(os.path.join(target, os.path.relpath(folder, source)))
        made.tree[relative] = Directory(stat.S_IMODE(os.stat(folder).st_mode))
        links = [each for each in folders if os.path.islink(os.path.join(folder, each))]
        for name in (*names, *links):
            path = os.path.join(folder, name)
            made.tree[f"{relative}/{name}"] = _node(path)


def _node(path: str) -> File | Link:
    status = os.lstat(path)
    if stat.S_ISLNK(status.st_mode):
        return Link(os.readlink(path))
    if not stat.S_ISREG(status.st_mode):
        raise _invalid(f"COPY {path}", "neither a file nor a link")
    with open(path, "rb") as file:
        return File(file.read(), stat.S_IMODE(status.st_mode))


_INSTRUCTIONS: Final[Mapping[str, Callable[[_Made, str], None]]] = {
    "LABEL": _label,
    "ENV": _env,
    "USER": _user,
    "COPY": _copy,
    "ENTRYPOINT": _entrypoint,
    "CMD": _cmd,
}


def _invalid(asked: str, found: str, do: str = "") -> ContainerfileInvalid:
    return ContainerfileInvalid(f"the instruction {asked}", found=found, do=do)


if __name__ == "__main__":
    _context, _archive = sys.argv[1:3]
    print(write_archive(_archive, [read_containerfile(CONTAINERFILE, context=_context)]), IMAGE)
