"""Errors of setting up a cluster's node: E266x to E268x."""

from __future__ import annotations

from api.errors import Status
from integration.errors import IntegrationError


class KubernetesError(IntegrationError):
    """Base of the errors of :mod:`integration.kubernetes`."""


class HostUnusable(KubernetesError, code="NVSHIM-E2662", status=Status.FAILED_PRECONDITION):
    """The node's root is not mounted where expected, or cannot be entered or written."""


# fmt: off
InstallerRunning = KubernetesError.row("NVSHIM-E2660 installer-running", Status.ALREADY_EXISTS,
    "Another installer, ours or NVIDIA's, holds the node's lock. Nothing was changed.")
VariableUnusable = KubernetesError.row("NVSHIM-E2661 variable-unusable", Status.INVALID_ARGUMENT,
    "A variable of the installer has a value that is invalid, or invalid on this node.")
ImageTreeMissing = KubernetesError.row(
    "NVSHIM-E2663 image-tree-missing", Status.FAILED_PRECONDITION,
    "The installer does not run from a tree that it could copy to the node.")
HostCommandFailed = KubernetesError.row("NVSHIM-E2664 host-command-failed", Status.ABORTED,
    "A command in the node's root failed; the message quotes it.",
    remedy="follow the command's message; the installer retries")
DriverNotReady = KubernetesError.row("NVSHIM-E2665 driver-not-ready", Status.DEADLINE_EXCEEDED,
    "The driver was not ready within the configured time.")
ValidationFileMalformed = KubernetesError.row(
    "NVSHIM-E2666 validation-file-malformed", Status.INVALID_ARGUMENT,
    "A file of the operator's validator has an unusable value.")
NodeWithoutGpu = KubernetesError.row("NVSHIM-E2667 node-without-gpu", Status.FAILED_PRECONDITION,
    "The node has no NVIDIA GPU, so the installer has installed nothing.",
    remedy="run it on a node with a GPU, or set NVSHIM_EVERY_NODE to set up every node")
InstallerUnwell = KubernetesError.row("NVSHIM-E2668 installer-unwell", Status.UNAVAILABLE,
    "A probe failed: the installer is not ready, or has not written its status for too long.",
    remedy="see the log of the installer's pod")
