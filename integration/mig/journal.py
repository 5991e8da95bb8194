"""The journal of an apply: the previous and the wanted state of each GPU that it changes.

The file is next to the marks of devices that are out of service, and survives a reboot as they do.
It is written before the first mark, and removed after the last one. If a journal exists although no
apply is running, an apply was killed: the next one undoes or finishes its changes. So a journal
that cannot be read is an error, not a missing one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from hooks.config import Config
from integration.devices.drain_marks import unwritten
from integration.files import read_file, remove_file, replace_file
from integration.json_documents import MALFORMED, parse_json
from integration.mig.errors import MigRecordUnusable
from integration.mig.state import Cut, Partition

__all__ = ["JournalEntry", "read", "remove", "write"]

_FORMAT: Final = 1


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """A GPU that an apply changes."""

    uuid: str
    # the previous and the wanted one; None before the first instance is changed
    states: tuple[Partition, Partition] | None = None


def write(config: Config, gpus: Iterable[JournalEntry]) -> None:
    """Write the journal.

    Raises:
        MarkUnwritten: the journal cannot be written; an earlier journal is unchanged.
    """
    rows = [[each.uuid, each.states and [*map(_written, each.states)]] for each in gpus]
    content = json.dumps({"format": _FORMAT, "gpus": rows}).encode() + b"\n"
    try:
        replace_file(_path(config), content)
    except OSError as error:
        raise unwritten(config, "to write down what a MIG layout changes", error) from error


def read(config: Config) -> tuple[JournalEntry, ...]:
    """Return the entries; empty without a journal.

    Raises:
        MigRecordUnusable: the journal cannot be read, or is not as this release writes it.
    """
    why = "it is damaged, or another release wrote it"
    try:
        content = read_file(_path(config))
        if content is None:
            return ()
        document: Any = parse_json(content)
        if document.get("format") == _FORMAT:
            return tuple(
                JournalEntry(str(uuid), states and (_read(states[0]), _read(states[1])))
                for uuid, states in document["gpus"]
            )
    except OSError as error:
        why = error.strerror or str(error)
    except (*MALFORMED, OverflowError):
        pass
    raise MigRecordUnusable("to read what a MIG layout changed", found=f"{_path(config)}: {why}")


def remove(config: Config) -> None:
    """Remove the journal, if there is one.

    Raises:
        MarkUnwritten: the journal cannot be removed.
    """
    try:
        with suppress(FileNotFoundError):
            remove_file(_path(config))
    except OSError as error:
        raise unwritten(config, "to remove the journal of a MIG layout", error) from error


def _path(config: Config) -> str:
    return os.path.join(os.path.dirname(config.drained), "mig.json")


def _written(partition: Partition) -> list[Any]:
    cuts = [[cut.start, cut.profile, cut.computes] for cut in sorted(partition.cuts)]
    return [partition.mode, cuts]


def _read(value: Any) -> Partition:
    mode, cuts = value
    made = (Cut(int(start), int(no), tuple(map(int, computes))) for start, no, computes in cuts)
    return Partition(mode is True, frozenset(made))
