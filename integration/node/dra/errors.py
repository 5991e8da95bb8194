"""What can go wrong with what claims ask of devices.

Leaves of :class:`~integration.node.errors.DraError`::

    DraError
    ├── …                    E2772 to E2779  see integration.node.errors
    ├── TimeSliceFailed      E2788
    ├── SharingConflict      E2789
    └── ExtendedResourceClash  E2796
"""

from __future__ import annotations

from api.errors import Status
from integration.node.errors import DraError


class TimeSliceFailed(DraError):
    """nvidia-smi did not set the time slice that a claim asks for on its GPU."""

    code = "NVSHIM-E2788"
    status = Status.FAILED_PRECONDITION
    remedy = "ask for no time slice; some GPUs have none that can be set"


class SharingConflict(DraError):
    """A claim asks for a GPU to be shared in another way than claims that share it already."""

    code = "NVSHIM-E2789"
    status = Status.FAILED_PRECONDITION
    remedy = "give both claims the same configuration, or wait for the end of the other"


class ExtendedResourceClash(DraError, code="NVSHIM-E2796", status=Status.FAILED_PRECONDITION):
    """A pod asked for a resource that the scheduler makes claims for and a device plugin serves.

    A node can have it in one of the two ways only: the scheduler and the kubelet count it apart.
    """

    remedy = "run the agent with --device-plugin no on nodes with that DeviceClass"
