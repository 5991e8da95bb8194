"""``tree.json``: what a self-contained tree is, and a digest of every file in it.

It is an object::

    {"format": 1, "version": "0.1.0", "revision": "abc1234", "architecture": "amd64",
     "python": "3.11.2", "digest": "…", "programs": ["bin/nvshim", …],
     "files": {"bin/nvshim": "sha256:…", "runtime/as/nvshim": "link:../lib/ld-linux…", …}}

``programs`` are the files that may be executed. ``digest`` is the SHA-256 of ``files`` and
``programs``, so a tree of other files has another one, whatever its version. The file itself is not
among the files, nor are directories: there is none without files.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from integration.errors import TreeDamaged, TreeUnreadable
from integration.json_documents import parse_json

MANIFEST: Final = "tree.json"
ARCHITECTURES: Final = {"aarch64": "arm64", "x86_64": "amd64"}
"""The kernel's name of a machine, and Debian's, Go's and Kubernetes'."""

FORMAT: Final = 1

_SHA256: Final = "sha256:"
_LINK: Final = "link:"
PROBE: Final = "nvshim-probe"
"""The program that looks around inside a container (``verify/probe.c``)."""

_DIGITS: Final = 64
_SHORT: Final = 8
_LARGEST: Final = 16 << 20
_NAMED: Final = 5
_TEXTS: Final = ("version", "revision", "architecture", "python", "digest")


@dataclass(frozen=True, slots=True)
class Tree:
    """A self-contained tree, as its manifest says it is."""

    path: str  # where it lies
    version: str  # of the project
    revision: str  # the commit that it was built from; empty if that is not known
    architecture: str  # Debian's and Go's name of it ("amd64", "arm64")
    python: str  # the version of its interpreter
    digest: str  # 64 hexadecimal digits that no other tree has
    files: Mapping[str, str]  # for each path below the tree ``sha256:…``, or ``link:TARGET``
    programs: frozenset[str]  # those of the files that may be executed

    @property
    def name(self) -> str:
        """What the tree's directory is called where several are installed: VERSION-DIGEST8."""
        return f"{self.version}-{self.digest[:_SHORT]}"


def own_tree() -> str:
    """Where the tree lies that this program runs from; empty if it runs from none."""
    path = os.path.abspath(__file__)
    for _ in ("tree.py", "integration", "lib"):
        path = os.path.dirname(path)
    return path if os.path.exists(os.path.join(path, MANIFEST)) else ""


def read_tree(path: str) -> Tree:
    """Read what a tree says it is; its files are not looked at.

    Args:
        path: where it lies.

    Raises:
        TreeUnreadable: there is no manifest, or it makes no sense.
    """
    path = os.path.abspath(path)
    asked = f"the tree {path}"
    manifest = os.path.join(path, MANIFEST)
    try:
        with open(manifest, "rb") as file:
            content = file.read(_LARGEST + 1)
    except OSError as error:
        raise TreeUnreadable(
            asked,
            found=f"{manifest}: {os.strerror(error.errno or 0).lower()}",
            do="name the directory that an archive of a release unpacks to",
        ) from error
    try:
        return _tree(path, parse_json(content))
    except (ValueError, KeyError, TypeError) as error:
        raise TreeUnreadable(
            asked,
            found=f"{manifest}: {error or 'no manifest'}",
            do="have the whole release again",
        ) from error


def verify(path: str) -> Tree:
    """Read what a tree says it is, and see that each of its files is so.

    Args:
        path: where it lies.

    Raises:
        TreeUnreadable: there is no manifest, or it makes no sense.
        TreeDamaged: a file is changed, missing, or not one of the tree's.
    """
    tree = read_tree(path)
    try:
        files, programs = look(tree.path)
    except OSError as error:
        raise TreeDamaged(
            f"the tree {path}", found=f"{error.filename}: {os.strerror(error.errno or 0).lower()}"
        ) from error
    wrong = [
        *(f"{name} is missing" for name in sorted(tree.files.keys() - files.keys())),
        *(f"{name} is not of it" for name in sorted(files.keys() - tree.files.keys())),
        *(
            f"{name} is changed"
            for name in sorted(tree.files.keys() & files.keys())
            if tree.files[name] != files[name] or (name in tree.programs) != (name in programs)
        ),
    ]
    if wrong:
        more = f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
        raise TreeDamaged(
            f"the tree {path}",
            found=", ".join(wrong[:_NAMED]) + more,
            do="have the whole release again; a tree is not to be edited",
        )
    return tree


def _tree(path: str, content: Any) -> Tree:
    """The tree of a manifest.

    Raises:
        ValueError: it makes no sense; so do KeyError and TypeError.
    """
    if content["format"] != FORMAT:
        raise ValueError(f"format {content['format']!r}, of which this program knows {FORMAT} only")
    for name in _TEXTS:
        if not isinstance(content[name], str) or not content[name].isprintable():
            raise ValueError(f"{name} is {content[name]!r}")
    files, programs = dict(content["files"]), frozenset(content["programs"])
    for name, value in files.items():
        _check(name, value)
    if not programs <= files.keys():
        raise ValueError("a program that is no file")
    version = content["version"]
    if "/" in version or not version or version.startswith("."):
        raise ValueError(f"version is {version!r}")
    if content["digest"] != digest_of(files, programs):
        raise ValueError("its digest is not that of its files")
    return Tree(
        path=path,
        version=version,
        revision=content["revision"],
        architecture=content["architecture"],
        python=content["python"],
        digest=content["digest"],
        files=files,
        programs=programs,
    )


def _check(name: str, value: Any) -> None:
    """See that an entry is about a path in the tree, and that a link stays in it."""
    if name != os.path.normpath(name) or name.startswith(("/", "..")) or "\0" in name:
        raise ValueError(f"the path {name!r}")
    if not isinstance(value, str):
        raise TypeError(f"{name} is {value!r}")
    if value.startswith(_SHA256) and len(value) == len(_SHA256) + _DIGITS:
        return
    target = os.path.normpath(os.path.join(os.path.dirname(name), value.removeprefix(_LINK)))
    if not value.startswith(_LINK) or target.startswith(("/", "..")):
        raise ValueError(f"{name} is {value!r}")


def digest_of(files: Mapping[str, str], programs: frozenset[str]) -> str:
    """What tells these files from others."""
    said = json.dumps([sorted(files.items()), sorted(programs)], separators=(",", ":"))
    return hashlib.sha256(said.encode()).hexdigest()


def look(path: str) -> tuple[dict[str, str], frozenset[str]]:
    """What is in a tree: its files as a manifest has them, and which may be executed."""
    files, programs = {}, set()
    for name, entry in _walk(path, ""):
        if name == MANIFEST:
            continue
        mode = entry.stat(follow_symlinks=False).st_mode
        if stat.S_ISLNK(mode):
            files[name] = _LINK + os.readlink(entry.path)
        elif stat.S_ISREG(mode):
            with open(entry.path, "rb") as file:
                files[name] = _SHA256 + hashlib.file_digest(file, "sha256").hexdigest()
            if mode & stat.S_IXUSR:
                programs.add(name)
        else:
            files[name] = f"a file of type {stat.S_IFMT(mode):o}"
    return files, frozenset(programs)


def _walk(path: str, below: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
    with os.scandir(path) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    for entry in found:
        name = f"{below}{entry.name}"
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(entry.path, f"{name}/")
        else:
            yield name, entry


def probe_of(tree: str) -> str:
    """Return the path of the program in a tree that looks around inside a container."""
    return os.path.join(tree, "runtime", "bin", PROBE)
