"""What a person means who takes something out of service: GPUs, MIG devices, or the driver."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hooks.config import Config
from hooks.edits.grant import gpus_named, mig_devices_named
from hooks.errors import RequestError
from hooks.node.drained import DRIVER, Drain, read_drains
from hooks.node.gpus import Gpu, MigDevice
from hooks.node.inventory import Inventory
from hooks.requests.naming import parse_names
from hooks.sharing import id_of
from hooks.words import AllDevices, NamedDevices
from integration.devices.drain_errors import NotDrained, TargetUnknown


@dataclass(frozen=True, slots=True)
class Target:
    """What is taken out of service."""

    device: str  # what its mark is called
    name: str  # what people call it ("GPU 3", "MIG device 3:0", "the driver")
    gpu: Gpu | None = None  # the GPU that it is, or is a part of; None for the driver
    mig: MigDevice | None = None  # the MIG device that it is; None for a GPU, and for the driver

    @property
    def words(self) -> str:
        """How a command names it."""
        if self.gpu is None:
            return "--driver"
        return str(self.gpu.index) if self.mig is None else f"{self.mig.gpu}:{self.mig.index}"


THE_DRIVER = Target(DRIVER, "the driver")


def targets_of(names: Iterable[str], inventory: Inventory) -> tuple[Target, ...]:
    """The devices that are named, each once.

    Args:
        names: as containers write them: indices, UUIDs or their beginnings, PCI addresses; "all"
            for every GPU.

    Raises:
        TargetUnknown: a name is that of no device, or of several.
    """
    found: dict[str, Target] = {}
    for name in names:
        found |= {target.device: target for target in _named(name, inventory)}
    return tuple(found.values())


def _named(name: str, inventory: Inventory) -> list[Target]:
    try:
        named = parse_names([name], asked=name).devices
    except RequestError as error:
        raise _unknown(name, error.found) from error
    gpus = {gpu.index: gpu for gpu in inventory.gpus}
    if isinstance(named, AllDevices):
        return [_whole(gpu) for gpu in inventory.gpus]
    if not isinstance(named, NamedDevices):
        raise _unknown(name, "names no GPU and no MIG device")
    targets = []
    for each in named.devices:
        found = [_whole(gpu) for gpu in gpus_named(each, inventory)]
        found += [
            Target(mig.uuid, f"MIG device {mig.gpu}:{mig.index}", gpus[mig.gpu], mig)
            for mig in mig_devices_named(each, inventory)
            if mig.gpu in gpus
        ]
        if len(found) != 1:
            what = f"is the beginning of {len(found)} UUIDs" if found else "is not on this node"
            raise _unknown(str(each), what)
        targets += found
    return targets


def _whole(gpu: Gpu) -> Target:
    return Target(id_of(gpu), f"GPU {gpu.index}", gpu)


def _unknown(name: str, found: str) -> TargetUnknown:
    return TargetUnknown(f"the device {name}", found=found, do="name one that `nvshim list` shows")


def drained_of(
    names: Sequence[str], inventory: Inventory | None, config: Config
) -> tuple[Drain, ...]:
    """The marks that are named, also of devices that the node does not have any more.

    Args:
        names: as for :func:`targets_of`; "all" for every device that is out of service.
        inventory: what the node has; None if that is not known.

    Raises:
        NotDrained: what is named is in service.
        TargetUnknown: a name is that of nothing.
    """
    marks = {each.device: each for each in read_drains(config) if each.device != DRIVER}
    found: dict[str, Drain] = {}
    for name in names:
        low = name.lower()
        by_name = [
            each
            for each in marks.values()
            if low == "all" or each.device.lower().startswith(low) or each.bus_id.lower() == low
        ]
        if len(by_name) > 1 and low != "all":
            raise _unknown(name, f"is that of {len(by_name)} devices that are out of service")
        if not by_name and inventory is not None:
            meant = targets_of([name], inventory)
            by_name = [mark for each in meant for mark in marks.values() if _marks(mark, each)]
        if not by_name:
            raise NotDrained(
                f"to return {name} to service",
                found="it is in service, or goes out of it with its GPU or the driver",
                do="see `nvshim list` for what is out of service",
            )
        found |= {each.device: each for each in by_name}
    return tuple(found.values())


def _marks(mark: Drain, target: Target) -> bool:
    if mark.device == target.device:
        return True
    gpu = target.gpu
    lost_its_uuid = gpu is not None and target.mig is None and not gpu.uuid
    return lost_its_uuid and gpu is not None and mark.bus_id == gpu.bus_id
