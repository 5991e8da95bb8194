"""Errors of installing, switching and removing trees: E262x to E265x."""

from __future__ import annotations

from api.errors import Status
from integration.errors import IntegrationError


class InstallError(IntegrationError):
    """Base of everything that :mod:`integration.install` raises on purpose."""


class NotRoot(InstallError, code="NVSHIM-E2620", status=Status.PERMISSION_DENIED):
    """Only root may install programs that root executes."""


class SourceMissing(InstallError, code="NVSHIM-E2621", status=Status.NOT_FOUND):
    """There is no tree to install: none was named, and this program is not part of one."""


class SourceBroken(InstallError, code="NVSHIM-E2622", status=Status.DATA_LOSS):
    """The tree does not match its own list of files, or is for another architecture."""

    remedy = "get the archive again, and compare its checksum"


class ArchiveRefused(InstallError, code="NVSHIM-E2623", status=Status.INVALID_ARGUMENT):
    """The archive is not one of a tree: it would write elsewhere, or has more than files."""


class PlaceUnsafe(InstallError, code="NVSHIM-E2624", status=Status.FAILED_PRECONDITION):
    """Another user could replace programs that root executes."""


class PlaceReadOnly(InstallError, code="NVSHIM-E2625", status=Status.FAILED_PRECONDITION):
    """The prefix or the links' directory is not writable."""


class PlaceNotExecutable(InstallError, code="NVSHIM-E2626", status=Status.FAILED_PRECONDITION):
    """The prefix is on a file system that is mounted noexec."""


class NoSpace(InstallError, code="NVSHIM-E2627", status=Status.RESOURCE_EXHAUSTED):
    """The file system is full, or would be. The incomplete tree was removed."""


class LinkTaken(InstallError, code="NVSHIM-E2628", status=Status.ALREADY_EXISTS):
    """Another file is where a link has to be."""


class InstallerBusy(InstallError, code="NVSHIM-E2629", status=Status.ABORTED):
    """Another installer is working on the same prefix."""


class SelfTestFailed(InstallError, code="NVSHIM-E2630", status=Status.INTERNAL):
    """The new tree could not run a container. The current version stays."""


class NoRuntimeToTest(InstallError, code="NVSHIM-E2631", status=Status.FAILED_PRECONDITION):
    """There is no runc or crun to test the new tree with."""


class VersionNotInstalled(InstallError, code="NVSHIM-E2632", status=Status.NOT_FOUND):
    """No installed tree, or more than one, matches the version."""


class NothingToGoBackTo(InstallError, code="NVSHIM-E2633", status=Status.FAILED_PRECONDITION):
    """There is no previous version."""


class StepFailed(InstallError, code="NVSHIM-E2634", status=Status.INTERNAL):
    """The system refused a step. The current version stays; the next run continues from here."""


class LabelFailed(InstallError, code="NVSHIM-E2635", status=Status.FAILED_PRECONDITION):
    """SELinux is on, and restorecon could not label new files."""

    remedy = "fix what restorecon reports, and run `nvshim install` again"


class PurgeFailed(InstallError, code="NVSHIM-E2636", status=Status.INTERNAL):
    """Part of the state could not be removed."""


class StillNamed(InstallError, code="NVSHIM-E2637", status=Status.FAILED_PRECONDITION):
    """An engine would start its containers through a shim that no longer exists."""
