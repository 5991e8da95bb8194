"""Read the shim's configuration as a shim does."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator

from hooks.errors import ConfigError
from integration.doctor.facts import Policy
from integration.doctor.places import Places


def look_at_policy(places: Places) -> Policy:
    """Return the shim's configuration, or its fault."""
    try:
        config = places.config()
    except ConfigError as error:
        return Policy("", f"{error.asked}: {error.found}", "", (), True, True, True, ())
    return Policy(
        source=config.source,
        fault="",
        mode=config.mode,
        notes=config.notes,
        load_modules=config.load_modules,
        make_nodes=config.make_nodes,
        char_links=config.char_links,
        hooks=tuple(_faulty(places, config.cdi_allow_hooks)),
    )


def _faulty(places: Places, programs: Iterable[str]) -> Iterator[tuple[str, str]]:
    for program in programs:
        try:
            seen = os.stat(places.at(program))
        except OSError as error:
            yield program, str(error.strerror)
            continue
        if seen.st_uid != 0:
            yield program, f"user {seen.st_uid} owns it"
        elif seen.st_mode & (stat.S_IWOTH | stat.S_IWGRP):
            yield program, "users other than root can write it"
