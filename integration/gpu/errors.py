"""What can go wrong with the bundle for machines with a GPU.

Leaves of the tree in :mod:`api.errors`, beside those in :mod:`integration.errors`::

    IntegrationError
    └── GpuBundleError             E246x  the bundle
        ├── BundleNotBuilt         E2461
        ├── BundleTooLarge         E2462
        ├── BundleDamaged          E2463
        ├── MachineUnfit           E2464
        ├── CheckFailed            E2470  what a report lists
        └── CheckNotPossible       E2471
"""

from __future__ import annotations

from api.errors import Status
from integration.errors import IntegrationError


class GpuBundleError(IntegrationError):
    """Base of what :mod:`integration.gpu` raises."""


class BundleNotBuilt(GpuBundleError):
    """Something that the bundle is made of is missing, or could not be adapted."""

    code = "NVSHIM-E2461"
    status = Status.FAILED_PRECONDITION


class BundleTooLarge(GpuBundleError):
    """The bundle is larger than what can be carried to a machine. Nothing of it is left."""

    code = "NVSHIM-E2462"
    status = Status.RESOURCE_EXHAUSTED


class BundleDamaged(GpuBundleError):
    """A bundle that is not whole: it was copied in part, or changed."""

    code = "NVSHIM-E2463"
    status = Status.DATA_LOSS


class MachineUnfit(GpuBundleError):
    """A machine on which nothing can be run: not root, no room, no mounts."""

    code = "NVSHIM-E2464"
    status = Status.FAILED_PRECONDITION


class CheckFailed(GpuBundleError):
    """Something is not as it has to be. The report lists it as failed."""

    code = "NVSHIM-E2470"
    status = Status.INTERNAL


class CheckNotPossible(GpuBundleError):
    """Something cannot be found out on this machine. The report says why."""

    code = "NVSHIM-E2471"
    status = Status.FAILED_PRECONDITION
