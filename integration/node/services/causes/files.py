"""The files of faults, ``STATE/causes``: written by a thread, read once when the agent begins.

Rules
- The first fault of a container is written at once: its shim may look for it in the next
  milliseconds. Of what follows, a container's file is written every :data:`QUIET` seconds at most.
- What cannot be written is tried again; the agent goes on, and says so once.
- What an agent before this one has written is kept. A name that is none is left alone.
- When the agent ends, what was not written yet is.
- What is known only after a container's end is added to what the shim has kept of that end
  (:mod:`shim.causes.exit_store`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NoReturn

import anyio

from api.errors import NvshimError
from integration.backoff import Backoff
from integration.detached import run_detached
from integration.node.faults.fault_log import Entry, FaultLog, Key
from shim.causes import exit_store, record
from shim.causes.exit_message import relevant

if TYPE_CHECKING:
    from integration.node.service import Context

FAULT: Final = "causes"
DIRECTORY: Final = "causes"
QUIET: Final = 0.25

_SUFFIX: Final = ".json"
_MOST: Final = 4096
_TO_END: Final = 1.0


def read_all(state: str) -> dict[Key, Entry]:
    """What the files say of each container.

    Args:
        state: the directory ``state`` of the configuration.
    """
    found: dict[Key, Entry] = {}
    for namespace in _names(os.path.join(state, DIRECTORY)):
        for name in _names(os.path.join(state, DIRECTORY, namespace)):
            container = name.removesuffix(_SUFFIX)
            if container == name or len(found) >= _MOST:
                continue
            with suppress(NvshimError):  # a name that is none of a container's
                faults = record.read_causes(state, namespace, container)
                if faults:
                    pod = record.read_pod(state, namespace, container)
                    found[namespace, container] = Entry(faults, pod)
    return found


def _names(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []


class Files:
    """Who writes.

    Args:
        fault_log: what is to be written.
    """

    def __init__(self, context: Context, fault_log: FaultLog) -> None:
        self._context = context
        self._state = context.config.state
        self._journal = fault_log
        self._news = anyio.Event()

    def changed(self) -> None:
        """Have what was not written yet be written."""
        if self._journal.unwritten:
            self._news.set()

    async def keep(self) -> NoReturn:
        """Write what has changed, until cancelled."""
        backoff = Backoff()
        try:
            while True:
                await self._news.wait()
                self._news = anyio.Event()
                line = await self._write()
                self._context.fault(FAULT, line, part=FAULT)
                if line:
                    await anyio.sleep(backoff.pause())
                    self._news.set()
                else:
                    backoff = Backoff()
                    await anyio.sleep(QUIET)
        finally:
            with anyio.move_on_after(_TO_END, shield=True):
                await self._write()

    async def _write(self) -> str:
        """Write; why something could not be."""
        taken = self._journal.take_unwritten()
        failed: dict[Key, str] = {}
        await run_detached(_write_all, self._state, taken, failed)
        self._journal.unwritten |= failed.keys()
        return next(iter(failed.values()), "")


def _write_all(state: str, taken: Mapping[Key, Entry], failed: dict[Key, str]) -> None:
    for key, entry in taken.items():
        try:
            if entry.faults:
                record.write_causes(state, *key, entry.faults, pod=entry.pod)
                _add_to_end(state, key, entry)
            else:
                record.forget_causes(state, *key)
        except (NvshimError, OSError) as error:
            failed[key] = f"causes of ends of {key[1]}: {error}"


def _add_to_end(state: str, key: Key, entry: Entry) -> None:
    """Tell of a container that has ended what was not known then."""
    document = exit_store.read_ended(state, *key)
    if document is not None:
        late = relevant(entry.faults, document["ended"])
        if not {*record.faults_of(document)}.issuperset(late):
            exit_store.add_faults(state, *key, late)
