"""Kernel modules that a container needs and that are not loaded: how to load them.

After a boot nothing may have used the GPUs yet; then neither the module for unified memory nor,
perhaps, the driver's own is loaded, and a container would find no GPU although the node has
some. NVIDIA's tools load them on demand (``load-kmods``, on by default), and so does this,
unless ``load-kernel-modules`` says no.

Rules
- Only what the container needs: ``nvidia``, for CUDA ``nvidia-uvm``, for graphics and display
  ``nvidia-modeset``. What sysfs shows is loaded is not loaded again.
- Only on a machine with a GPU of NVIDIA's on its PCI bus: elsewhere modprobe could only fail.
- The operator's modprobe.d holds: a module that is blacklisted by ``install … /bin/false``, as on
  a node whose GPUs are for virtual machines, is not loaded.
- A driver root other than "/" is where its modules are looked for, too.
- That a module could not be loaded is no error here: whatever needs it says what is missing.

The engine runs nothing. The caller runs each command to its end, one after the other, and has
each end within :data:`TIMEOUT`. After one that does not, and without ``nvidia``, it tries no more.

Source: nvidia-modprobe, modprobe-utils/nvidia-modprobe-utils.c; libnvidia-container,
src/nvc.c; modprobe(8); Documentation/ABI/testing/sysfs-bus-pci of the kernel.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from hooks.edits.capabilities import MODESET, UVM, nodes_of
from hooks.node.witness import read_names, read_text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hooks.config import Config

__all__ = ["DRIVER", "TIMEOUT", "load_commands"]

TIMEOUT: Final = 60.0
"""Seconds that a command may take: a module wakes every GPU of the node."""

_VENDOR: Final = "0x10de"
_DISPLAY: Final = "0x03"
DRIVER: Final = "nvidia"
"""The module that all others need."""


def load_commands(config: Config, capabilities: Iterable[str]) -> tuple[tuple[str, ...], ...]:
    """The commands that load what is needed and not loaded.

    Args:
        config: where sysfs and the driver are.
        capabilities: that the container has asked for.

    Returns:
        Argument lists, in order; none if all is loaded, or if nothing is to be.
    """
    if not config.load_modules:
        return ()
    missing = [name for name in _needed(capabilities) if not is_loaded(config, name)]
    if not missing or not _has_gpu(config):
        return ()
    root = config.driver_root or "/"
    where = () if root == "/" else ("-d", root)
    return tuple(("modprobe", *where, "--", name) for name in missing)


def is_loaded(config: Config, module: str) -> bool:
    """Whether a module is loaded or built in.

    Args:
        config: where sysfs is.
        module: its name.
    """
    return os.path.isdir(f"{config.sys}/module/{module.replace('-', '_')}")


def _needed(capabilities: Iterable[str]) -> list[str]:
    nodes = nodes_of(capabilities)
    needed = [DRIVER]
    if UVM in nodes:
        needed.append("nvidia-uvm")
    if MODESET in nodes:
        needed.append("nvidia-modeset")
    return needed


def _has_gpu(config: Config) -> bool:
    bus = f"{config.sys}/bus/pci/devices"
    for name in read_names(bus) or ():
        if (read_text(f"{bus}/{name}/vendor") or "").strip() == _VENDOR and (
            read_text(f"{bus}/{name}/class") or ""
        ).startswith(_DISPLAY):
            return True
    return False
