"""The ready files with which the components of NVIDIA's GPU operator wait for each other.

The operator's validator writes ``driver-ready`` when the driver is usable. Other components source
it in a shell; this module parses it as names and values and executes nothing. The operator's device
plugin and others wait for ``toolkit-ready``.

Source: gpu-operator cmd/nvidia-validator (driver.go, createStatusFile), assets/state-device-plugin.
"""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from typing import Final

from integration.kubernetes.errors import ValidationFileMalformed

DRIVER_READY: Final = "driver-ready"
TOOLKIT_READY: Final = "toolkit-ready"

_ROOT: Final = "NVIDIA_DRIVER_ROOT"


@dataclass(frozen=True, slots=True)
class DriverReady:
    """The validator's findings."""

    # the driver root; empty if the file has none
    driver_root: str = ""
    is_host_driver: bool = False  # installed on the node, not in a driver container


def read_driver_ready(content: bytes, path: str) -> DriverReady:
    """Parse ``driver-ready``.

    Args:
        content: the file's content. Older validators write an empty file.
        path: the file's path, for messages.

    Raises:
        ValidationFileMalformed: the driver root is not an absolute path.
    """
    values = {}
    for line in content.decode(errors="replace").splitlines():
        name, _, value = line.strip().removeprefix("export ").partition("=")
        try:
            words = shlex.split(value)
        except ValueError:
            words = [value]
        values[name.strip()] = words[0] if words else ""
    root = values.get(_ROOT, "")
    if root and not os.path.isabs(root):
        raise ValidationFileMalformed(
            f"to read the driver root from {path}",
            found=f"{_ROOT}={root} is not an absolute path",
            do="correct the validator's setting, or set NVIDIA_DRIVER_ROOT for the installer",
        )
    host = values.get("IS_HOST_DRIVER", "").lower() == "true"
    return DriverReady(os.path.normpath(root) if root else "", host)
