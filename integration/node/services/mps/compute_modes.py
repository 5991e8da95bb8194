"""Compute modes: allow only one process, the MPS server, to open a GPU that is shared by MPS.

Rules
- The agent records a GPU on disk before it sets its mode, and removes the record after it restores
  the mode. So an agent that is killed between two steps leaves a record for its successor.

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
"""NVML's numbers of compute modes."""


def take(config: Config, places: Places, uuids: tuple[str, ...]) -> None:
    """Allow a single process on each of these GPUs, for a resource.

    Raises:
        MpsStateUnusable: the record cannot be written.
        ComputeModeFailed: the mode of a GPU could not be set.
        DriverNotFound: there is no driver below the driver root.
        DriverMismatch: the version of its files differs from that of the loaded kernel module.
    """
    record(places, dict.fromkeys((*taken(places), *uuids)))
    set_mode(config, _EXCLUSIVE_PROCESS, uuids)


def give_back(config: Config, places: Places, uuids: Collection[str]) -> None:
    """Restore the default mode of some GPUs, if they were taken for a resource.

    Raises:
        MpsStateUnusable: the record cannot be written.
        ComputeModeFailed: a mode could not be restored; the record keeps the GPU.
        DriverMismatch: the version of the driver's files differs from that of the kernel module.
    """
    known = taken(places)
    gone = tuple(uuid for uuid in known if uuid in uuids)
    if gone:
        with suppress(DriverNotFound):  # without a driver no GPU has a mode
            set_mode(config, _DEFAULT, gone)
        record(places, [uuid for uuid in known if uuid not in gone])


def taken(places: Places) -> tuple[str, ...]:
    """Return the recorded GPUs: an agent has set their mode for a resource, or was about to."""
    try:
        known: Any = parse_json(read_file(places.devices) or b"[]")
    except (OSError, ValueError):
        return ()
    return tuple(each for each in known if isinstance(each, str)) if isinstance(known, list) else ()


def record(places: Places, uuids: Iterable[str]) -> None:
    """Record the GPUs whose compute mode is set for a resource."""
    try:
        replace_file(places.devices, json.dumps(list(uuids)).encode(), mode=0o600)
    except OSError as error:
        raise unusable(places, error) from error


def set_mode(config: Config, mode: int, uuids: tuple[str, ...]) -> None:
    """Set the compute mode of these GPUs."""
    if not uuids:
        return
    answer = ask_nvml(config, "mode", str(mode), *uuids)
    try:
        reply: Any = json.loads(answer or b"")
        failed = {uuid: str(why) for uuid, why in reply.items() if why}
    except (ValueError, AttributeError):
        failed = {uuids[0]: "NVML crashed, or did not answer in time"}
    if failed:
        uuid, why = next(iter(failed.items()))
        raise ComputeModeFailed(
            f"compute mode {'EXCLUSIVE_PROCESS' if mode else 'DEFAULT'} of {', '.join(uuids)}",
            found=f"{'NVML' if uuid == 'error' else uuid}: {why}",
            do="check that nvidia-smi -c works on the node; the node agent tries again",
        )
