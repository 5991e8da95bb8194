"""Query NVML and measure how long it takes."""

from __future__ import annotations

import json
import os
import time
from typing import Final

from hooks.config import Config
from hooks.errors import InventoryError
from hooks.node.driver import find_driver
from hooks.node.fingerprint import Fingerprint
from hooks.node.gpus import find_gpus, look_at_nodes
from hooks.node.nvml import parse_report
from integration.doctor.facts import Nvml
from integration.doctor.places import Places
from integration.nvml.query import ask_nvml, probe

_PERSISTENCED: Final = "/run/nvidia-persistenced/socket"
# Added to the child's own limit: the kernel kills the child then, and that takes a moment.
_MORE: Final = 2.0


def look_at_nvml(places: Places) -> Nvml | None:
    """Return NVML's answer; None without a driver, which another check reports."""
    config = places.config()
    try:
        driver = find_driver(Fingerprint(config.host_root), config)
    except InventoryError:
        return None
    started = time.monotonic()
    answer = probe(config, more=_MORE)
    seconds = round(time.monotonic() - started, 2)
    uuids: tuple[str, ...] = ()
    lost: list[str] = []
    conflicts: list[str] = []
    notes: tuple[str, ...] = ()
    failure = f"no answer within {config.nvml_timeout:g} s" if answer is None else ""
    if answer is not None:
        try:
            report = parse_report(answer)
        except InventoryError as error:
            failure = error.found
        else:
            if report.driver != driver.version:
                files = f"the driver's files and module have version {driver.version}"
                conflicts.append(f"NVML has driver version {report.driver}, {files}")
            found = find_gpus(Fingerprint(config.host_root), config, report)
            told = [gpu for gpu in found.gpus if gpu.bus_id in found.reported]
            uuids = tuple(gpu.uuid for gpu in told if not gpu.lost)
            # NVML opens a GPU through its device node; D009 reports a wrong node.
            wrong = look_at_nodes(config, found.gpus, ()).wrong
            lost = [f"{gpu}: {gpu.lost}" for gpu in told if gpu.lost and gpu.path not in wrong]
            conflicts += found.conflicts
            notes = report.notes
    persistence = "unknown"
    if os.path.exists(places.at(_PERSISTENCED)):
        persistence = "daemon"
    elif not failure:
        persistence = _persistence(config)
    return Nvml(
        seconds, config.nvml_timeout, failure, uuids, tuple(lost), tuple(conflicts), notes,
        persistence,
    )  # fmt: skip


def _persistence(config: Config) -> str:
    try:
        answer = json.loads(ask_nvml(config, "persistence") or b"{}")
    except ValueError:
        return "unknown"
    modes = [mode for mode in answer.get("modes", ()) if mode is not None]
    if not modes:
        return "unknown"
    return "on" if all(modes) else "off"
