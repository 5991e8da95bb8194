"""The files of faults in ``STATE/causes``: read once when the agent starts, then written.

Rules
- The service writes the first fault of a container at once, because the shim may read it within
  milliseconds. It writes later faults at most every :data:`QUIET` seconds.
- The service retries failed writes and reports the fault once. The agent continues.
- Faults that an earlier agent wrote are kept. Files with an unknown name are left alone.
- When the agent stops, it writes what is still pending.
- If a fault becomes known only after the container's exit, it is added to the shim's record of that
  exit (:mod:`shim.causes.exit_store`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Final, NoReturn

import anyio

from api.errors import NvshimError
from integration.backoff import Backoff
from integration.detached import SlowCall
from integration.node.faults.fault_log import Entry, FaultLog, Key
from integration.node.service import Context
from shim.causes import exit_store, record
from shim.causes.exit_message import relevant

FAULT: Final = "causes"
DIRECTORY: Final = "causes"
QUIET: Final = 0.25

_SUFFIX: Final = ".json"
_MOST: Final = 4096
_SHUTDOWN: Final = 1.0  # seconds for the last write


def read_all(state: str) -> dict[Key, Entry]:
    """Return the faults in the files, by container.

    Args:
        state: the directory ``state`` of the configuration.
    """
    entries: dict[Key, Entry] = {}
    for namespace in _names(os.path.join(state, DIRECTORY)):
        for name in _names(os.path.join(state, DIRECTORY, namespace)):
            container = name.removesuffix(_SUFFIX)
            if container == name or len(entries) >= _MOST:
                continue
            with suppress(NvshimError):  # the name is not that of a container
                faults = record.read_causes(state, namespace, container)
                if faults:
                    pod = record.read_pod(state, namespace, container)
                    entries[namespace, container] = Entry(faults, pod)
    return entries


def _names(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []


class Files:
    """Writes the files.

    Args:
        fault_log: the faults to write.
    """

    def __init__(self, context: Context, fault_log: FaultLog) -> None:
        self._context = context
        self._state = context.config.state
        self._fault_log = fault_log
        self._wake = anyio.Event()
        self._writing = SlowCall(_SHUTDOWN)  # an older write never replaces a newer one

    def changed(self) -> None:
        """Start a write if anything is pending."""
        if self._fault_log.unwritten:
            self._wake.set()

    async def keep(self) -> NoReturn:
        """Write changes until cancelled."""
        backoff = Backoff()
        try:
            while True:
                await self._wake.wait()
                self._wake = anyio.Event()
                line = await self._write()
                self._context.fault(FAULT, line, part=FAULT)
                if line:
                    await anyio.sleep(backoff.pause())
                    self._wake.set()
                else:
                    backoff = Backoff()
                    await anyio.sleep(QUIET)
        finally:
            with anyio.move_on_after(_SHUTDOWN, shield=True):
                await self._write()

    async def _write(self) -> str:
        """Write what is pending; return the first error, or ""."""
        pending = self._fault_log.take_unwritten()
        failed: dict[Key, str] = {}
        unwritten = set(pending)  # a cancelled call may not have started
        try:
            with suppress(TimeoutError):  # at the end, if the file system does not answer
                await self._writing.run(partial(_write_all, self._state, pending, failed), math.inf)
                unwritten = set(failed)
        finally:
            self._fault_log.unwritten |= unwritten
        return next(iter(failed.values()), "")


def _write_all(state: str, pending: Mapping[Key, Entry], failed: dict[Key, str]) -> None:
    for key, entry in pending.items():
        try:
            if entry.faults:
                record.write_causes(state, *key, entry.faults, pod=entry.pod)
                _add_to_exit(state, key, entry)
            else:
                record.forget_causes(state, *key)
        except (NvshimError, OSError) as error:
            failed[key] = f"cannot write the faults of container {key[1]}: {error}"


def _add_to_exit(state: str, key: Key, entry: Entry) -> None:
    """Add faults to the record of a container's exit that were not known at the exit."""
    document = exit_store.read_ended(state, *key)
    if document is not None:
        late = relevant(entry.faults, document["ended"])
        if not {*record.faults_of(document)}.issuperset(late):
            exit_store.add_faults(state, *key, late)
