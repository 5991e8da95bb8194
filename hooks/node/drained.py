"""Devices out of service: one file each in ``drained``, a directory that survives reboots.

Rules
- The name of a file identifies what is out of service: the UUID of a GPU or MIG device, the PCI
  address of a GPU without a UUID, or :data:`DRIVER` for the whole driver. Its content gives the
  reason; an unreadable file counts too.
- If a GPU is out of service, so are its MIG devices. A MIG device can also be out of service by
  itself.
- A UUID identifies a card, not a slot: another card in the same slot is in service. While a GPU has
  no UUID, for example after it fell off the bus, its earlier address identifies it. A mark with an
  address counts until it is removed, even if the GPU has a UUID again.
- A drain first marks a device and then lists its holders. A shim first writes the files that make
  its container a holder (the record, the spec), and then checks for marks. So each container is
  either refused, or seen by the drain.
- The directory is normally absent, so looking for it costs one failing system call.

Only root can write there. Nothing in it comes from a container.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from typing import Final

from api.values import dataclass, replace
from hooks.config import Config
from hooks.errors import OutOfService
from hooks.node.gpus import Gpu, MigDevice

DRIVER: Final = "driver"
"""The name of the driver's mark."""

_LONGEST: Final = 1 << 16
_FAR: Final = 1e11  # the comparison also excludes NaN


@dataclass(frozen=True, slots=True)
class Drain:
    """A mark that a device or the driver is out of service."""

    device: str  # a UUID, a PCI address, or DRIVER
    bus_id: str = ""  # the PCI address of the GPU or its MIG device's GPU; "" for none
    reason: str = ""  # the reason, for display; "" for none
    since: float = 0.0  # when it started, in seconds since the epoch; 0 if unknown
    lets_go: bool = False  # whether the node agent closes NVML meanwhile
    for_reset: bool = False  # whether it closes NVML only until a reset ends
    reset: str = ""  # the progress of its reset; "" if none has started
    # whether an operator took it out of service, so that it stays so after its reset
    stays: bool = False

    @property
    def name(self) -> str:
        """The name for display."""
        return "the driver" if self.device == DRIVER else self.device

    @property
    def why(self) -> str:
        """The time and the reason, for display."""
        when = time.strftime("since %Y-%m-%dT%H:%M:%SZ", time.gmtime(self.since))
        told = ": ".join(filter(None, (when if self.since else "", self.reason)))
        return told or "without a word of why"


def path_of(config: Config, device: str) -> str:
    """Return the path of a device's mark."""
    # Older drivers' UUIDs of MIG devices contain slashes.
    name = device.replace("%", "%25").replace("/", "%2F")
    return os.path.join(config.drained, name)


def read_drains(config: Config) -> tuple[Drain, ...]:
    """Return the marks, by name."""
    try:
        names = os.listdir(config.drained)
    except OSError:
        return ()
    # A leading dot marks a file that is being written.
    return tuple(_read(config, _device_of(name)) for name in sorted(names) if name[:1] != ".")


def _device_of(name: str) -> str:
    return name.replace("%2F", "/").replace("%25", "%")


def _read(config: Config, device: str) -> Drain:
    try:
        fd = os.open(path_of(config, device), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            known = json.loads(os.read(fd, _LONGEST))
        finally:
            os.close(fd)
        return Drain(
            device,
            bus_id=str(known.get("bus_id", "")),
            reason=str(known.get("reason", "")),
            since=since if 0 < (since := float(known.get("since", 0))) < _FAR else 0.0,
            lets_go=known.get("lets_go") is True,
            for_reset=known.get("for_reset") is True,
            reset=str(known.get("reset", "")),
            stays=known.get("stays") is True,
        )
    except (OSError, ValueError, TypeError, AttributeError, RecursionError, OverflowError):
        return Drain(device)


def mark_drained(
    gpus: tuple[Gpu, ...], mig_devices: tuple[MigDevice, ...], drains: Iterable[Drain]
) -> tuple[tuple[Gpu, ...], tuple[MigDevice, ...]]:
    """Return the devices, with those that are out of service marked.

    Args:
        gpus: GPUs, perhaps with marks of an older inventory.
    """
    by_name = {drain.device: drain for drain in drains}
    if not by_name:
        return gpus, mig_devices
    by_address = {drain.bus_id: drain for drain in by_name.values() if _is_gpu(drain)}
    marked = []
    for gpu in gpus:
        drain = by_name.get(gpu.uuid) or by_name.get(gpu.bus_id)
        if drain is None and not gpu.uuid:
            drain = by_address.get(gpu.bus_id)
        why = "" if drain is None else drain.why
        marked.append(gpu if gpu.drained == why else replace(gpu, drained=why))
    of_gpu = {gpu.index: gpu.drained for gpu in marked}
    parts = []
    for device in mig_devices:
        drain = by_name.get(device.uuid)
        why = of_gpu.get(device.gpu) or ("" if drain is None else drain.why)
        parts.append(device if device.drained == why else replace(device, drained=why))
    return tuple(marked), tuple(parts)


def reasons_by_device(
    gpus: tuple[Gpu, ...], mig_devices: tuple[MigDevice, ...], drains: Iterable[Drain]
) -> dict[str, str]:
    """Return since when and why devices are out of service, by UUID and by names of marks.

    Args:
        gpus: an inventory's, which may be older than the marks; others count by their marks' names.
    """
    drains = tuple(drains)
    if not drains:
        return {}
    found = {drain.device: drain.why for drain in drains}
    devices = mark_drained(gpus, mig_devices, drains)
    found |= {each.uuid: each.drained for kind in devices for each in kind if each.drained}
    return found


def _is_gpu(drain: Drain) -> bool:
    return drain.device != DRIVER and not drain.device.startswith("MIG-")


def driver_of(drains: Iterable[Drain]) -> str:
    """Return why the driver is out of service; "" if it is in service."""
    return next((drain.why for drain in drains if drain.device == DRIVER), "")


def driver_refusal(asked: str, why: str) -> OutOfService:
    """Return the error for a request for part of a driver that is out of service.

    Args:
        asked: the words of the request; "" if there are none.
        why: since when and why the driver is out of service.
    """
    return OutOfService(
        asked or "what the container asks of the driver",
        found=f"cannot be given: the driver is out of service {why}",
        do="wait for it, or return it to service: `nvshim undrain --driver`",
    )


def refusal(device: Gpu | MigDevice) -> OutOfService:
    """Return the error for a request that names a device that is out of service."""
    name = device.index if isinstance(device, Gpu) else f"{device.gpu}:{device.index}"
    return OutOfService(
        str(device),
        found=f"is out of service {device.drained}",
        do=f"name another, or return it to service: `nvshim undrain {name}`",
    )
