"""Compute modes: a GPU that is shared by MPS may be opened by one process only, the server.

Rules
- What is going to be set is noted before it is set, and the note goes after it was set back.
  Whoever is killed between any two steps leaves either nothing or what the next one finds.

Source: NVML, nvmlDeviceSetComputeMode.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from contextlib import suppress
from typing import Any, Final

from hooks.config import Config
from hooks.errors import DriverNotFound
from integration.agent_errors import ComputeModeFailed
from integration.files import read_file, replace_file
from integration.json_documents import parse_json
from integration.node.mps.paths import Places
from integration.node.services.mps.host_setup import unusable
from integration.nvml.query import ask_nvml

_DEFAULT: Final = 0
_EXCLUSIVE_PROCESS: Final = 3
"""NVML's numbers."""


def take(config: Config, places: Places, uuids: tuple[str, ...]) -> None:
    """Let one process open each of some GPUs, for a resource.

    Raises:
        MpsStateUnusable: it cannot be noted.
        ComputeModeFailed: not all are set so.
        DriverNotFound: there is no driver below the driver root.
        DriverMismatch: its files are not of the loaded kernel module's version.
    """
    note(places, dict.fromkeys((*taken(places), *uuids)))
    set_mode(config, _EXCLUSIVE_PROCESS, uuids)


def give_back(config: Config, places: Places, uuids: Collection[str]) -> None:
    """Let any number of processes open those of some GPUs that were taken for a resource.

    Raises:
        MpsStateUnusable: it cannot be noted.
        ComputeModeFailed: one could not be set back; it stays noted.
        DriverMismatch: the driver's files are not of the loaded kernel module's version.
    """
    known = taken(places)
    gone = tuple(uuid for uuid in known if uuid in uuids)
    if gone:
        with suppress(DriverNotFound):  # without a driver there are no modes
            set_mode(config, _DEFAULT, gone)
        note(places, [uuid for uuid in known if uuid not in gone])


def taken(places: Places) -> tuple[str, ...]:
    """The GPUs whose compute mode somebody has set for a resource, or was about to."""
    try:
        known: Any = parse_json(read_file(places.devices) or b"[]")
    except (OSError, ValueError):
        return ()
    return tuple(each for each in known if isinstance(each, str)) if isinstance(known, list) else ()


def note(places: Places, uuids: Iterable[str]) -> None:
    """Say whose compute mode is set."""
    try:
        replace_file(places.devices, json.dumps(list(uuids)).encode(), mode=0o600)
    except OSError as error:
        raise unusable(places, error) from error


def set_mode(config: Config, mode: int, uuids: tuple[str, ...]) -> None:
    """Have NVML set it."""
    if not uuids:
        return
    answer = ask_nvml(config, "mode", str(mode), *uuids)
    try:
        told: Any = json.loads(answer or b"")
        failed = {uuid: str(why) for uuid, why in told.items() if why}
    except (ValueError, AttributeError):
        failed = {uuids[0]: "NVML crashed, or did not answer in time"}
    if failed:
        uuid, why = next(iter(failed.items()))
        raise ComputeModeFailed(
            f"compute mode {'EXCLUSIVE_PROCESS' if mode else 'DEFAULT'} of {', '.join(uuids)}",
            found=f"{'NVML' if uuid == 'error' else uuid}: {why}",
            do="see that nvidia-smi -c works on the node; the node agent tries it again",
        )
