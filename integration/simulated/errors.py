"""Errors of simulated nodes, and of running containers on them: E20xx to E23xx."""

from __future__ import annotations

from api.errors import Status
from integration.errors import IntegrationError


class PackagesError(IntegrationError):
    """Base of the errors of fetching and unpacking packages."""


class SimulatedError(IntegrationError):
    """Base of the errors of creating, reading or removing a simulated node."""


class CtrTimeout(IntegrationError, code="NVSHIM-E2205", status=Status.DEADLINE_EXCEEDED):
    """``ctr`` did not exit in time, and was killed."""


def invalid(asked: str, found: str, do: str) -> SimulatedError:
    """Return the error for a scenario with an invalid setting."""
    return ScenarioInvalid(f"a simulated node with {asked}", found=found, do=do)


# fmt: off
ArchiveNotFound = PackagesError.row("NVSHIM-E2001 archive-not-found", Status.FAILED_PRECONDITION,
    "The machine's apt configuration names no package archive.")
ArchiveUnreachable = PackagesError.row("NVSHIM-E2002 archive-unreachable", Status.UNAVAILABLE,
    "The archive's lists cannot be read: no network, or the archive is not signed.")
PackageNotFound = PackagesError.row("NVSHIM-E2003 package-not-found", Status.NOT_FOUND,
    "The archive has no package of that name.")
DownloadFailed = PackagesError.row("NVSHIM-E2004 download-failed", Status.UNAVAILABLE,
    "A package was not downloaded completely. It is not kept.")
UnpackFailed = PackagesError.row("NVSHIM-E2005 unpack-failed", Status.DATA_LOSS,
    "A package could not be unpacked. Its files are not kept.")
ScenarioInvalid = SimulatedError.row("NVSHIM-E2101 scenario-invalid", Status.INVALID_ARGUMENT,
    "The scenario is not valid.")
NodeExists = SimulatedError.row("NVSHIM-E2102 node-exists", Status.ALREADY_EXISTS,
    "The directory for the node is not empty.")
NodeNotFound = SimulatedError.row("NVSHIM-E2103 node-not-found", Status.NOT_FOUND,
    "The directory does not contain a simulated node.")
DriverIncomplete = SimulatedError.row("NVSHIM-E2104 driver-incomplete", Status.FAILED_PRECONDITION,
    "The unpacked packages do not contain a driver, or not the requested one.")
LibraryNotBuilt = SimulatedError.row("NVSHIM-E2105 library-not-built", Status.FAILED_PRECONDITION,
    "There is no C compiler, or it failed on our source.")
DevicesForbidden = SimulatedError.row("NVSHIM-E2106 devices-forbidden", Status.PERMISSION_DENIED,
    "Device nodes cannot be created or opened here: not root, or ``nodev``.")
ShimNotFound = SimulatedError.row("NVSHIM-E2107 shim-not-found", Status.FAILED_PRECONDITION,
    "No shim was found to run a container on a simulated node.")
NodeUnwritten = SimulatedError.row("NVSHIM-E2108 node-unwritten", Status.FAILED_PRECONDITION,
    "The directory of a node cannot be created or filled. The partial node was removed.",
    remedy="name another directory, or run this as root")
ContainerdNotInstalled = IntegrationError.row(
    "NVSHIM-E2201 containerd-not-installed", Status.FAILED_PRECONDITION,
    "A program that a private containerd needs is not on the path.",
    remedy="install containerd, or name it")
ContainerdExited = IntegrationError.row("NVSHIM-E2202 containerd-exited", Status.UNAVAILABLE,
    "containerd exited unexpectedly, most often at its start.",
    remedy="fix what its last log line reports")
ContainerdNotReady = IntegrationError.row(
    "NVSHIM-E2203 containerd-not-ready", Status.DEADLINE_EXCEEDED,
    "containerd runs but did not answer in time.",
    remedy="see containerd's log, and try again")
CtrFailed = IntegrationError.row("NVSHIM-E2204 ctr-failed", Status.UNKNOWN,
    "``ctr`` failed. The message quotes its output.",
    remedy="fix what its message reports")
CleanupIncomplete = IntegrationError.row("NVSHIM-E2206 cleanup-incomplete", Status.INTERNAL,
    "Parts of a private containerd could not be removed; the message lists them.",
    remedy="stop the processes that use them, and remove them by hand")
SourceNotInstalled = IntegrationError.row(
    "NVSHIM-E2301 source-not-installed", Status.FAILED_PRECONDITION,
    "A program or library for an image is not on this machine.",
    remedy="install the package that contains it")
ImageBuildFailed = IntegrationError.row("NVSHIM-E2302 image-build-failed", Status.INTERNAL,
    "The compiler or ldconfig failed on an image.",
    remedy="fix what the program's message reports")
