"""What this node has: the driver, the GPUs, the MIG devices, and their nodes.

Taking an inventory reads some hundred files and includes NVML's answer, so it is cached
(:mod:`hooks.node.cache`). Device nodes and services' sockets may change while the driver does not,
so they are looked up whenever an inventory is loaded.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from api.values import dataclass, field, replace
from hooks.config import Config
from hooks.errors import NvmlFailed
from hooks.node import cache
from hooks.node.device_nodes import MadeNodes
from hooks.node.drained import driver_of, mark_drained, read_drains
from hooks.node.driver import Driver, find_driver, find_sockets
from hooks.node.fingerprint import Fingerprint, read_text
from hooks.node.gpus import (
    Gpu,
    MigDevice,
    Nodes,
    find_gpus,
    find_mig_devices,
    find_unsettled,
    look_at_nodes,
    mark_excluded,
)
from hooks.node.nvml import NvmlReport, parse_report
from hooks.node.roots import cuda_of_branch, is_new_branch

RETRY_AFTER: Final = 60.0
"""Seconds until NVML is queried again after it failed, or reported what procfs cannot confirm
(MIG mode without instances, or a GPU that came back), so that not every create waits for it."""

NOT_KEPT: Final = "the inventory was not kept"
"""The start of the note that explains why the next container cannot use this inventory."""


@dataclass(frozen=True, slots=True)
class Inventory:
    """What this node has."""

    driver: Driver
    gpus: tuple[Gpu, ...]  # the GPUs, by index
    mig_devices: tuple[MigDevice, ...]  # the MIG devices, by GPU and index
    nodes: Nodes
    sockets: dict[str, str]  # the existing sockets: host path by path in the container
    notes: tuple[str, ...] = ()  # inconsistencies, for display
    nvml_failure: str = ""  # why it lacks NVML's answer; "" if it has it
    parameters: str = ""  # the kernel module's, as in procfs now; "" if it is not loaded
    # the newest CUDA that the driver supports ("12.2"), as reported by NVML or else according to
    # the driver's branch; "" if neither is known
    cuda_version: str = ""
    drained: str = ""  # since when and why the driver is out of service; "" if it is in service
    # whether it is an earlier container's, and still valid. Something that the kernel does not
    # report may have changed since, so a refusal that depends on it must be checked with a new
    # inventory.
    kept: bool = field(default=False, compare=False)
    taken: float = field(default=0.0, compare=False)  # when it was taken, in seconds since boot
    # the unique id of its cached part; "" if it is not cached
    id: str = field(default="", compare=False)
    # the device nodes created for this container
    made: MadeNodes = field(default=MadeNodes(), compare=False)
    # the observations of the driver's files (hooks.node.fingerprint), by path
    files: Mapping[str, Any] | None = field(default=None, compare=False)

    @property
    def sources(self) -> tuple[str, ...]:
        """Return the allowed sources of mounts: sockets, and directories of the driver's files.

        The driver's root is too general, because it may be the host's.
        """
        files = [file.source for file in self.driver.libraries]
        files += [file.source for file in self.driver.files]
        directories = dict.fromkeys(file.rpartition("/")[0] for file in files)
        return (*directories, *self.sockets.values())


def load_inventory(config: Config) -> Inventory | None:
    """Return the cached inventory; None without one, or if the node has changed."""
    kept = cache.load(config)
    if kept is None or _is_too_old(kept[0]):
        return None
    return replace(_complete(config, *kept), kept=True)


def _is_too_old(kept: cache.StoredInventory) -> bool:
    doubtful = kept.nvml_failure or kept.unsettled
    return bool(doubtful) and not 0 <= _now() - kept.taken < RETRY_AFTER


def take_inventory(config: Config, nvml_report: bytes | None) -> Inventory:
    """Take an inventory and store it; if storing fails, a note says why.

    Args:
        nvml_report: the output of :func:`hooks.node.nvml.probe_command`'s command; None if it did
            not run, or not end in time. GPUs are found without it, but not MIG devices.

    Raises:
        DriverNotFound: there is no driver below the driver root.
        DriverMismatch: the driver's files do not match the loaded kernel module's version.
    """
    fingerprint = Fingerprint(config.host_root)
    found = replace(_look(fingerprint, config, nvml_report), id=os.urandom(16).hex())
    fault = cache.store(config, found, fingerprint.observations)
    if fault:
        found = replace(found, id="", notes=(*found.notes, f"{NOT_KEPT}: {fault}"))
    return _complete(config, found, fingerprint.files())


def survey(config: Config, ask: Callable[[], bytes | None] | None = None) -> Inventory:
    """Return the inventory for a user's command, without caching it.

    Args:
        ask: queries NVML as in :func:`hooks.node.nvml.probe_command`, and returns the answer;
            called only without a valid cached inventory. By default NVML is not queried.

    Returns:
        The cached inventory if still valid, whatever NVML had reported; otherwise a new one.

    Raises:
        DriverNotFound: there is no driver below the driver root.
        DriverMismatch: the driver's files do not match the loaded kernel module's version.
    """
    kept = cache.load(config)
    if kept is not None:
        return replace(_complete(config, *kept), kept=True)
    fingerprint = Fingerprint(config.host_root)
    answer, unanswered = (None, _NOT_ASKED) if ask is None else (ask(), _TOO_LATE)
    found = _look(fingerprint, config, answer, unanswered)
    return _complete(config, found, fingerprint.files())


_NOT_ASKED: Final = "NVML was not asked"
_TOO_LATE: Final = "NVML did not answer in time"
_OF_ANOTHER: Final = "NVML is of driver"


def _look(
    fingerprint: Fingerprint,
    config: Config,
    nvml_report: bytes | None,
    unanswered: str = _TOO_LATE,
) -> cache.StoredInventory:
    """Read the node through a fingerprint."""
    fingerprint.text(cache.boot_id_path(config))
    driver = find_driver(fingerprint, config)
    report, failure = _understand(nvml_report, driver, unanswered)
    found = find_gpus(fingerprint, config, report)
    unsettled = find_unsettled(fingerprint, config, found)
    failed = report.notes if report else ()
    cuda = report.cuda if report else ""
    if not cuda and is_new_branch(driver.version):
        least = cuda_of_branch(driver.version)
        failed = (*failed, f"the CUDA of driver {driver.version} is not known: at least {least}")
    return cache.StoredInventory(
        driver=driver,
        gpus=found.gpus,
        mig_devices=find_mig_devices(config, found),
        notes=(*found.notes, *found.conflicts, *failed, *unsettled),
        nvml_failure=failure,
        # Changed during the reads, as in an update, so it is already out of date.
        taken=_now() - (RETRY_AFTER if failure.startswith(_OF_ANOTHER) else 0),
        unsettled="; ".join(unsettled),
        cuda_version=cuda or cuda_of_branch(driver.version),
    )


def look_again(config: Config, inventory: Inventory) -> Inventory:
    """Return the inventory with the present state of its device nodes."""
    nodes = _nodes(config, inventory.driver.root, inventory.gpus, inventory.mig_devices)
    return replace(inventory, nodes=nodes)


def _nodes(
    config: Config, root: str, gpus: tuple[Gpu, ...], mig_devices: tuple[MigDevice, ...]
) -> Nodes:
    of_the_driver = f"{root}/dev" if root not in {config.host_root, "/"} else None
    return look_at_nodes(config, gpus, mig_devices, of_the_driver)


def _complete(config: Config, found: cache.StoredInventory, files: Mapping[str, Any]) -> Inventory:
    root = found.driver.root
    gpus, exclusions = mark_excluded(found.gpus, config.excluded_gpus)
    drains = read_drains(config)
    gpus, mig_devices = mark_drained(gpus, found.mig_devices, drains)
    return Inventory(
        driver=found.driver,
        gpus=gpus,
        mig_devices=mig_devices,
        nodes=_nodes(config, root, gpus, found.mig_devices),
        sockets=find_sockets(root, config.service_sockets),
        notes=(*found.notes, *exclusions),
        nvml_failure=found.nvml_failure,
        parameters=read_text(f"{config.proc}/driver/nvidia/params") or "",
        cuda_version=found.cuda_version,
        drained=driver_of(drains),
        taken=found.taken,
        id=found.id,
        files=files,
    )


def _understand(
    answer: bytes | None, driver: Driver, unanswered: str
) -> tuple[NvmlReport | None, str]:
    """Return NVML's report, or why it is unusable."""
    if answer is None:
        return None, unanswered
    try:
        report = parse_report(answer)
    except NvmlFailed as error:
        return None, error.found
    if report.driver != driver.version:
        return None, f"{_OF_ANOTHER} {report.driver}, the files of {driver.version}"
    return report, ""


def _now() -> float:
    """Return seconds since boot; this clock cannot be set back."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
