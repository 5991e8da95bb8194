"""The inputs of a tree, and a fingerprint of all of them.

Two trees with the same inputs are the same tree, so an existing one is not rebuilt.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from integration.tree import ARCHITECTURES
from tools import REPOSITORY
from tools.dist.modules import OURS, REQUIREMENTS
from tools.errors import TreeNotBuilt

_OTHERS: Final = (*REQUIREMENTS, "LICENSE", "pyproject.toml")
# The code that builds the tree, and one of its programs: entry.c.
_BUILDER: Final = "tools/dist"
# The sources of a release. Uncommitted changes in them prevent a release.
_RELEASE: Final = ("tools/release", "tools/images.py", "tools/node_image.py")


@dataclass(frozen=True, slots=True)
class Inputs:
    """The inputs of a tree, without packages."""

    source: str  # the checkout
    version: str  # the project's version
    revision: str  # the commit, with ``-dirty`` if there are changes; empty without one
    epoch: int  # the commit's time, in seconds since 1970: that of every file
    architecture: str  # Debian's name for this machine's architecture
    released: bool = False  # whether the commit has the tag of the version

    @classmethod
    def of(cls, source: str = REPOSITORY) -> Inputs:
        """Return the inputs of a checkout, on this machine.

        Args:
            source: the checkout; it may be one without git.

        Raises:
            TreeNotBuilt: it is not a checkout, or this machine cannot build it.
        """
        try:
            with open(os.path.join(source, "pyproject.toml"), encoding="utf-8") as file:
                version = re.search(r'^version = "(.+)"$', file.read(), re.MULTILINE)
        except OSError:
            version = None
        if version is None:
            raise TreeNotBuilt(
                "a self-contained tree", found=f"no checkout at {source}",
                do="run this in a checkout: an installation cannot build itself",
            )  # fmt: skip
        machine = platform.machine()
        if machine not in ARCHITECTURES:
            raise TreeNotBuilt(
                f"a self-contained tree for {machine}",
                found=f"only {', '.join(sorted(ARCHITECTURES))} are known",
            )
        made_of = (*OURS, *_OTHERS, _BUILDER, *_RELEASE)
        dirty = bool(_git(source, "status", "--porcelain", "--", *made_of))
        revision = _git(source, "rev-parse", "--short=12", "HEAD")
        epoch = os.environ.get("SOURCE_DATE_EPOCH") or _git(source, "log", "-1", "--format=%ct")
        return cls(
            source=source,
            version=version[1],
            revision=f"{revision}-dirty" if revision and dirty else revision,
            epoch=int(epoch) if epoch.isdigit() else 0,
            architecture=ARCHITECTURES[machine],
            released=not dirty
            and f"v{version[1]}" in _git(source, "tag", "--points-at", "HEAD").split(),
        )

    def fingerprint(self, packages: Iterable[str]) -> str:
        """Return a fingerprint of all inputs.

        Args:
            packages: the names of Debian's packages, with their versions.
        """
        digest = hashlib.sha256()
        # This machine's compiler builds the native programs, with its libc.
        compiler = _said("dpkg-query", "-W", "gcc", "libc6-dev") or _said("gcc", "--version")
        said = (
            self.version, self.revision, self.epoch, self.architecture, compiler, *sorted(packages)
        )  # fmt: skip
        digest.update(repr(said).encode())
        for name in self._files():
            with open(os.path.join(self.source, name), "rb") as file:
                content = hashlib.file_digest(file, "sha256").digest()
            digest.update(name.encode() + b"\0" + content)
        return digest.hexdigest()

    def _files(self) -> Iterator[str]:
        yield from _OTHERS
        for package in (*OURS, _BUILDER):
            for above, directories, names in os.walk(os.path.join(self.source, package)):
                directories[:] = sorted(
                    name for name in directories if name != "__pycache__" and name[0] != "."
                )
                for name in sorted(names):
                    yield os.path.relpath(os.path.join(above, name), self.source)


def _git(source: str, *arguments: str) -> str:
    """Return the output of git; empty if it is missing, or this is not its directory."""
    return _said("git", "-C", source, *arguments)


def _said(*argv: str) -> str:
    """Return the output of a program; empty if it is missing, or fails."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
