"""Walking through directories that a container may have made, however deep they are.

:func:`os.walk` recurses before Python 3.12, and a container that may make cgroups can make them
deeper than that goes.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator


def at_and_below(directory: str) -> Iterator[str]:
    """A directory and all below it, each after the one that it is in.

    Args:
        directory: what cannot be listed (it is gone, or its path too long) is left out. Links
            are not followed.
    """
    waiting = [directory]
    while waiting:
        folder = waiting.pop()
        try:
            with os.scandir(folder) as entries:
                below = [e.path for e in entries if e.is_dir(follow_symlinks=False)]
        except OSError:
            continue
        yield folder
        waiting += below
