"""The files of a simulated node below ``sys``: its GPUs on the PCI bus, its DRM devices, modules.

As in the kernel's own, the directories of devices lie below ``devices`` and everything else is
relative links into it: ``bus/pci/devices``, ``bus/pci/drivers/nvidia``, ``class/drm`` and
``dev/char``.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from integration.simulated.devices import DRM_MAJOR
from integration.simulated.tree import write_links, write_tree

if TYPE_CHECKING:
    from integration.simulated.scenario import Gpu, Scenario

_VENDOR: Final = 0x10DE
_MODULES: Final = ("nvidia", "nvidia_modeset", "nvidia_uvm")


def make_sys(sys: str, scenario: Scenario, *, driver: str, host: str) -> None:
    """Make the tree of a scenario.

    Args:
        sys: an empty directory.
        scenario: what the node has.
        driver: the driver's full version.
        host: the machine's own sys, for its list of CPUs.
    """
    with open(os.path.join(host, "devices/system/cpu/online"), encoding="ascii") as file:
        cpus = file.read()
    files: dict[str, str] = {}
    links: dict[str, str] = {}
    for module in (*_MODULES, *(("nvidia_drm",) if scenario.drm else ())):
        files[f"module/{module}/version"] = f"{driver}\n"
        files[f"module/{module}/initstate"] = "live\n"
    os.makedirs(os.path.join(sys, "bus/pci/devices"))
    os.makedirs(os.path.join(sys, "bus/pci/drivers/nvidia"))
    for gpu in scenario.gpus:
        device = f"devices/pci{gpu.pci[:7]}/{gpu.pci}"
        files |= {f"{device}/{name}": text for name, text in _attributes(gpu, cpus).items()}
        links[f"{device}/driver"] = "bus/pci/drivers/nvidia"
        links[f"bus/pci/devices/{gpu.pci}"] = device
        links[f"bus/pci/drivers/nvidia/{gpu.pci}"] = device
        if scenario.drm:
            for name, minor in (
                (f"card{gpu.index}", gpu.index),
                (f"renderD{128 + gpu.index}", 128 + gpu.index),
            ):
                node = f"{device}/drm/{name}"
                files[f"{node}/dev"] = f"{DRM_MAJOR}:{minor}\n"
                files[f"{node}/uevent"] = (
                    f"MAJOR={DRM_MAJOR}\nMINOR={minor}\nDEVNAME=dri/{name}\nDEVTYPE=drm_minor\n"
                )
                links[f"{node}/device"] = device
                links[f"class/drm/{name}"] = node
                links[f"dev/char/{DRM_MAJOR}:{minor}"] = node
    write_tree(sys, files)
    write_links(sys, links)


def _attributes(gpu: Gpu, cpus: str) -> dict[str, str]:
    model = gpu.model
    return {
        "vendor": f"0x{_VENDOR:04x}\n",
        "device": f"0x{model.device:04x}\n",
        "subsystem_vendor": f"0x{_VENDOR:04x}\n",
        "subsystem_device": f"0x{model.subsystem:04x}\n",
        "class": f"0x{model.pci_class:06x}\n",
        "revision": "0xa1\n",
        "irq": f"{32 + gpu.index}\n",
        "enable": "1\n",
        "numa_node": f"{gpu.numa_node}\n",
        "local_cpulist": cpus,
        "max_link_width": f"{model.pcie[1]}\n",
        "current_link_width": f"{model.pcie[1]}\n",
        "uevent": (
            "DRIVER=nvidia\n"
            f"PCI_CLASS={model.pci_class:X}\n"
            f"PCI_ID={_VENDOR:04X}:{model.device:04X}\n"
            f"PCI_SUBSYS_ID={_VENDOR:04X}:{model.subsystem:04X}\n"
            f"PCI_SLOT_NAME={gpu.pci}\n"
        ),
    }
