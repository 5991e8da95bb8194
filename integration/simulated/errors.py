"""What can go wrong with simulated nodes, and with what containers run on them with.

Leaves of the tree in :mod:`api.errors`, beside those in :mod:`integration.errors`::

    IntegrationError
    ├── PackagesError               E20xx  packages that are only data
    │   ├── ArchiveNotFound         E2001
    │   ├── ArchiveUnreachable      E2002
    │   ├── PackageNotFound         E2003
    │   ├── DownloadFailed          E2004
    │   └── UnpackFailed            E2005
    ├── SimulatedError              E21xx  the simulated GPU node
    │   ├── ScenarioInvalid         E2101
    │   ├── NodeExists              E2102
    │   ├── NodeNotFound            E2103
    │   ├── DriverIncomplete        E2104
    │   ├── LibraryNotBuilt         E2105
    │   ├── DevicesForbidden        E2106
    │   └── ShimNotFound            E2107
    ├── ContainerdError             E22xx  a private containerd
    │   ├── ContainerdNotInstalled  E2201
    │   ├── ContainerdExited        E2202
    │   ├── ContainerdNotReady      E2203
    │   ├── CtrFailed               E2204
    │   ├── CtrTimeout              E2205
    │   └── CleanupIncomplete       E2206
    └── ImagesError                 E23xx  images made of the host's files
        ├── SourceNotInstalled      E2301
        └── ImageBuildFailed        E2302
"""

from __future__ import annotations

from api.errors import Status
from integration.errors import IntegrationError


class PackagesError(IntegrationError):
    """Base of what can go wrong while packages are fetched and unpacked."""


class ArchiveNotFound(PackagesError):
    """The machine's apt configuration names no archive to take packages from."""

    code = "NVSHIM-E2001"
    status = Status.FAILED_PRECONDITION


class ArchiveUnreachable(PackagesError):
    """The archive's lists could not be read: no network, or an archive that is not signed."""

    code = "NVSHIM-E2002"
    status = Status.UNAVAILABLE


class PackageNotFound(PackagesError):
    """The archive has no package of that name."""

    code = "NVSHIM-E2003"
    status = Status.NOT_FOUND


class DownloadFailed(PackagesError):
    """A package did not come whole. Nothing of it is kept."""

    code = "NVSHIM-E2004"
    status = Status.UNAVAILABLE


class UnpackFailed(PackagesError):
    """A package could not be unpacked. Nothing of it is kept."""

    code = "NVSHIM-E2005"
    status = Status.DATA_LOSS


class SimulatedError(IntegrationError):
    """Base of what can go wrong while a simulated node is made, read or removed."""


class ScenarioInvalid(SimulatedError):
    """A scenario that no node can be made of."""

    code = "NVSHIM-E2101"
    status = Status.INVALID_ARGUMENT


class NodeExists(SimulatedError):
    """There is something already where the node is to be made."""

    code = "NVSHIM-E2102"
    status = Status.ALREADY_EXISTS


class NodeNotFound(SimulatedError):
    """The directory holds no simulated node."""

    code = "NVSHIM-E2103"
    status = Status.NOT_FOUND


class DriverIncomplete(SimulatedError):
    """The unpacked packages hold no driver, or not the one that was asked for."""

    code = "NVSHIM-E2104"
    status = Status.FAILED_PRECONDITION


class LibraryNotBuilt(SimulatedError):
    """A C compiler is missing, or it refused our source."""

    code = "NVSHIM-E2105"
    status = Status.FAILED_PRECONDITION


class DevicesForbidden(SimulatedError):
    """Device nodes cannot be made here, or cannot be opened here: not root, or ``nodev``."""

    code = "NVSHIM-E2106"
    status = Status.PERMISSION_DENIED


class ShimNotFound(SimulatedError):
    """There is no shim that a container on a simulated node could be run with."""

    code = "NVSHIM-E2107"
    status = Status.FAILED_PRECONDITION


class ContainerdError(IntegrationError):
    """Base of what a private containerd raises."""


class ContainerdNotInstalled(ContainerdError):
    """A program that a private containerd is made of is not on the path."""

    code = "NVSHIM-E2201"
    status = Status.FAILED_PRECONDITION
    remedy = "install containerd, or name it"


class ContainerdExited(ContainerdError):
    """containerd ended while it was to run, most often at its start."""

    code = "NVSHIM-E2202"
    status = Status.UNAVAILABLE
    remedy = "do what its last words say"


class ContainerdNotReady(ContainerdError):
    """containerd runs and does not answer in time."""

    code = "NVSHIM-E2203"
    status = Status.DEADLINE_EXCEEDED
    remedy = "see containerd's log, and try again"


class CtrFailed(ContainerdError):
    """``ctr`` ended with another code than 0. The message quotes what it said."""

    code = "NVSHIM-E2204"
    status = Status.UNKNOWN
    remedy = "do what its message says"


class CtrTimeout(ContainerdError):
    """``ctr`` did not end in time, and was killed."""

    code = "NVSHIM-E2205"
    status = Status.DEADLINE_EXCEEDED


class CleanupIncomplete(ContainerdError):
    """Something of a private containerd could not be removed; the message lists it."""

    code = "NVSHIM-E2206"
    status = Status.INTERNAL
    remedy = "end what uses them, and remove them by hand"


class ImagesError(IntegrationError):
    """Base of what can go wrong while an image is made."""


class SourceNotInstalled(ImagesError):
    """A program or library that an image is made of is not on this machine."""

    code = "NVSHIM-E2301"
    status = Status.FAILED_PRECONDITION
    remedy = "install the package that has it"


class ImageBuildFailed(ImagesError):
    """The compiler, or ldconfig, refused what the image needs."""

    code = "NVSHIM-E2302"
    status = Status.INTERNAL
    remedy = "do what the message of the program says"


def invalid(asked: str, found: str, do: str) -> ScenarioInvalid:
    """The error of a scenario that says ``asked``."""
    return ScenarioInvalid(f"a simulated node with {asked}", found=found, do=do)
