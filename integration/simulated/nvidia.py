"""Add what NVIDIA's kernel modules create on a node, in the real formats.

- Device nodes: 195:N for GPU N, 195:255 and 195:254 for control and modeset; dynamic majors for
  unified memory, capabilities and IMEX channels.
- ``proc/driver/nvidia/version`` contains the driver's version; ``params`` is what nvidia-modprobe
  and NVIDIA's libraries read before they create device nodes.
- ``proc/driver/nvidia/gpus/BDF/information`` has a GPU's UUID and minor, without NVML.
- ``proc/driver/nvidia/capabilities`` and ``proc/driver/nvidia-caps`` are MIG's.
- ``sys/module`` has the modules; the PCI bus and DRM have each GPU.
"""

from __future__ import annotations

import platform
from typing import Final

from integration.simulated.capabilities import (
    CONFIG_MINOR,
    MONITOR_MINOR,
    access_minor,
    mig_minors,
)
from integration.simulated.scenario import Gpu, Scenario
from integration.simulated.tree import DRM_MAJOR, Device, NodeTree, PciDevice, video_group

VENDOR: Final = 0x10DE

_MAJOR: Final = 195
_CONTROL_MINOR: Final = 255
_MODESET_MINOR: Final = 254
_MODULES: Final = ("nvidia", "nvidia_modeset", "nvidia_uvm")

# Up to this branch the module named its major nvidia-frontend.
_LAST_FRONTEND: Final = 535

# Parameters of the module of branch 535, with their defaults. 4294967295 is "not set".
_PARAMETERS: Final = (
    ("ResmanDebugLevel", 4294967295), ("RmLogonRC", 1), ("ModifyDeviceFiles", 1),
    ("DeviceFileUID", 0), ("DeviceFileGID", 0), ("DeviceFileMode", 438),
    ("InitializeSystemMemoryAllocations", 1), ("UsePageAttributeTable", 4294967295),
    ("EnableMSI", 1), ("EnablePCIeGen3", 0), ("MemoryPoolSize", 0), ("KMallocHeapMaxSize", 0),
    ("VMallocHeapMaxSize", 0), ("IgnoreMMIOCheck", 0), ("TCEBypassMode", 0),
    ("EnableStreamMemOPs", 0), ("EnableUserNUMAManagement", 1), ("NvLinkDisable", 0),
    ("RmProfilingAdminOnly", 1), ("PreserveVideoMemoryAllocations", 0),
    ("EnableS0ixPowerManagement", 0), ("S0ixPowerManagementVideoMemoryThreshold", 256),
    ("DynamicPowerManagement", 3), ("DynamicPowerManagementVideoMemoryThreshold", 200),
    ("RegisterPCIDriver", 1), ("EnablePCIERelaxedOrderingMode", 0), ("EnableResizableBar", 0),
    ("EnableGpuFirmware", 18), ("EnableGpuFirmwareLogs", 2), ("EnableDbgBreakpoint", 0),
    ("OpenRmEnableUnsupportedGpus", 0), ("DmaRemapPeerMmio", 1),
    ("RegistryDwords", '""'), ("RegistryDwordsPerDevice", '""'), ("RmMsg", '""'),
    ("GpuBlacklist", '""'), ("TemporaryFilePath", '""'), ("ExcludedGpus", '""'),
)  # fmt: skip


def add_nvidia(tree: NodeTree, scenario: Scenario, *, driver: str, cpus: str) -> None:
    """Add the driver's devices and files to a node.

    Args:
        cpus: the processors near each GPU, as sysfs lists them.
    """
    caps = _add_majors(tree, scenario, driver)
    _add_modules(tree, scenario, driver)
    video = video_group()
    for gpu in scenario.gpus:
        tree.devices.append(Device(f"nvidia{gpu.minor}", _MAJOR, gpu.minor))
        below = f"proc/driver/nvidia/gpus/{gpu.pci}"
        tree.files[f"{below}/information"] = _information(gpu, driver)
        tree.files[f"{below}/registry"] = 'Binary: ""\n'
        device = _pci(gpu, cpus)
        tree.add_pci(device)
        if scenario.drm:
            tree.add_drm(device.directory, gpu.index, (video, video), gpu.pci)
    if any(gpu.model.profiles for gpu in scenario.gpus):
        _add_capabilities(tree, scenario, caps)


