"""Names of GPUs on platforms without an inventory, and what is said of requests for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hooks.errors import UnknownDevice
from hooks.platforms.errors import MigUnsupported
from hooks.requests.names import MigIndex, MigInstance, MigUuid, NamedDevices

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hooks.requests.names import DeviceName, Devices
    from hooks.requests.request import Request

__all__ = ["named", "unchecked", "unknown"]


def named(devices: Devices, platform: str) -> Iterator[DeviceName]:
    """The names of GPUs in a request, if it has names.

    Args:
        devices: what is asked.
        platform: of which this is, for people.

    Raises:
        MigUnsupported: one of them is a MIG device's.
    """
    if isinstance(devices, NamedDevices):
        for name in devices.devices:
            if isinstance(name, MigIndex | MigUuid | MigInstance):
                raise MigUnsupported(
                    f"MIG device {name}",
                    found=f"{platform} has no MIG devices",
                    do="name a GPU by its index",
                )
            yield name


def unchecked(request: Request) -> tuple[str, ...]:
    """What is said of an image's requirements where neither driver nor CUDA tell their version.

    Args:
        request: what is asked.
    """
    return tuple(
        f"{variable}={expression} is not checked: the driver tells no version"
        for variable, expression in request.requirements
    )


def unknown(name: DeviceName, found: str) -> UnknownDevice:
    """The error for a GPU that is not there."""
    return UnknownDevice(f"GPU {name}", found=found, do="name it by its index, or all")
