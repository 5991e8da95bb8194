"""Errors of the sandbox: E16xx of the tree in :mod:`shim.errors`."""

from __future__ import annotations

from api.errors import Status
from shim.errors import ShimError


class SandboxNotFound(ShimError):
    """No sandbox of that id in this shim. Raised by :mod:`shim.pod.sandbox_service`."""

    code = "NVSHIM-E1601"
    status = Status.NOT_FOUND


class SandboxExists(ShimError):
    """This shim has a sandbox already. Raised by :mod:`shim.pod.sandbox_service`."""

    code = "NVSHIM-E1602"
    status = Status.ALREADY_EXISTS


class WrongSandboxState(ShimError):
    """What is asked cannot be done to a sandbox in its state."""

    code = "NVSHIM-E1603"
    status = Status.FAILED_PRECONDITION


class InvalidPodConfig(ShimError):
    """A pod's configuration cannot be parsed, or not be provided."""

    code = "NVSHIM-E1604"
    status = Status.INVALID_ARGUMENT
    remedy = "correct the pod's settings, and create it again"


class SysctlRefused(ShimError):
    """A sysctl that is not the pod's to set. Raised by :mod:`shim.sandbox.pod`."""

    code = "NVSHIM-E1605"
    status = Status.INVALID_ARGUMENT


class NamespacesUnavailable(ShimError):
    """The namespaces of a pod could not be made or joined."""

    code = "NVSHIM-E1606"
    status = Status.FAILED_PRECONDITION


class SandboxRootfsUnsupported(ShimError):
    """A sandbox is to have a root file system, and nothing in it would see it.

    Raised by :mod:`shim.pod.sandbox_service`.
    """

    code = "NVSHIM-E1607"
    status = Status.UNIMPLEMENTED


class MachineUnsupported(ShimError):
    """There is no holder of namespaces for this architecture."""

    code = "NVSHIM-E1608"
    status = Status.UNIMPLEMENTED


class PodFilesUnusable(ShimError):
    """The files that a pod's containers share could not be made."""

    code = "NVSHIM-E1609"
    status = Status.FAILED_PRECONDITION
    remedy = "see that containerd's state directory can be written, and has room"
