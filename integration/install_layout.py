"""The directories and file names of an installation."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterable
from typing import Final

from api.values import dataclass

PREFIX: Final = "/opt/containerd-shim-nvidia"
BINDIR: Final = "/usr/local/bin"
BINDIRS: Final = (BINDIR, "/usr/bin")
"""The default directories of the links; a package uses the second."""

SHIM: Final = "containerd-shim-nvidia-v1"
PROGRAMS: Final = (SHIM, "nvshim")
"""The programs that are linked there."""

CURRENT: Final = "current"
PREVIOUS: Final = "previous"
LINKED: Final = "bindir"
"""A link below the prefix to a directory of links that is not a default one.

Those to further directories are bindir.2, bindir.3 and so on.
"""

INCOMING: Final = ".incoming-"
REMOVING: Final = ".removing-"
SELF_TEST: Final = ".self-test-"
STAGING: Final = ".node-installer"
"""The copy of a tree from which Kubernetes' installer installs."""

NODE_LOCK: Final = "/run/nvidia/toolkit/toolkit.pid"
"""The file that Kubernetes' installer locks while it runs, as NVIDIA's does."""

_NEW_LINK: Final = ".nvshim-new"
_DIGITS: Final = 8
_LEFTOVER: Final = re.compile(
    rf"({'|'.join(map(re.escape, (INCOMING, REMOVING, SELF_TEST)))})[0-9a-f]{{{_DIGITS}}}"
)
_NAME: Final = re.compile(r"[0-9][0-9A-Za-z.+~_]*-[0-9a-f]{8}(\.[1-9][0-9]*)?")
_LEFT_LINK: Final = re.compile(
    rf"\.({CURRENT}|{PREVIOUS}|{LINKED}(\.[1-9][0-9]*)?){re.escape(_NEW_LINK)}"
)
_RECORD: Final = re.compile(rf"{LINKED}(\.[1-9][0-9]*)?")


@dataclass(frozen=True, slots=True)
class InstallLayout:
    """An installation's directories."""

    prefix: str = PREFIX  # the directory of the trees; absolute
    # the directory of the links, where containerd and users find the programs; "" for none
    bindir: str = BINDIR
    more: tuple[str, ...] = ()  # the paths of further links to the current tree

    @classmethod
    def of(
        cls, prefix: str, bindir: str | None, *, usual: Iterable[str] = BINDIRS
    ) -> InstallLayout:
        """Return the layout for a command's options.

        Args:
            prefix: an absolute or relative path.
            bindir: the same; "" for no links; None for the directory of the existing links.
            usual: the directories to search for links, in addition to the recorded ones; the first
                of these is used if there are no links.
        """
        prefix = os.path.abspath(prefix)
        directories = dict.fromkeys((*usual, *recorded_bindirs(prefix).values()))
        places = [cls(prefix, directory) for directory in directories]
        found = [path for layout in places for path in layout.right_links()]
        if bindir is None:
            bindir = os.path.dirname(found[0]) if found else places[0].bindir
        elif bindir:
            bindir = os.path.abspath(bindir)
        return cls(prefix, bindir, tuple(p for p in found if os.path.dirname(p) != bindir))

    def right_links(self) -> list[str]:
        """Return the paths of the links to the current tree that are there."""
        return [path for path, target in self.links.items() if link_target(path) == target]

    def path(self, name: str) -> str:
        """Return a path below the prefix."""
        return os.path.join(self.prefix, name)

    @property
    def links(self) -> dict[str, str]:
        """Path and target of each link to the current tree."""
        own = [os.path.join(self.bindir, name) for name in PROGRAMS] if self.bindir else []
        return {
            path: os.path.join(self.prefix, CURRENT, "bin", os.path.basename(path))
            for path in (*own, *self.more)
        }


def link_target(path: str) -> str:
    """Return the target of a link; empty if there is no link."""
    try:
        return os.readlink(path)
    except OSError:
        return ""


def recorded_bindirs(prefix: str) -> dict[str, str]:
    """Return the directories of links that are recorded below a prefix, by the record's name."""
    try:
        names = sorted(filter(_RECORD.fullmatch, os.listdir(prefix)))
    except OSError:
        return {}
    found = {name: link_target(os.path.join(prefix, name)) for name in names}
    return {name: directory for name, directory in found.items() if directory}


def is_directory_name(name: str) -> bool:
    """Return whether a name may be that of a tree's directory."""
    return _NAME.fullmatch(name) is not None


def is_leftover_name(name: str) -> bool:
    """Return whether a name below the prefix is a leftover of a killed installer."""
    return _LEFTOVER.fullmatch(name) is not None or _LEFT_LINK.fullmatch(name) is not None


def working_name(kind: str) -> str:
    """Return a name for an installer's temporary directory.

    Args:
        kind: :data:`INCOMING`, :data:`REMOVING` or :data:`SELF_TEST`.
    """
    return kind + secrets.token_hex(_DIGITS // 2)


def new_link(path: str) -> str:
    """Return the temporary name of a link.

    The name is always the same, so the next installer removes a link that a killed one left behind.
    """
    directory, name = os.path.split(path)
    return os.path.join(directory, f".{name}{_NEW_LINK}")
