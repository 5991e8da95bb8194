"""What this node has: the driver, the GPUs, the MIG devices, and their nodes.

Taking an inventory reads some hundred files and includes NVML's answer, so it is kept
(:mod:`hooks.node.cache`). What changes without the driver changing, device nodes and the sockets of
the driver's services, is looked at anew each time an inventory is loaded.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from api.values import changed, value
from hooks.errors import NvmlFailed
from hooks.node import cache
from hooks.node.driver import find_driver, find_sockets
from hooks.node.gpus import find_gpus, find_mig_devices, find_unsettled, look_at_nodes
from hooks.node.nvml import parse_report
from hooks.node.witness import Witness, read_text
from hooks.requests.exclusions import mark_excluded
from hooks.requests.requirements import cuda_of_branch

if TYPE_CHECKING:
    from collections.abc import Callable

    from hooks.config import Config
    from hooks.node.driver import Driver
    from hooks.node.gpus import Gpu, MigDevice, Nodes
    from hooks.node.nvml import NvmlReport

__all__ = ["NOT_KEPT", "Inventory", "load_inventory", "look_again", "survey", "take_inventory"]

RETRY_AFTER: Final = 60.0
"""Seconds until NVML is asked again after it failed, or after it said what procfs cannot confirm
(the kernel does not tell of MIG mode without instances, nor of a GPU that came back): a create
must not wait for it each time."""

NOT_KEPT: Final = "the inventory was not kept"
"""How the note begins that says why the next container cannot use this one's inventory."""


@value
class Inventory:
    """What this node has.

    Attributes:
        driver: the user-space driver.
        gpus: the GPUs, by index.
        mig_devices: the MIG devices, by GPU and index.
        nodes: the device nodes as they are now.
        sockets: the sockets that are there now: host path by path in the container.
        notes: what did not fit together, for people.
        nvml_failure: why NVML's answer is not in it; "" if it is.
        parameters: the kernel module's, as procfs has them now; "" if it is not loaded.
        kept: whether it was made for an earlier container, and was found to be still true. What
            the kernel does not tell of may have changed since; so a refusal that is founded on
            it is to be founded anew.
        cuda_version: the newest CUDA that the driver supports ("12.2"), by NVML's word or else by
            the driver's branch; "" if neither knows.
        taken: when it was taken, in seconds since boot.
    """

    driver: Driver
    gpus: tuple[Gpu, ...]
    mig_devices: tuple[MigDevice, ...]
    nodes: Nodes
    sockets: dict[str, str]
    notes: tuple[str, ...] = ()
    nvml_failure: str = ""
    parameters: str = ""
    cuda_version: str = ""
    kept: bool = False
    taken: float = 0.0
    _apart = ("kept", "taken")

    @property
    def sources(self) -> tuple[str, ...]:
        """What of the host may be mounted: the sockets, and where the driver's files are.

        The driver's root does not say so much: it may be that of the host.
        """
        files = [file.source for file in self.driver.libraries]
        files += [file.source for file in self.driver.files]
        directories = dict.fromkeys(file.rpartition("/")[0] for file in files)
        return (*directories, *self.sockets.values())


def load_inventory(config: Config) -> Inventory | None:
    """The inventory that was kept, if it is still true.

    Args:
        config: where to look.

    Returns:
        The inventory; None if there is none, or if the node has changed since.
    """
    kept = cache.load(config)
    if kept is None:
        return None
    if _is_too_old(kept):
        return None
    return changed(_complete(config, kept), kept=True)


def _is_too_old(kept: cache.Kept) -> bool:
    doubtful = kept.nvml_failure or kept.unsettled
    return bool(doubtful) and not 0 <= _now() - kept.taken < RETRY_AFTER


