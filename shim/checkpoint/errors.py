"""Errors of checkpoint and restore: E152x of the tree in :mod:`shim.errors`."""

from __future__ import annotations

from api.errors import Status
from shim.errors import ShimError

# E1308 is not used again: it refused every restore before restores were implemented.


class CheckpointOptionsInvalid(ShimError):
    """The options of a Checkpoint cannot be understood. Raised by :mod:`shim.checkpoint.criu`."""

    code = "NVSHIM-E1521"
    status = Status.INVALID_ARGUMENT
    remedy = "use the options that containerd documents for a checkpoint"


class CheckpointPathUnusable(ShimError):
    """There is no directory to write a checkpoint to."""

    code = "NVSHIM-E1522"
    status = Status.FAILED_PRECONDITION


class CriuNotFound(ShimError):
    """CRIU is not installed, or not where CriuPath says. Raised by :mod:`shim.checkpoint.criu`."""

    code = "NVSHIM-E1523"
    status = Status.FAILED_PRECONDITION


class CriuTooOld(ShimError):
    """CRIU is older than the low-level runtime asks for. Raised by :mod:`shim.checkpoint.criu`."""

    code = "NVSHIM-E1524"
    status = Status.FAILED_PRECONDITION


class CriuUnsupportedByRuntime(ShimError):
    """The low-level runtime was built without CRIU. Raised by :mod:`shim.checkpoint.criu`."""

    code = "NVSHIM-E1525"
    status = Status.UNIMPLEMENTED


class CriuUnsupportedByKernel(ShimError):
    """CRIU does not understand this kernel, or the kernel lacks what it needs.

    Raised by :mod:`shim.checkpoint.criu`.
    """

    code = "NVSHIM-E1526"
    status = Status.FAILED_PRECONDITION


class CheckpointFailed(ShimError):
    """CRIU could not save the container, which goes on. Raised by :mod:`shim.checkpoint.criu`."""

    code = "NVSHIM-E1527"
    remedy = "do what CRIU's log says"


class CheckpointUnusable(ShimError):
    """The directory to restore from is missing, incomplete or not a checkpoint.

    Raised by :mod:`shim.checkpoint.criu`.
    """

    code = "NVSHIM-E1528"
    status = Status.FAILED_PRECONDITION
    remedy = "make the checkpoint again"


class RestoreFailed(ShimError):
    """CRIU could not restore the container. Raised by :mod:`shim.checkpoint.criu`."""

    code = "NVSHIM-E1529"
    remedy = "do what CRIU's log says, or start the container without the checkpoint"
