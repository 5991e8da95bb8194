"""Which program a name means, and the environment that it is run with.

The verbs and the server start the same low-level runtime, so they find it alike. Nothing here
can come from an image: PATH is containerd's own.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

_DEFAULT_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# What a runtime needs besides: the user's bus, for rootless systemd cgroups.
_PASSED_ON: Final = ("XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS")


def search_path() -> str:
    """Where programs are looked up: containerd's PATH, or the usual directories."""
    return os.environ.get("PATH") or _DEFAULT_PATH


def fixed_environment() -> dict[str, str]:
    """The environment of every program that the shim starts.

    Returns:
        PATH as containerd has it, LANG, and the few variables of ``_PASSED_ON`` if set.
    """
    environment = {"PATH": search_path(), "LANG": "C.UTF-8"}
    environment.update({name: os.environ[name] for name in _PASSED_ON if name in os.environ})
    return environment


def find(name: str) -> str | None:
    """The path of a program.

    Args:
        name: a name to look up in :func:`search_path`, or a path.

    Returns:
        Its path; None if there is none that may be executed.
    """
    candidates = (
        [name] if "/" in name else [os.path.join(d or ".", name) for d in search_path().split(":")]
    )
    for candidate in candidates:
        if os.path.isfile(candidate) and os.access(candidate, os.X_OK):
            return os.path.abspath(candidate)
    return None
