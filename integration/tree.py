"""``tree.json``, the manifest of a self-contained tree: its version, and a digest of each file.

It is an object::

    {"format": 1, "version": "0.1.0", "revision": "abc1234", "architecture": "amd64",
     "python": "3.11.2", "digest": "…", "programs": ["bin/nvshim", …],
     "files": {"bin/nvshim": "sha256:…", "runtime/as/nvshim": "link:../lib/ld-linux…", …}}

``programs`` are the executable files. ``digest`` is the SHA-256 of ``files`` and ``programs``, so
trees with different files have different digests, even if they have the same version. ``files``
does not have the manifest itself, or directories, which are never empty.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from typing import Any, Final

from api.values import dataclass
from hooks.named_files import read_named
from integration.errors import TreeDamaged, TreeUnreadable
from integration.json_documents import parse_json

MANIFEST: Final = "tree.json"
ARCHITECTURES: Final = {"aarch64": "arm64", "x86_64": "amd64"}
"""The name that Debian, Go and Kubernetes use, by the kernel's name."""

FORMAT: Final = 1

_SHA256: Final = "sha256:"
_LINK: Final = "link:"
PROBE: Final = "nvshim-probe"
"""The program that inspects a container from inside (``verify/probe.c``)."""

_DIGITS: Final = 64
_SHORT: Final = 8
_LARGEST: Final = 16 << 20
_NAMED: Final = 5
_TEXTS: Final = ("version", "revision", "architecture", "python", "digest")


@dataclass(frozen=True, slots=True)
class Tree:
    """A self-contained tree, according to its manifest."""

    path: str  # its directory
    version: str  # of the project
    revision: str  # the commit that it was built from; "" if unknown
    architecture: str  # Debian's and Go's name of it ("amd64", "arm64")
    python: str  # the version of its interpreter
    digest: str  # 64 hexadecimal digits that no other tree has
    files: Mapping[str, str]  # for each path below the tree ``sha256:…``, or ``link:TARGET``
    programs: frozenset[str]  # the executable files

    @property
    def name(self) -> str:
        """The name of its directory where several are installed: VERSION-DIGEST8."""
        return f"{self.version}-{self.digest[:_SHORT]}"


def own_tree() -> str:
    """Return the directory of the tree that this program runs from; "" if there is none."""
    path = os.path.abspath(__file__)
    for _ in ("tree.py", "integration", "lib"):
        path = os.path.dirname(path)
    return path if os.path.exists(os.path.join(path, MANIFEST)) else ""


def read_tree(path: str) -> Tree:
    """Read a tree's manifest, without checking the files.

    Args:
        path: the tree's directory.

    Raises:
        TreeUnreadable: there is no manifest, or it is not valid.
    """
    path = os.path.abspath(path)
    asked = f"the tree {path}"
    manifest = os.path.join(path, MANIFEST)
    try:
        content = read_named(manifest, _LARGEST)
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
            do="unpack the release again",
        ) from error


def verify(path: str) -> Tree:
    """Read a tree's manifest, and check each file.

    Args:
        path: the tree's directory.

    Raises:
        TreeUnreadable: there is no manifest, or it is not valid.
        TreeDamaged: a file was changed, is missing, or is not in the manifest.
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
        *(f"{name} is not part of it" for name in sorted(files.keys() - tree.files.keys())),
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
            do="unpack the release again, and do not edit it",
        )
    return tree


def _tree(path: str, content: Any) -> Tree:
    """Make a tree from a manifest.

    Raises:
        ValueError: it is not valid. This may also raise KeyError or TypeError.
    """
    if content["format"] != FORMAT:
        raise ValueError(f"format {content['format']!r}, but this program knows only {FORMAT}")
    for name in _TEXTS:
        if not isinstance(content[name], str) or not content[name].isprintable():
            raise ValueError(f"{name} is {content[name]!r}")
    files, programs = dict(content["files"]), frozenset(content["programs"])
    for name, value in files.items():
        _check(name, value)
    if not programs <= files.keys():
        raise ValueError("a program that is not among the files")
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
    """Check that an entry is a path in the tree, and that a link does not leave the tree."""
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
    """Return the digest of files."""
    said = json.dumps([sorted(files.items()), sorted(programs)], separators=(",", ":"))
    return hashlib.sha256(said.encode()).hexdigest()


def look(path: str) -> tuple[dict[str, str], frozenset[str]]:
    """Return a tree's files as in a manifest, and which are executable."""
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
    """Return the path of a tree's :data:`PROBE`."""
    return os.path.join(tree, "runtime", "bin", PROBE)
