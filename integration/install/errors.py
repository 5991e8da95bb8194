"""What can go wrong while trees are put on a node, switched and taken away: E262x to E265x."""

from __future__ import annotations

from api.errors import Status
from integration.errors import IntegrationError


class InstallError(IntegrationError):
    """Base of everything that :mod:`integration.install` raises on purpose."""


class NotRoot(InstallError):
    """Only root may put on a node what root executes."""

    code = "NVSHIM-E2620"
    status = Status.PERMISSION_DENIED


class SourceMissing(InstallError):
    """There is no tree to install: none was named, and this program is not part of one."""

    code = "NVSHIM-E2621"
    status = Status.NOT_FOUND


class SourceBroken(InstallError):
    """The tree to install is not what its own list of files says, or for another machine."""

    code = "NVSHIM-E2622"
    status = Status.DATA_LOSS
    remedy = "get the archive again, and compare its checksum"


class ArchiveRefused(InstallError):
    """An archive that is none of ours: it would write elsewhere, or has more than files."""

    code = "NVSHIM-E2623"
    status = Status.INVALID_ARGUMENT


class PlaceUnsafe(InstallError):
    """Somebody else could exchange what root would execute."""

    code = "NVSHIM-E2624"
    status = Status.FAILED_PRECONDITION


class PlaceReadOnly(InstallError):
    """The prefix or the directory of links cannot be written to."""

    code = "NVSHIM-E2625"
    status = Status.FAILED_PRECONDITION


class PlaceNotExecutable(InstallError):
    """The prefix is on a file system that executes nothing."""

    code = "NVSHIM-E2626"
    status = Status.FAILED_PRECONDITION


class NoSpace(InstallError):
    """The file system is full, or would be. Nothing of the tree is left."""

    code = "NVSHIM-E2627"
    status = Status.RESOURCE_EXHAUSTED


class LinkTaken(InstallError):
    """Where a link has to be there is something that no installation has made."""

    code = "NVSHIM-E2628"
    status = Status.ALREADY_EXISTS


class InstallerBusy(InstallError):
    """Another installer works on the same prefix now."""

    code = "NVSHIM-E2629"
    status = Status.ABORTED


class SelfTestFailed(InstallError):
    """The new tree could not run a container. Nothing was switched to it."""

    code = "NVSHIM-E2630"
    status = Status.INTERNAL


class NoRuntimeToTest(InstallError):
    """There is no runc or crun to try the new tree with."""

    code = "NVSHIM-E2631"
    status = Status.FAILED_PRECONDITION


class VersionNotInstalled(InstallError):
    """No tree below the prefix, or more than one, is of the version that was named."""

    code = "NVSHIM-E2632"
    status = Status.NOT_FOUND


class NothingToGoBackTo(InstallError):
    """There is no previous version."""

    code = "NVSHIM-E2633"
    status = Status.FAILED_PRECONDITION


class StepFailed(InstallError):
    """The system refused a step. What was in effect still is; the next run goes on from here."""

    code = "NVSHIM-E2634"
    status = Status.INTERNAL


class LabelFailed(InstallError):
    """SELinux is on, and restorecon could not give new files the labels of its policy."""

    code = "NVSHIM-E2635"
    status = Status.FAILED_PRECONDITION
    remedy = "mend what restorecon reports, and run `nvshim install` again"


class PurgeFailed(InstallError):
    """Something of the state could not be removed."""

    code = "NVSHIM-E2636"
    status = Status.INTERNAL


class StillNamed(InstallError):
    """An engine would start its containers through a shim that is not there any more."""

    code = "NVSHIM-E2637"
    status = Status.FAILED_PRECONDITION
