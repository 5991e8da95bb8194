"""What containers got through NRI: a directory for each, ``STATE/nri/CONTAINER``.

The directory has the record of the injection (:mod:`hooks.record`), and the files that the
container has mounted from there. The ledger and ``nvshim explain`` find the record through these
mounts. The directory is removed with its container.

Rules
- If the runtime does not list a container when it synchronises, the container is gone, unless its
  directory is new: releases before NRI 0.8 may synchronise while a container is being created.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any, Final

from integration.containers.nri_records import DIRECTORY, RECORD
from integration.files import replace_file

_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}", re.ASCII)
_YOUNG: Final = 120.0  # seconds


def directory_of(state: str, container: str) -> str:
    """Return a container's directory.

    Args:
        state: the directory ``state`` of the configuration.
        container: the container's id.

    Raises:
        ValueError: the id is not that of a container.
    """
    if not _ID.fullmatch(container):
        raise ValueError(f"no id of a container: {container!r}")
    return os.path.join(state, DIRECTORY, container)


def write(directory: str, record: Mapping[str, Any]) -> None:
    """Write the record of an injection.

    Raises:
        OSError: the record cannot be written.
    """
    content = json.dumps(record).encode()
    replace_file(os.path.join(directory, RECORD), content, mode=0o600, durable=False)


def remove(state: str, container: str) -> None:
    """Remove a container's directory, if it has one."""
    with suppress(ValueError):  # a container without a valid id has none
        shutil.rmtree(directory_of(state, container), ignore_errors=True)


def reconcile(state: str, known: Collection[str]) -> None:
    """Remove the directories of removed containers.

    Args:
        known: the ids of the runtime's containers.
    """
    try:
        entries = list(os.scandir(os.path.join(state, DIRECTORY)))
    except OSError:  # an unusable directory must not keep the agent from registering
        return
    for entry in entries:
        with suppress(FileNotFoundError):  # removed meanwhile
            is_young = time.time() - entry.stat(follow_symlinks=False).st_mtime < _YOUNG
            if entry.name not in known and not is_young:
                shutil.rmtree(entry.path, ignore_errors=True)
