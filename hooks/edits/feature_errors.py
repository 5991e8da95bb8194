"""The leaves of :class:`hooks.errors.InventoryError` for what is asked beside GPUs.

::

    InventoryError
    ├── ImexChannelMissing    E0110  an IMEX channel is named that this node does not have
    └── MigCapabilityMissing  E0111  MIG is to be configured or monitored, and cannot be
"""

from __future__ import annotations

from hooks.errors import InventoryError

__all__ = ["ImexChannelMissing", "MigCapabilityMissing"]


class ImexChannelMissing(InventoryError):
    """An IMEX channel was named that has no usable node. Raised by :func:`features.contribute`."""

    code = "NVSHIM-E0110"


class MigCapabilityMissing(InventoryError):
    """The node by which MIG is configured or monitored is not there.

    Raised by :func:`features.contribute`.
    """

    code = "NVSHIM-E0111"
