"""Intel's GPUs: PCI devices of a display class with a render node.

Rules
- Integrated and discrete ones, whole ones and virtual functions alike: whatever i915 or xe has
  made a render node for. Indices go by PCI address.
- A display device without a render node (no driver, or one for display alone) is none.
- There is no node that all share: the render node is all that a process opens.

Source: Intel's device plugin for Kubernetes, cmd/gpu_plugin; Documentation/gpu/i915.rst.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from hooks.node.gpus import bus_order, read_majors
from hooks.node.witness import read_names, read_text
from hooks.vendors.drm import DRM, drm_devices
from hooks.vendors.errors import NoVendorDriver
from hooks.vendors.gpus import VendorGpu, granted
from hooks.vendors.names import address_names

if TYPE_CHECKING:
    from hooks.config import Config
    from hooks.edits.plan import Contribution
    from hooks.vendors.names import Asked

__all__ = ["find", "give"]

VENDOR: Final = "Intel"
_PCI_VENDOR: Final = "0x8086"
_DISPLAY: Final = "0x03"


def give(asked: Asked, config: Config) -> Contribution:
    """What a container gets of the node's Intel GPUs.

    Args:
        asked: what it asks for.
        config: where sysfs, procfs and the device nodes are.

    Returns:
        The plan and its bounds.

    Raises:
        NoVendorDriver: there is an Intel GPU, and no driver has made a node for it.
        RequestError, InventoryError: as :func:`hooks.vendors.gpus.granted`.
    """
    gpus = find(config)
    if not gpus:
        without = _without_driver(config)
        if without:
            raise NoVendorDriver(
                f"Intel GPUs ({asked.source})",
                found=f"no driver has made a render node for {', '.join(without)}",
                do="load the kernel module i915 or xe on the node",
            )
    majors = {name: major for name, major in read_majors(config).items() if name == DRM}
    return granted(asked, gpus, config, vendor=VENDOR, majors=majors)


def find(config: Config) -> tuple[VendorGpu, ...]:
    """The node's Intel GPUs, by index.

    Args:
        config: where sysfs is.
    """
    devices = [
        device
        for device in drm_devices(config)
        if device.vendor == _PCI_VENDOR
        and device.pci_class.startswith(_DISPLAY)
        and device.render_node is not None
    ]
    devices.sort(key=lambda device: bus_order(device.name))
    return tuple(
        VendorGpu(
            vendor=VENDOR,
            index=index,
            address=device.name,
            device=device,
            names=frozenset(
                {
                    *address_names(device.name, device.device_id),
                    *map(str.lower, device.minors),
                }
            ),
        )
        for index, device in enumerate(devices)
    )


def _without_driver(config: Config) -> list[str]:
    """The addresses of Intel's display devices."""
    directory = f"{config.sys}/bus/pci/devices"

    def says(address: str, attribute: str) -> str:
        return (read_text(f"{directory}/{address}/{attribute}") or "").strip()

    return [
        address
        for address in read_names(directory) or ()
        if says(address, "vendor") == _PCI_VENDOR and says(address, "class").startswith(_DISPLAY)
    ]
