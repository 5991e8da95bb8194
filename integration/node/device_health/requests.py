"""How a person has the agent put a device back: a file in ``STATE/health.d``.

The command makes an empty file that is named by the device, and the agent removes it when it has
done what it says: so both need no more than a directory that they share, also across a pod's
mount. The directory is root's alone.
"""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final
from urllib.parse import quote, unquote

from integration.agent_errors import AgentSilent

if TYPE_CHECKING:
    from hooks.config import Config

_NAME: Final = re.compile(r"(GPU|MIG)-[0-9A-Za-z/-]{1,80}", re.ASCII)
_POLL: Final = 0.02
# Seconds after which nobody waits for an answer any more.
_STALE: Final = 60.0


def directory_of(config: Config) -> str:
    """Where requests are."""
    return os.path.join(config.state, "health.d")


def waiting(config: Config) -> list[str]:
    """The UUIDs that are asked for.

    Args:
        config: where requests are. One whose asker was killed is removed, and not told.
    """
    directory = directory_of(config)
    try:
        names = sorted(os.listdir(directory))
    except OSError:
        return []
    asked = [uuid for name in names if _NAME.fullmatch(uuid := unquote(name))]
    fresh = []
    for uuid in asked:
        try:
            age = time.time() - os.lstat(_path(config, uuid)).st_mtime
        except OSError:
            continue
        if age < _STALE:
            fresh.append(uuid)
        else:
            taken(config, uuid)
    return fresh


def taken(config: Config, name: str) -> None:
    """Say that what was asked has been done.

    Args:
        name: as :func:`waiting` has it.
    """
    with suppress(OSError):
        os.unlink(_path(config, name))


def _path(config: Config, name: str) -> str:
    # UUIDs of MIG devices of older drivers have slashes in them.
    return os.path.join(directory_of(config), quote(name, safe=""))


def ask(config: Config, name: str, seconds: float) -> None:
    """Ask the agent to put a device back, and wait until it has.

    Args:
        name: a UUID.
        seconds: to wait at most.

    Raises:
        AgentSilent: it does not; what was asked is taken back.
    """
    path = _path(config, name)
    asked = f"to put {name} back"
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
    except OSError as error:
        raise AgentSilent(
            asked, found=f"{path}: {error.strerror}", do="ask as root, of an agent that runs"
        ) from error
    deadline = time.monotonic() + seconds
    try:
        while os.path.lexists(path):
            if time.monotonic() > deadline:
                raise AgentSilent(
                    asked,
                    found=f"the agent has not done it in {seconds:g} s",
                    do="look at its log, and ask again",
                )
            time.sleep(_POLL)
    finally:
        with suppress(OSError):  # also when whoever asks is interrupted
            os.unlink(path)
