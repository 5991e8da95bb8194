"""The files of a simulated node below ``proc``, in the formats of the real kernel module.

- ``driver/nvidia/version`` is where the driver's version is read; ``params`` is what
  nvidia-modprobe and NVIDIA's libraries read before they make device nodes.
- ``driver/nvidia/gpus/BDF/information`` tells a GPU's UUID and minor without NVML.
- ``driver/nvidia/capabilities`` and ``driver/nvidia-caps`` are MIG's.
- ``devices`` is the machine's own, with the driver's majors added.
- ``sys/kernel/random/boot_id`` is the machine's own.
"""

from __future__ import annotations

import os
import platform
from typing import TYPE_CHECKING, Final

from integration.simulated.capabilities import (
    CONFIG_MINOR,
    MONITOR_MINOR,
    access_minor,
    mig_minors,
)
from integration.simulated.devices import DRM_MAJOR, NVIDIA_MAJOR
from integration.simulated.tree import write_tree

if TYPE_CHECKING:
    from integration.simulated.devices import Majors
    from integration.simulated.scenario import Gpu, Scenario

BOOT_ID: Final = "sys/kernel/random/boot_id"

# Up to this branch the module called its major nvidia-frontend.
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


def make_proc(proc: str, scenario: Scenario, *, driver: str, majors: Majors, host: str) -> None:
    """Make the tree of a scenario.

    Args:
        proc: an empty directory.
        scenario: what the node has.
        driver: the driver's full version.
        majors: the dynamic ones.
        host: the machine's own proc.
    """
    with open(os.path.join(host, "devices"), encoding="ascii") as file:
        own_devices = file.read()
    with open(os.path.join(host, BOOT_ID), encoding="ascii") as file:
        boot_id = file.read()
    files = {
        "devices": proc_devices(own_devices, scenario, driver=driver, majors=majors),
        BOOT_ID: boot_id,
        "driver/nvidia/version": _version(driver),
        "driver/nvidia/params": "".join(f"{name}: {value}\n" for name, value in _PARAMETERS),
        "driver/nvidia/registry": 'Binary: ""\n',
    }
    for gpu in scenario.gpus:
        below = f"driver/nvidia/gpus/{gpu.pci}"
        files[f"{below}/information"] = information(gpu, driver)
        files[f"{below}/registry"] = 'Binary: ""\n'
    if any(gpu.model.profiles for gpu in scenario.gpus):
        files |= _capabilities(scenario)
    write_tree(proc, files)


def make_bare_proc(proc: str, *, host: str) -> None:
    """Make the tree of a node without NVIDIA's driver.

    Args:
        proc: an empty directory.
        host: the machine's own proc.
    """
    files = {}
    for name in ("devices", BOOT_ID):
        with open(os.path.join(host, name), encoding="ascii") as file:
            files[name] = file.read()
    write_tree(proc, files)


def proc_devices(own: str, scenario: Scenario, *, driver: str, majors: Majors) -> str:
    """The machine's list of majors with those of the driver in it.

    Args:
        own: the machine's own /proc/devices.
        scenario: what the node has.
        driver: the driver's full version.
        majors: the dynamic ones.

    Returns:
        The list; its character devices stay in order.
    """
    old = int(driver.split(".", maxsplit=1)[0]) <= _LAST_FRONTEND
    ours = [(NVIDIA_MAJOR, "nvidia-frontend" if old else "nvidia")]
    ours += [] if old else [(NVIDIA_MAJOR, "nvidiactl"), (NVIDIA_MAJOR, "nvidia-modeset")]
    ours += [(majors.caps, "nvidia-caps"), (majors.uvm, "nvidia-uvm")]
    ours += [(majors.imex, "nvidia-caps-imex-channels")] if scenario.imex_channels else []
    ours += [(DRM_MAJOR, "drm")] if scenario.drm else []
    character, _, block = own.partition("\n\n")
    title, *lines = character.splitlines()
    present = {line.strip() for line in lines}
    lines += [f"{major:3} {name}" for major, name in ours if f"{major} {name}" not in present]
    lines.sort(key=lambda line: int(line.split()[0]))
    return "\n".join([title, *lines]) + "\n\n" + block


def information(gpu: Gpu, driver: str) -> str:
    """The file ``gpus/BDF/information`` of a GPU.

    Args:
        gpu: which.
        driver: the driver's full version; the firmware's is the same.

    Returns:
        Its text, with the module's own mixture of blanks and tabs.
    """
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


def _version(driver: str) -> str:
    return (
        f"NVRM version: NVIDIA UNIX {platform.machine()} Kernel Module  {driver}"
        "  Thu Jan  1 00:00:00 UTC 2026\n"
        "GCC version:  gcc version 12.2.0 (Debian 12.2.0-14+deb12u1) \n"
    )


def _capabilities(scenario: Scenario) -> dict[str, str]:
    """MIG's part: a file for each capability that exists, and the list of all minors."""
    files = {
        "driver/nvidia-caps/mig-minors": mig_minors(),
        "driver/nvidia/capabilities/mig/config": _capability(CONFIG_MINOR, 0o400),
        "driver/nvidia/capabilities/mig/monitor": _capability(MONITOR_MINOR, 0o400),
    }
    for gpu in scenario.gpus:
        for instance in gpu.mig or ():
            below = f"driver/nvidia/capabilities/gpu{gpu.minor}/mig/gi{instance.id}"
            minor = access_minor(gpu.minor, instance.id)
            files[f"{below}/access"] = _capability(minor, 0o444)
            for compute in instance.compute:
                minor = access_minor(gpu.minor, instance.id, compute.id)
                files[f"{below}/ci{compute.id}/access"] = _capability(minor, 0o444)
    return files


def _capability(minor: int, mode: int) -> str:
    return f"DeviceFileMinor: {minor}\nDeviceFileMode: {mode}\nDeviceFileModify: 1\n"
