"""What can be wrong with a request for GPUs that are not NVIDIA's, or with the node.

::

    InventoryError
    ├── NoVendorDriver        E0650  the vendor's kernel driver is not loaded
    ├── NoVendorGpus          E0651  the driver is there, and no GPU that could be given
    └── VendorNodeMissing     E0652  a GPU that is named has no usable node
    RequestError
    ├── UnknownVendorGpu      E0653  a GPU is named that this node does not have
    └── MalformedVendorRange  E0654  a range of indices that is none
"""

from __future__ import annotations

from hooks.errors import InventoryError, RequestError

__all__ = [
    "MalformedVendorRange",
    "NoVendorDriver",
    "NoVendorGpus",
    "UnknownVendorGpu",
    "VendorNodeMissing",
]


class NoVendorDriver(InventoryError):
    """The vendor's kernel driver is not loaded. Raised by ``give`` of the vendor."""

    code = "NVSHIM-E0650"


class NoVendorGpus(InventoryError):
    """All GPUs of a vendor are asked for, and none could be given. Raised by ``gpus.granted``."""

    code = "NVSHIM-E0651"


class VendorNodeMissing(InventoryError):
    """A GPU that is named has no usable render node. Raised by :func:`gpus.granted`."""

    code = "NVSHIM-E0652"


class UnknownVendorGpu(RequestError):
    """No GPU of this node has the name. Raised by :func:`gpus.granted`."""

    code = "NVSHIM-E0653"


class MalformedVendorRange(RequestError):
    """A range of indices that ends before it begins. Raised by :func:`names.parse`."""

    code = "NVSHIM-E0654"
