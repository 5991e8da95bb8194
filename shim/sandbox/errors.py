"""Errors of the sandbox: E16xx of the tree in :mod:`shim.errors`."""

from __future__ import annotations

from api.errors import Status
from shim.errors import ShimError

# fmt: off
SandboxNotFound = ShimError.row("NVSHIM-E1601 sandbox-not-found", Status.NOT_FOUND,
    "No sandbox of that id in this shim.")
SandboxExists = ShimError.row("NVSHIM-E1602 sandbox-exists", Status.ALREADY_EXISTS,
    "This shim has a sandbox already.")
WrongSandboxState = ShimError.row("NVSHIM-E1603 wrong-sandbox-state", Status.FAILED_PRECONDITION,
    "What is asked cannot be done to a sandbox in its state.")
InvalidPodConfig = ShimError.row("NVSHIM-E1604 invalid-pod-config", Status.INVALID_ARGUMENT,
    "A pod's configuration cannot be parsed, or not be provided.",
    remedy="correct the pod's settings, and create it again")
SysctlRefused = ShimError.row("NVSHIM-E1605 sysctl-refused", Status.INVALID_ARGUMENT,
    "A sysctl that is not the pod's to set.")
NamespacesUnavailable = ShimError.row(
    "NVSHIM-E1606 namespaces-unavailable", Status.FAILED_PRECONDITION,
    "The namespaces of a pod could not be made or joined.")
SandboxRootfsUnsupported = ShimError.row(
    "NVSHIM-E1607 sandbox-rootfs-unsupported", Status.UNIMPLEMENTED,
    "A sandbox is to have a root file system, and nothing in it would see it.")
MachineUnsupported = ShimError.row("NVSHIM-E1608 machine-unsupported", Status.UNIMPLEMENTED,
    "There is no holder of namespaces for this architecture.")
PodFilesUnusable = ShimError.row("NVSHIM-E1609 pod-files-unusable", Status.FAILED_PRECONDITION,
    "The files that a pod's containers share could not be made.",
    remedy="see that containerd's state directory can be written, and has room")
