"""The devices that a drain or reset command names: GPUs, MIG devices, or the driver."""

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
from integration.devices.drain_errors import DrainError, NotDrained, TargetUnknown


@dataclass(frozen=True, slots=True)
class Target:
    """A device to drain or reset, or the driver."""

    device: str  # the name of its mark
    name: str  # for messages ("GPU 3", "MIG device 3:0", "the driver")
    gpu: Gpu | None = None  # the GPU, or the MIG device's GPU; None for the driver
    mig: MigDevice | None = None  # None for a GPU and the driver

    @property
    def words(self) -> str:
        """Its name on a command line."""
        if self.gpu is None:
            return "--driver"
        return str(self.gpu.index) if self.mig is None else f"{self.mig.gpu}:{self.mig.index}"


THE_DRIVER = Target(DRIVER, "the driver")


def targets_of(names: Iterable[str], inventory: Inventory) -> tuple[Target, ...]:
    """Return the named devices, each once.

    Args:
        names: indices, UUIDs or prefixes of them, PCI addresses; "all" for every GPU.

    Raises:
        TargetUnknown: a name matches no device, or several.
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
            what = f"matches {len(found)} UUIDs" if found else "is not on this node"
            raise _unknown(str(each), what)
        targets += found
    return targets


def _whole(gpu: Gpu) -> Target:
    return Target(id_of(gpu), f"GPU {gpu.index}", gpu)


def _unknown(name: str, found: str) -> DrainError:
    return TargetUnknown(f"the device {name}", found=found, do="name one that `nvshim list` shows")


def drained_of(
    names: Sequence[str], inventory: Inventory | None, config: Config
) -> tuple[Drain, ...]:
    """Return the named marks, including those of devices that the node no longer has.

    Args:
        names: as for :func:`targets_of`; "all" for every device that is out of service.
        inventory: the node's inventory; None if it is unknown.

    Raises:
        NotDrained: a named device is in service.
        TargetUnknown: a name matches nothing.
    """
    marks = {each.device: each for each in read_drains(config) if each.device != DRIVER}
    found: dict[str, Drain] = {}
    for name in names:
        low = name.lower()
        by_name = [each for each in marks.values() if low == "all" or _is_called(each, low)]
        if len(by_name) > 1 and low != "all":
            raise _unknown(name, f"matches {len(by_name)} devices that are out of service")
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


def _is_called(mark: Drain, name: str) -> bool:
    """Return whether a name starts a mark's device, or is its address; an index is neither."""
    is_prefix = mark.device.lower().startswith(name) and not name.isdecimal()
    return is_prefix or mark.bus_id.lower() == name


def _marks(mark: Drain, target: Target) -> bool:
    gpu = target.gpu
    if mark.device == target.device or gpu is None or target.mig is not None:
        return mark.device == target.device
    return gpu.bus_id == (mark.device if gpu.uuid else mark.bus_id)
