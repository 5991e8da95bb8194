"""Where an installation is, and what its parts are called."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

PREFIX: Final = "/opt/containerd-shim-nvidia"
BINDIR: Final = "/usr/local/bin"
BINDIRS: Final = (BINDIR, "/usr/bin")
"""Where the links are, if nobody says otherwise: those of a package are in the second."""

SHIM: Final = "containerd-shim-nvidia-v1"
PROGRAMS: Final = (SHIM, "nvshim")
"""What is linked into the directory of links."""

CURRENT: Final = "current"
PREVIOUS: Final = "previous"

INCOMING: Final = ".incoming-"
REMOVING: Final = ".removing-"
SELF_TEST: Final = ".self-test-"

_NEW_LINK: Final = ".nvshim-new"
_DIGITS: Final = 8
_LEFTOVER: Final = re.compile(
    rf"({'|'.join(map(re.escape, (INCOMING, REMOVING, SELF_TEST)))})[0-9a-f]{{{_DIGITS}}}"
)
_NAME: Final = re.compile(r"[0-9][0-9A-Za-z.+~_]*-[0-9a-f]{8}(\.[1-9][0-9]*)?")


@dataclass(frozen=True, slots=True)
class Place:
    """An installation's directories."""

    prefix: str = PREFIX  # below it are the trees; absolute
    # where containerd and people find the programs; absolute. Empty for nowhere.
    bindir: str = BINDIR

    @classmethod
    def of(cls, prefix: str, bindir: str | None, *, usual: Iterable[str] = BINDIRS) -> Place:
        """The place that a person has named.

        Args:
            prefix: may be relative.
            bindir: likewise; empty for no links; None for where they are.
            usual: where they could be then; in the first of them if they are nowhere.
        """
        prefix = os.path.abspath(prefix)
        if bindir is not None:
            return cls(prefix, os.path.abspath(bindir) if bindir else "")
        places = [cls(prefix, directory) for directory in usual]
        return next((place for place in places if place.has_links()), places[0])

    def has_links(self) -> bool:
        """Whether there is a link to the tree in effect."""
        return any(
            os.path.islink(path) and os.readlink(path) == target
            for path, target in self.links.items()
        )

    def path(self, name: str) -> str:
        """The path of something below the prefix."""
        return os.path.join(self.prefix, name)

    @property
    def links(self) -> dict[str, str]:
        """Path and target of each link that leads to the tree in effect."""
        if not self.bindir:
            return {}
        return {
            os.path.join(self.bindir, name): os.path.join(self.prefix, CURRENT, "bin", name)
            for name in PROGRAMS
        }


def is_directory_name(name: str) -> bool:
    """Whether something could be a tree's directory by its name."""
    return _NAME.fullmatch(name) is not None


def is_leftover_name(name: str) -> bool:
    """Whether something below the prefix is what an installer that was killed has left."""
    return _LEFTOVER.fullmatch(name) is not None or name in _NEW_LINKS


def working_name(kind: str) -> str:
    """A name for what an installer works on.

    Args:
        kind: :data:`INCOMING`, :data:`REMOVING` or :data:`SELF_TEST`.
    """
    return kind + secrets.token_hex(_DIGITS // 2)


def new_link(path: str) -> str:
    """The name that a link has until it is complete.

    It is always the same, so that the next one takes away what a killed installer left.
    """
    directory, name = os.path.split(path)
    return os.path.join(directory, f".{name}{_NEW_LINK}")


_NEW_LINKS: Final = frozenset(map(new_link, (CURRENT, PREVIOUS)))
