"""The build backend for pip: it refuses, and says how to install the project instead.

Source: PEP 517.
"""

from __future__ import annotations

from typing import NoReturn

_WHY = (
    "containerd-shim-nvidia is not installed by pip: it is an application in a tree of its own. "
    "`make install` installs it on this machine, `make dist` makes a tarball and a .deb."
)


def build_wheel(*_: object, **__: object) -> NoReturn:
    """Refuse, in one line."""
    raise SystemExit(_WHY)


build_sdist = build_wheel