def _add_majors(tree: NodeTree, scenario: Scenario, driver: str) -> int:
    """Add the device nodes that do not depend on the GPUs; return the major of capabilities."""
    if int(driver.split(".", maxsplit=1)[0]) <= _LAST_FRONTEND:
        tree.add_major("nvidia-frontend", _MAJOR)
    else:
        for name in ("nvidia", "nvidiactl", "nvidia-modeset"):
            tree.add_major(name, _MAJOR)
    caps = tree.add_major("nvidia-caps")
    imex = tree.free_major()
    uvm = tree.add_major("nvidia-uvm")
    if scenario.imex_channels:
        tree.add_major("nvidia-caps-imex-channels", imex)
    if scenario.drm:
        tree.add_major("drm", DRM_MAJOR)
    tree.devices += [
        Device("nvidiactl", _MAJOR, _CONTROL_MINOR),
        Device("nvidia-modeset", _MAJOR, _MODESET_MINOR),
        Device("nvidia-uvm", uvm, 0),
        Device("nvidia-uvm-tools", uvm, 1),
    ]
    tree.devices += [
        Device(f"nvidia-caps-imex-channels/channel{channel}", imex, channel)
        for channel in scenario.imex_channels
    ]
    return caps


def _add_modules(tree: NodeTree, scenario: Scenario, driver: str) -> None:
    for module in (*_MODULES, *(("nvidia_drm",) if scenario.drm else ())):
        tree.files[f"sys/module/{module}/version"] = f"{driver}\n"
        tree.files[f"sys/module/{module}/initstate"] = "live\n"
    tree.directories |= {"sys/bus/pci/devices", "sys/bus/pci/drivers/nvidia"}
    tree.files |= {
        "proc/driver/nvidia/version": (
            f"NVRM version: NVIDIA UNIX {platform.machine()} Kernel Module  {driver}"
            "  Thu Jan  1 00:00:00 UTC 2026\n"
            "GCC version:  gcc version 12.2.0 (Debian 12.2.0-14+deb12u1) \n"
        ),
        "proc/driver/nvidia/params": "".join(f"{key}: {value}\n" for key, value in _PARAMETERS),
        "proc/driver/nvidia/registry": 'Binary: ""\n',
    }


def _add_capabilities(tree: NodeTree, scenario: Scenario, caps: int) -> None:
    """Add MIG's part: a node and a file for each existing capability, and the list of minors.

    Only root may configure; any user with an instance's node may use the instance.
    """
    found = {"mig/config": (CONFIG_MINOR, 0o400), "mig/monitor": (MONITOR_MINOR, 0o400)}
    for gpu in scenario.gpus:
        for instance in gpu.mig or ():
            below = f"gpu{gpu.minor}/mig/gi{instance.id}"
            found[f"{below}/access"] = access_minor(gpu.minor, instance.id), 0o444
            for compute in instance.compute:
                minor = access_minor(gpu.minor, instance.id, compute.id)
                found[f"{below}/ci{compute.id}/access"] = minor, 0o444
    tree.files["proc/driver/nvidia-caps/mig-minors"] = mig_minors()
    for path, (minor, mode) in found.items():
        tree.devices.append(Device(f"nvidia-caps/nvidia-cap{minor}", caps, minor, mode))
        tree.files[f"proc/driver/nvidia/capabilities/{path}"] = (
            f"DeviceFileMinor: {minor}\nDeviceFileMode: {mode}\nDeviceFileModify: 1\n"
        )


def _information(gpu: Gpu, driver: str) -> str:
    """Return the file ``gpus/BDF/information``, with the module's own mix of blanks and tabs."""
    return (
        f"Model: \t\t {gpu.model.name}\n"
        f"IRQ:   \t\t {32 + gpu.index}\n"
        f"GPU UUID: \t {gpu.uuid}\n"
        f"Video BIOS: \t {gpu.vbios.lower()}\n"
        "Bus Type: \t PCIe\n"
        "DMA Size: \t 47 bits\n"
        "DMA Mask: \t 0x7fffffffffff\n"
        f"Bus Location: \t {gpu.pci}\n"
        f"Device Minor: \t {gpu.minor}\n"
        f"GPU Firmware: \t {driver}\n"
        "GPU Excluded:\t No\n"
    )


def _pci(gpu: Gpu, cpus: str) -> PciDevice:
    model = gpu.model
    return PciDevice(
        gpu.pci, "nvidia", VENDOR, model.device, model.pci_class, model.subsystem,
        {
            "revision": "0xa1",
            "irq": f"{32 + gpu.index}",
            "enable": "1",
            "numa_node": f"{gpu.numa_node}",
            "local_cpulist": cpus,
            "max_link_width": f"{model.pcie[1]}",
            "current_link_width": f"{model.pcie[1]}",
        },
    )  # fmt: skip
