"""What can be wrong where NVIDIA's driver is not the usual one.

::

    InventoryError
    ├── CsvFilesMissing     E0660  no file lists what a Tegra machine has for containers
    ├── DriverStoreMissing  E0661  no driver of NVIDIA's in the driver store of Windows
    └── PlatformNodeMissing E0662  the platform's device node is not there or another device
    RequestError
    └── MigUnsupported      E0663  a MIG device is named where there can be none
"""

from __future__ import annotations

from hooks.errors import InventoryError, RequestError

__all__ = ["CsvFilesMissing", "DriverStoreMissing", "MigUnsupported", "PlatformNodeMissing"]


class CsvFilesMissing(InventoryError):
    """No file lists what a Tegra machine has. Raised by :func:`tegra.contribute`."""

    code = "NVSHIM-E0660"


class DriverStoreMissing(InventoryError):
    """Windows has no driver of NVIDIA's for WSL. Raised by :func:`wsl.contribute`."""

    code = "NVSHIM-E0661"


class PlatformNodeMissing(InventoryError):
    """/dev/dxg, or all nodes of a Tegra machine, are unusable. Raised by ``contribute``."""

    code = "NVSHIM-E0662"


class MigUnsupported(RequestError):
    """A MIG device is named where there can be none. Raised by :func:`names.refuse_mig`."""

    code = "NVSHIM-E0663"
