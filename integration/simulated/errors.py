"""What can go wrong with simulated nodes, and with what runs containers on them: E20xx to E23xx."""

from __future__ import annotations

from api.errors import Status
from integration.errors import IntegrationError


class PackagesError(IntegrationError):
    """Base of what can go wrong while packages are fetched and unpacked."""


class ArchiveNotFound(PackagesError, code="NVSHIM-E2001", status=Status.FAILED_PRECONDITION):
    """The machine's apt configuration names no archive to take packages from."""


class ArchiveUnreachable(PackagesError, code="NVSHIM-E2002", status=Status.UNAVAILABLE):
    """The archive's lists could not be read: no network, or an archive that is not signed."""


class PackageNotFound(PackagesError, code="NVSHIM-E2003", status=Status.NOT_FOUND):
    """The archive has no package of that name."""


class DownloadFailed(PackagesError, code="NVSHIM-E2004", status=Status.UNAVAILABLE):
    """A package did not come whole. Nothing of it is kept."""


class UnpackFailed(PackagesError, code="NVSHIM-E2005", status=Status.DATA_LOSS):
    """A package could not be unpacked. Nothing of it is kept."""


class SimulatedError(IntegrationError):
    """Base of what can go wrong while a simulated node is made, read or removed."""


class ScenarioInvalid(SimulatedError, code="NVSHIM-E2101", status=Status.INVALID_ARGUMENT):
    """A scenario that no node can be made of."""


class NodeExists(SimulatedError, code="NVSHIM-E2102", status=Status.ALREADY_EXISTS):
    """There is something already where the node is to be made."""


class NodeNotFound(SimulatedError, code="NVSHIM-E2103", status=Status.NOT_FOUND):
    """The directory holds no simulated node."""


class DriverIncomplete(SimulatedError, code="NVSHIM-E2104", status=Status.FAILED_PRECONDITION):
    """The unpacked packages hold no driver, or not the one that was asked for."""


class LibraryNotBuilt(SimulatedError, code="NVSHIM-E2105", status=Status.FAILED_PRECONDITION):
    """A C compiler is missing, or it refused our source."""


class DevicesForbidden(SimulatedError, code="NVSHIM-E2106", status=Status.PERMISSION_DENIED):
    """Device nodes cannot be made here, or cannot be opened here: not root, or ``nodev``."""


class ShimNotFound(SimulatedError, code="NVSHIM-E2107", status=Status.FAILED_PRECONDITION):
    """There is no shim that a container on a simulated node could be run with."""


class ContainerdError(IntegrationError):
    """Base of what a private containerd raises."""


class ContainerdNotInstalled(
    ContainerdError, code="NVSHIM-E2201", status=Status.FAILED_PRECONDITION
):
    """A program that a private containerd is made of is not on the path."""

    remedy = "install containerd, or name it"


class ContainerdExited(ContainerdError, code="NVSHIM-E2202", status=Status.UNAVAILABLE):
    """containerd ended while it was to run, most often at its start."""

    remedy = "do what its last words say"


class ContainerdNotReady(ContainerdError, code="NVSHIM-E2203", status=Status.DEADLINE_EXCEEDED):
    """containerd runs and does not answer in time."""

    remedy = "see containerd's log, and try again"


class CtrFailed(ContainerdError, code="NVSHIM-E2204", status=Status.UNKNOWN):
    """``ctr`` ended with another code than 0. The message quotes what it said."""

    remedy = "do what its message says"


class CtrTimeout(ContainerdError, code="NVSHIM-E2205", status=Status.DEADLINE_EXCEEDED):
    """``ctr`` did not end in time, and was killed."""


class CleanupIncomplete(ContainerdError, code="NVSHIM-E2206", status=Status.INTERNAL):
    """Something of a private containerd could not be removed; the message lists it."""

    remedy = "end what uses them, and remove them by hand"


class ImagesError(IntegrationError):
    """Base of what can go wrong while an image is made."""


class SourceNotInstalled(ImagesError, code="NVSHIM-E2301", status=Status.FAILED_PRECONDITION):
    """A program or library that an image is made of is not on this machine."""

    remedy = "install the package that has it"


class ImageBuildFailed(ImagesError, code="NVSHIM-E2302", status=Status.INTERNAL):
    """The compiler, or ldconfig, refused what the image needs."""

    remedy = "do what the message of the program says"


def invalid(asked: str, found: str, do: str) -> ScenarioInvalid:
    """The error of a scenario that says ``asked``."""
    return ScenarioInvalid(f"a simulated node with {asked}", found=found, do=do)
