"""Errors of checkpoint and restore: E152x of the tree in :mod:`shim.errors`."""

from __future__ import annotations

from api.errors import Status
from shim.errors import ShimError

# fmt: off
# E1308 is not reused: it refused restores before they were implemented.
CheckpointOptionsInvalid = ShimError.row(
    "NVSHIM-E1521 checkpoint-options-invalid", Status.INVALID_ARGUMENT,
    "The options of a Checkpoint cannot be understood.",
    remedy="use the options that containerd documents for a checkpoint")
CheckpointPathUnusable = ShimError.row(
    "NVSHIM-E1522 checkpoint-path-unusable", Status.FAILED_PRECONDITION,
    "The directory to write a checkpoint to cannot be used.")
CriuNotFound = ShimError.row("NVSHIM-E1523 criu-not-found", Status.FAILED_PRECONDITION,
    "CRIU is not installed, or not where CriuPath says.")
CriuTooOld = ShimError.row("NVSHIM-E1524 criu-too-old", Status.FAILED_PRECONDITION,
    "CRIU is older than the low-level runtime asks for.")
CriuUnsupportedByRuntime = ShimError.row(
    "NVSHIM-E1525 criu-unsupported-by-runtime", Status.UNIMPLEMENTED,
    "The low-level runtime was built without CRIU.")
CriuUnsupportedByKernel = ShimError.row(
    "NVSHIM-E1526 criu-unsupported-by-kernel", Status.FAILED_PRECONDITION,
    "CRIU does not understand this kernel, or the kernel lacks what it needs.")
CheckpointFailed = ShimError.row("NVSHIM-E1527 checkpoint-failed", Status.UNKNOWN,
    "CRIU could not save the container, which continues to run.",
    remedy="do what CRIU's log says")
CheckpointUnusable = ShimError.row("NVSHIM-E1528 checkpoint-unusable", Status.FAILED_PRECONDITION,
    "The directory to restore from is missing, incomplete or not a checkpoint.",
    remedy="make the checkpoint again")
RestoreFailed = ShimError.row("NVSHIM-E1529 restore-failed", Status.UNKNOWN,
    "CRIU could not restore the container.",
    remedy="do what CRIU's log says, or start the container without the checkpoint")
