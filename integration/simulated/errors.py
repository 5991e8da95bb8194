"""Errors of simulated nodes, and of running containers on them: E20xx to E23xx."""

from __future__ import annotations

from api.errors import Status
from integration.errors import IntegrationError


class PackagesError(IntegrationError):
    """Base of the errors of fetching and unpacking packages."""


class ArchiveNotFound(PackagesError, code="NVSHIM-E2001", status=Status.FAILED_PRECONDITION):
    """The machine's apt configuration names no package archive."""


class ArchiveUnreachable(PackagesError, code="NVSHIM-E2002", status=Status.UNAVAILABLE):
    """The archive's lists cannot be read: no network, or the archive is not signed."""


class PackageNotFound(PackagesError, code="NVSHIM-E2003", status=Status.NOT_FOUND):
    """The archive has no package of that name."""


class DownloadFailed(PackagesError, code="NVSHIM-E2004", status=Status.UNAVAILABLE):
    """A package was not downloaded completely. It is not kept."""


class UnpackFailed(PackagesError, code="NVSHIM-E2005", status=Status.DATA_LOSS):
    """A package could not be unpacked. Its files are not kept."""


class SimulatedError(IntegrationError):
    """Base of the errors of creating, reading or removing a simulated node."""


class ScenarioInvalid(SimulatedError, code="NVSHIM-E2101", status=Status.INVALID_ARGUMENT):
    """The scenario is not valid."""


class NodeExists(SimulatedError, code="NVSHIM-E2102", status=Status.ALREADY_EXISTS):
    """The directory for the node is not empty."""


class NodeNotFound(SimulatedError, code="NVSHIM-E2103", status=Status.NOT_FOUND):
    """The directory does not contain a simulated node."""


class DriverIncomplete(SimulatedError, code="NVSHIM-E2104", status=Status.FAILED_PRECONDITION):
    """The unpacked packages do not contain a driver, or not the requested one."""


class LibraryNotBuilt(SimulatedError, code="NVSHIM-E2105", status=Status.FAILED_PRECONDITION):
    """There is no C compiler, or it failed on our source."""


class DevicesForbidden(SimulatedError, code="NVSHIM-E2106", status=Status.PERMISSION_DENIED):
    """Device nodes cannot be created or opened here: not root, or ``nodev``."""


class ShimNotFound(SimulatedError, code="NVSHIM-E2107", status=Status.FAILED_PRECONDITION):
    """There is no shim to run a container on a simulated node with."""


class ContainerdError(IntegrationError):
    """Base of the errors of a private containerd."""


class ContainerdNotInstalled(
    ContainerdError, code="NVSHIM-E2201", status=Status.FAILED_PRECONDITION
):
    """A program that a private containerd needs is not on the path."""

    remedy = "install containerd, or name it"


class ContainerdExited(ContainerdError, code="NVSHIM-E2202", status=Status.UNAVAILABLE):
    """containerd exited unexpectedly, most often at its start."""

    remedy = "fix what its last log line reports"


class ContainerdNotReady(ContainerdError, code="NVSHIM-E2203", status=Status.DEADLINE_EXCEEDED):
    """containerd runs but did not answer in time."""

    remedy = "see containerd's log, and try again"


class CtrFailed(ContainerdError, code="NVSHIM-E2204", status=Status.UNKNOWN):
    """``ctr`` failed. The message quotes its output."""

    remedy = "fix what its message reports"


class CtrTimeout(ContainerdError, code="NVSHIM-E2205", status=Status.DEADLINE_EXCEEDED):
    """``ctr`` did not exit in time, and was killed."""


class CleanupIncomplete(ContainerdError, code="NVSHIM-E2206", status=Status.INTERNAL):
    """Parts of a private containerd could not be removed; the message lists them."""

    remedy = "stop the processes that use them, and remove them by hand"


class ImagesError(IntegrationError):
    """Base of the errors of building an image."""


class SourceNotInstalled(ImagesError, code="NVSHIM-E2301", status=Status.FAILED_PRECONDITION):
    """A program or library for an image is not on this machine."""

    remedy = "install the package that contains it"


class ImageBuildFailed(ImagesError, code="NVSHIM-E2302", status=Status.INTERNAL):
    """The compiler or ldconfig failed on an image."""

    remedy = "fix what the program's message reports"


def invalid(asked: str, found: str, do: str) -> ScenarioInvalid:
    """Return the error for a scenario with an invalid setting."""
    return ScenarioInvalid(f"a simulated node with {asked}", found=found, do=do)
