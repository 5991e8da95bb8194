"""Requests to return a device to service: files in ``STATE/health.d``.

The command creates an empty file named after the device. The agent carries out the request and
removes the file. A shared directory is all that both need, also across a pod's mount. Only root can
use the directory.
"""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from typing import Final
from urllib.parse import quote, unquote

from hooks.config import Config
from integration.agent_errors import AgentSilent

_NAME: Final = re.compile(r"(GPU|MIG)-[0-9A-Za-z/-]{1,80}", re.ASCII)
_POLL: Final = 0.02
# Seconds after which the requesting command has given up.
_STALE: Final = 60.0


def directory_of(config: Config) -> str:
    """Return the directory of requests."""
    return os.path.join(config.state, "health.d")


def waiting(config: Config) -> list[str]:
    """Return the UUIDs of pending requests; remove stale ones, whose command was killed."""
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
    """Mark a request as done.

    Args:
        name: as returned by :func:`waiting`.
    """
    with suppress(OSError):
        os.unlink(_path(config, name))


def _path(config: Config, name: str) -> str:
    # MIG UUIDs of older drivers contain slashes.
    return os.path.join(directory_of(config), quote(name, safe=""))


def ask(config: Config, name: str, seconds: float) -> None:
    """Ask the agent to return a device to service, and wait until it has.

    Args:
        name: the UUID of the device.
        seconds: how long to wait.

    Raises:
        AgentSilent: the agent did not carry out the request in time, so it is withdrawn.
    """
    path = _path(config, name)
    asked = f"to return {name} to service"
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            # A killed command may have left an old request. The agent may carry it out at once.
            os.utime(file)
        finally:
            os.close(file)
    except OSError as error:
        raise AgentSilent(
            asked,
            found=f"{path}: {error.strerror}",
            do="run it as root, on a node with a running agent",
        ) from error
    deadline = time.monotonic() + seconds
    try:
        while os.path.lexists(path):
            if time.monotonic() > deadline:
                raise AgentSilent(
                    asked,
                    found=f"the agent has not done it in {seconds:g} s",
                    do="see the agent's log, then run the command again",
                )
            time.sleep(_POLL)
    finally:
        with suppress(OSError):  # also when the command is interrupted
            os.unlink(path)
