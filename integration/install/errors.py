"""What can go wrong while trees are put on a node, switched and taken away: E262x to E265x."""

from __future__ import annotations

from api.errors import Status
from integration.errors import IntegrationError


class InstallError(IntegrationError):
    """Base of everything that :mod:`integration.install` raises on purpose."""


class NotRoot(InstallError, code="NVSHIM-E2620", status=Status.PERMISSION_DENIED):
    """Only root may put on a node what root executes."""


class SourceMissing(InstallError, code="NVSHIM-E2621", status=Status.NOT_FOUND):
    """There is no tree to install: none was named, and this program is not part of one."""


class SourceBroken(InstallError, code="NVSHIM-E2622", status=Status.DATA_LOSS):
    """The tree to install is not what its own list of files says, or for another machine."""

    remedy = "get the archive again, and compare its checksum"


class ArchiveRefused(InstallError, code="NVSHIM-E2623", status=Status.INVALID_ARGUMENT):
    """An archive that is none of ours: it would write elsewhere, or has more than files."""


class PlaceUnsafe(InstallError, code="NVSHIM-E2624", status=Status.FAILED_PRECONDITION):
    """Somebody else could exchange what root would execute."""


class PlaceReadOnly(InstallError, code="NVSHIM-E2625", status=Status.FAILED_PRECONDITION):
    """The prefix or the directory of links cannot be written to."""


class PlaceNotExecutable(InstallError, code="NVSHIM-E2626", status=Status.FAILED_PRECONDITION):
    """The prefix is on a file system that executes nothing."""


class NoSpace(InstallError, code="NVSHIM-E2627", status=Status.RESOURCE_EXHAUSTED):
    """The file system is full, or would be. Nothing of the tree is left."""


class LinkTaken(InstallError, code="NVSHIM-E2628", status=Status.ALREADY_EXISTS):
    """Where a link has to be there is something that no installation has made."""


class InstallerBusy(InstallError, code="NVSHIM-E2629", status=Status.ABORTED):
    """Another installer works on the same prefix now."""


class SelfTestFailed(InstallError, code="NVSHIM-E2630", status=Status.INTERNAL):
    """The new tree could not run a container. Nothing was switched to it."""


class NoRuntimeToTest(InstallError, code="NVSHIM-E2631", status=Status.FAILED_PRECONDITION):
    """There is no runc or crun to try the new tree with."""


class VersionNotInstalled(InstallError, code="NVSHIM-E2632", status=Status.NOT_FOUND):
    """No tree below the prefix, or more than one, is of the version that was named."""


class NothingToGoBackTo(InstallError, code="NVSHIM-E2633", status=Status.FAILED_PRECONDITION):
    """There is no previous version."""


class StepFailed(InstallError, code="NVSHIM-E2634", status=Status.INTERNAL):
    """The system refused a step. What was in effect still is; the next run goes on from here."""


class LabelFailed(InstallError, code="NVSHIM-E2635", status=Status.FAILED_PRECONDITION):
    """SELinux is on, and restorecon could not give new files the labels of its policy."""

    remedy = "mend what restorecon reports, and run `nvshim install` again"


class PurgeFailed(InstallError, code="NVSHIM-E2636", status=Status.INTERNAL):
    """Something of the state could not be removed."""


class StillNamed(InstallError, code="NVSHIM-E2637", status=Status.FAILED_PRECONDITION):
    """An engine would start its containers through a shim that is not there any more."""
