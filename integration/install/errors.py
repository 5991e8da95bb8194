"""Errors of installing, switching and removing trees: E262x to E265x."""

from __future__ import annotations

from api.errors import Status
from integration.errors import IntegrationError


class InstallError(IntegrationError):
    """Base of everything that :mod:`integration.install` raises on purpose."""


class SelfTestFailed(InstallError, code="NVSHIM-E2630", status=Status.INTERNAL):
    """The new tree could not run a container. The current version stays."""


# fmt: off
NotRoot = InstallError.row("NVSHIM-E2620 not-root", Status.PERMISSION_DENIED,
    "Only root may install programs that root executes.")
SourceMissing = InstallError.row("NVSHIM-E2621 source-missing", Status.NOT_FOUND,
    "There is no tree to install: none was named, and this program is not part of one.")
SourceBroken = InstallError.row("NVSHIM-E2622 source-broken", Status.DATA_LOSS,
    "The tree does not match its own list of files, or is for another architecture.",
    remedy="get the archive again, and compare its checksum")
ArchiveRefused = InstallError.row("NVSHIM-E2623 archive-refused", Status.INVALID_ARGUMENT,
    "The archive is not that of a tree: it would write elsewhere, or has more than files.")
PlaceUnsafe = InstallError.row("NVSHIM-E2624 place-unsafe", Status.FAILED_PRECONDITION,
    "Another user could replace programs that root executes.")
PlaceReadOnly = InstallError.row("NVSHIM-E2625 place-read-only", Status.FAILED_PRECONDITION,
    "The prefix or the links' directory is not writable.")
PlaceNotExecutable = InstallError.row(
    "NVSHIM-E2626 place-not-executable", Status.FAILED_PRECONDITION,
    "The prefix is on a file system that is mounted noexec.")
NoSpace = InstallError.row("NVSHIM-E2627 no-space", Status.RESOURCE_EXHAUSTED,
    "The file system is full, or would be. The incomplete tree was removed.")
LinkTaken = InstallError.row("NVSHIM-E2628 link-taken", Status.ALREADY_EXISTS,
    "Another file is where a link has to be.")
InstallerBusy = InstallError.row("NVSHIM-E2629 installer-busy", Status.ABORTED,
    "Another installer is working on the same prefix.")
NoRuntimeToTest = InstallError.row("NVSHIM-E2631 no-runtime-to-test", Status.FAILED_PRECONDITION,
    "There is no runc or crun to test the new tree with.")
VersionNotInstalled = InstallError.row("NVSHIM-E2632 version-not-installed", Status.NOT_FOUND,
    "No installed tree, or more than one, matches the version.")
NothingToGoBackTo = InstallError.row(
    "NVSHIM-E2633 nothing-to-go-back-to", Status.FAILED_PRECONDITION,
    "There is no previous version.")
StepFailed = InstallError.row("NVSHIM-E2634 step-failed", Status.INTERNAL,
    "The system refused a step. The current version stays; the next run continues from here.")
LabelFailed = InstallError.row("NVSHIM-E2635 label-failed", Status.FAILED_PRECONDITION,
    "SELinux is on, and restorecon could not label new files.",
    remedy="fix what restorecon reports, and run `nvshim install` again")
PurgeFailed = InstallError.row("NVSHIM-E2636 purge-failed", Status.INTERNAL,
    "Part of the state could not be removed.")
StillNamed = InstallError.row("NVSHIM-E2637 still-named", Status.FAILED_PRECONDITION,
    "An engine would start its containers through a shim that no longer exists.")
