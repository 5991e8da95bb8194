"""The files by which the parts of NVIDIA's GPU operator wait for each other.

``driver-ready`` is written by the operator's validator when the driver can be used. Others source
it as a shell would; here it is read as what it is, a list of names and values, and nothing of it is
executed. ``toolkit-ready`` is awaited by the operator's device plugin and others.

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
    """What the validator found."""

    # the directory that is "/" for the driver's files; empty if it is not said
    driver_root: str = ""
    is_host_driver: bool = False  # whether the driver is the node's own, and not a container's


def read_driver_ready(content: bytes, path: str) -> DriverReady:
    """What the file says.

    Args:
        content: the file's. Older validators write an empty one.
        path: its name, for messages.

    Raises:
        ValidationFileMalformed: the root that it names is none.
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
            f"the driver's root from {path}",
            found=f"{_ROOT}={root}",
            do="it has to be an absolute path; or set NVIDIA_DRIVER_ROOT for the installer",
        )
    host = values.get("IS_HOST_DRIVER", "").lower() == "true"
    return DriverReady(os.path.normpath(root) if root else "", host)
