"""Intel's GPUs: PCI devices of a display class with a render node.

Rules
- Integrated and discrete GPUs, and virtual functions, all count: everything with a render node of
  i915 or xe. Indices follow the PCI address.
- A display device without a render node (without a driver, or only for display) is not a GPU.
- There is no common node: a process opens only render nodes.

Source: Intel's device plugin for Kubernetes, cmd/gpu_plugin; Documentation/gpu/i915.rst.
"""

from __future__ import annotations

from typing import Final

from hooks.config import Config
from hooks.errors import NoVendorDriver
from hooks.node.device_nodes import read_majors
from hooks.node.fingerprint import read_line, read_names
from hooks.node.gpus import bus_order
from hooks.plan import Contribution
from hooks.vendors.gpus import DRM, VendorGpu, drm_devices, granted
from hooks.vendors.names import VendorRequest, address_names

VENDOR: Final = "Intel"
_PCI_VENDOR: Final = "0x8086"
_DISPLAY: Final = "0x03"


def give(wanted: VendorRequest, config: Config) -> Contribution:
    """Return the edits for the node's Intel GPUs.

    Raises:
        NoVendorDriver: there is an Intel GPU, but no driver has created a node for it.
        RequestError, InventoryError: as for :func:`hooks.vendors.gpus.granted`.
    """
    gpus = find(config)
    if not gpus:
        without = _without_driver(config)
        if without:
            raise NoVendorDriver(
                f"Intel GPUs ({wanted.source})",
                found=f"no driver has made a render node for {', '.join(without)}",
                do="load the kernel module i915 or xe on the node",
            )
    majors = {name: major for name, major in read_majors(config).items() if name == DRM}
    return granted(wanted, gpus, config, vendor=VENDOR, majors=majors)


def find(config: Config) -> tuple[VendorGpu, ...]:
    """Return the node's Intel GPUs, by index."""
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
    """Return the addresses of Intel's display devices."""
    directory = f"{config.sys}/bus/pci/devices"

    return [
        address
        for address in read_names(directory) or ()
        if read_line(f"{directory}/{address}/vendor") == _PCI_VENDOR
        and read_line(f"{directory}/{address}/class").startswith(_DISPLAY)
    ]