def take_inventory(config: Config, nvml_report: bytes | None) -> Inventory:
    """Looks at the node, and keeps what was found.

    Args:
        config: where to look.
        nvml_report: what the command of :func:`hooks.node.nvml.probe_command` printed; None if it
            was not run or did not end in time. GPUs are found without it, MIG devices are not.

    Returns:
        The inventory. If it could not be kept, one of its notes says why.

    Raises:
        DriverNotFound: there is no driver below the driver root.
        DriverMismatch: its files are not of the loaded kernel module's version.
    """
    witness = Witness(config.host_root)
    kept = _look(witness, config, nvml_report)
    fault = cache.store(config, kept, witness.observations)
    return _complete(config, kept, *([f"{NOT_KEPT}: {fault}"] if fault else []))


def survey(config: Config, ask: Callable[[], bytes | None] | None = None) -> Inventory:
    """The inventory for a person who asks: nothing is kept.

    Args:
        config: where to look.
        ask: asks NVML as :func:`hooks.node.nvml.probe_command` says, if nothing is kept that is
            still true, and returns the answer; by default it is not asked.

    Returns:
        What was kept if it is still true, whatever NVML had said then; otherwise what the node
        shows now.

    Raises:
        DriverNotFound: there is no driver below the driver root.
        DriverMismatch: its files are not of the loaded kernel module's version.
    """
    kept = cache.load(config)
    if kept is not None:
        return changed(_complete(config, kept), kept=True)
    if ask is None:
        return _complete(config, _look(Witness(config.host_root), config, None, _NOT_ASKED))
    return _complete(config, _look(Witness(config.host_root), config, ask()))


_NOT_ASKED: Final = "NVML was not asked"
_OF_ANOTHER: Final = "NVML is of driver"


def _look(
    witness: Witness,
    config: Config,
    nvml_report: bytes | None,
    unanswered: str = "NVML did not answer in time",
) -> cache.Kept:
    """Looks at the node through a witness."""
    witness.text(cache.boot_id_path(config))
    driver = find_driver(witness, config)
    report, failure = _understand(nvml_report, driver, unanswered)
    found = find_gpus(witness, config, report)
    unsettled = find_unsettled(witness, config, found)
    failed = report.notes if report else ()
    return cache.Kept(
        driver=driver,
        gpus=found.gpus,
        mig_devices=find_mig_devices(config, found),
        notes=(*found.notes, *found.conflicts, *failed, *unsettled),
        nvml_failure=failure,
        # In the midst of an update, so that it is out of date as soon as it is made.
        taken=_now() - (RETRY_AFTER if failure.startswith(_OF_ANOTHER) else 0),
        unsettled="; ".join(unsettled),
        cuda_version=(report.cuda if report else "") or cuda_of_branch(driver.version),
    )


def look_again(config: Config, inventory: Inventory) -> Inventory:
    """The inventory with its device nodes as they are now.

    Args:
        config: where procfs and the device nodes are.
        inventory: from some moments ago.

    Returns:
        A new inventory.
    """
    nodes = _nodes(config, inventory.driver.root, inventory.gpus, inventory.mig_devices)
    return changed(inventory, nodes=nodes)


def _nodes(
    config: Config, root: str, gpus: tuple[Gpu, ...], mig_devices: tuple[MigDevice, ...]
) -> Nodes:
    of_the_driver = f"{root}/dev" if root not in {config.host_root, "/"} else None
    return look_at_nodes(config, gpus, mig_devices, of_the_driver)


def _complete(config: Config, kept: cache.Kept, *notes: str) -> Inventory:
    root = kept.driver.root
    gpus, exclusions = mark_excluded(kept.gpus, config.excluded_gpus)
    return Inventory(
        driver=kept.driver,
        gpus=gpus,
        mig_devices=kept.mig_devices,
        nodes=_nodes(config, root, gpus, kept.mig_devices),
        sockets=find_sockets(root),
        notes=(*kept.notes, *notes, *exclusions),
        nvml_failure=kept.nvml_failure,
        parameters=read_text(f"{config.proc}/driver/nvidia/params") or "",
        cuda_version=kept.cuda_version,
        taken=kept.taken,
    )


def _understand(
    answer: bytes | None, driver: Driver, unanswered: str
) -> tuple[NvmlReport | None, str]:
    """NVML's report, or why there is none that can be believed."""
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
    """Seconds since boot, as the cache does not outlive one; it cannot be set back."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
