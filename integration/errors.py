"""What can go wrong where the shim meets the world outside it.

Leaves of the tree in :mod:`api.errors`::

    NvshimError
    └── IntegrationError
        ├── PackagesError           E20xx  packages that are only data
        │   ├── ArchiveNotFound     E2001
        │   ├── ArchiveUnreachable  E2002
        │   ├── PackageNotFound     E2003
        │   ├── DownloadFailed      E2004
        │   └── UnpackFailed        E2005
        ├── SimulatedError          E21xx  the simulated GPU node
        │   ├── ScenarioInvalid     E2101
        │   ├── NodeExists          E2102
        │   ├── NodeNotFound        E2103
        │   ├── DriverIncomplete    E2104
        │   ├── LibraryNotBuilt     E2105
        │   ├── DevicesForbidden    E2106
        │   └── ShimNotFound        E2107
        ├── …                E22xx, E23xx  see integration.containerd_errors
        ├── DemoFailed              E2401  the demo
        ├── …                       E242x  see integration.cri.errors
        ├── …                       E246x  see integration.gpu.errors
        ├── …                       E250x  see integration.cli.errors
        ├── InspectionError         E251x  see integration.inspection.errors
        ├── …                       E253x  see integration.cdi.errors, integration.devices.errors
        ├── …                       E254x  see integration.compat.errors
        ├── …                       E255x, E256x, E257x  see integration.engines.errors
        ├── …                       E259x  see integration.doctor.errors
        ├── …                       E260x  see integration.dist.errors
        ├── …                       E262x, E263x  see integration.install.errors
        ├── …                       E266x  see integration.kubernetes.errors
        ├── …                       E269x  see integration.reference.errors
        └── …                       E27xx  see integration.node.errors
"""

from __future__ import annotations

from api.errors import NvshimError, Status


class IntegrationError(NvshimError):
    """Base of everything that :mod:`integration` raises on purpose."""


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


class DemoFailed(IntegrationError):
    """The demo's container did not see what it should. Raised by :mod:`integration.demo`."""

    code = "NVSHIM-E2401"
    status = Status.INTERNAL
