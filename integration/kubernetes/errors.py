"""What can go wrong while a node of a cluster is set up: E266x to E268x."""

from __future__ import annotations

from api.errors import Status
from integration.errors import IntegrationError


class KubernetesError(IntegrationError):
    """Base of everything that :mod:`integration.kubernetes` raises on purpose."""


class InstallerRunning(KubernetesError, code="NVSHIM-E2660", status=Status.ALREADY_EXISTS):
    """Another installer, ours or NVIDIA's, holds the node's lock. Nothing was touched."""


class VariableUnusable(KubernetesError, code="NVSHIM-E2661", status=Status.INVALID_ARGUMENT):
    """A variable of the installer's environment has a value that means nothing, or not here."""


class HostUnusable(KubernetesError, code="NVSHIM-E2662", status=Status.FAILED_PRECONDITION):
    """The node's root is not mounted where it should be, or cannot be entered or written."""


class ImageTreeMissing(KubernetesError, code="NVSHIM-E2663", status=Status.FAILED_PRECONDITION):
    """The installer does not run from a tree that it could put on the node."""


class HostCommandFailed(KubernetesError, code="NVSHIM-E2664", status=Status.ABORTED):
    """A command that was run in the node's root failed; the message quotes it."""

    remedy = "do what the command's message says; the installer tries again"


class DriverNotReady(KubernetesError, code="NVSHIM-E2665", status=Status.DEADLINE_EXCEEDED):
    """The driver was to be awaited, and is not ready within the time that was given."""


class ValidationFileMalformed(KubernetesError, code="NVSHIM-E2666", status=Status.INVALID_ARGUMENT):
    """A file of the operator's validator says something that cannot be followed."""


class NodeWithoutGpu(KubernetesError, code="NVSHIM-E2667", status=Status.FAILED_PRECONDITION):
    """The node has no NVIDIA GPU, so the installer has put nothing on it."""

    remedy = "run it on a node with a GPU; NVSHIM_EVERY_NODE has the installer set up every node"


class InstallerUnwell(KubernetesError, code="NVSHIM-E2668", status=Status.UNAVAILABLE):
    """A probe: the installer is not ready, or has not been heard of for too long."""

    remedy = "see the log of the installer's pod"
