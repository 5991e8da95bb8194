"""Errors of configuring an engine: E255x to E258x."""

from __future__ import annotations

from api.errors import Status
from integration.errors import IntegrationError


class EnginesError(IntegrationError):
    """Base of the errors of configuring an engine.

    Usually the node's state is the reason, so the default status says that.
    """

    status = Status.FAILED_PRECONDITION


class EngineNotInstalled(EnginesError, code="NVSHIM-E2550"):
    """The engine's program, which checks the configuration, was not found."""

    remedy = "check that the program is installed and runs"


class EngineTooOld(EnginesError, code="NVSHIM-E2551"):
    """This release of the engine cannot use a shim."""


class ConfigUnreadable(EnginesError, code="NVSHIM-E2552", status=Status.PERMISSION_DENIED):
    """A configuration file of the engine cannot be read: no permission, not text, not a file."""

    remedy = "check the file's type and encoding; it has to be UTF-8 text"


class ConfigInvalid(EnginesError, code="NVSHIM-E2553"):
    """A configuration file of the engine is not valid TOML or JSON, or has an unknown version."""

    remedy = "correct the file"


class ConfigRefused(EnginesError, code="NVSHIM-E2554"):
    """The engine itself refuses the configuration. Nothing was written."""

    remedy = "correct the configuration; the engine would not start with it"


class ConfigDiffers(EnginesError, code="NVSHIM-E2555"):
    """With our part, the engine would read another setting differently. Nothing was written."""


class ConfigIgnored(EnginesError, code="NVSHIM-E2556"):
    """The engine would ignore our part of its configuration. Nothing was written."""


class ConfigGenerated(EnginesError, code="NVSHIM-E2557"):
    """Another program regenerates the file; the message names what to edit instead."""


class CriDisabled(EnginesError, code="NVSHIM-E2558"):
    """containerd's CRI plugin is disabled, so a handler has no effect."""


class HandlerTaken(EnginesError, code="NVSHIM-E2559", status=Status.ALREADY_EXISTS):
    """A handler of that name exists already and is not ours."""


class HandlerNameInvalid(EnginesError, code="NVSHIM-E2560", status=Status.INVALID_ARGUMENT):
    """The name is not one that a RuntimeClass can refer to."""


class DropInReplaces(EnginesError, code="NVSHIM-E2561", status=Status.INVALID_ARGUMENT):
    """A drop-in was requested where it would replace a whole section of the root file."""


class NotOurs(EnginesError, code="NVSHIM-E2562", status=Status.ALREADY_EXISTS):
    """The file that we would write exists already and is not ours."""


class ChangedByHand(EnginesError, code="NVSHIM-E2563"):
    """A file that we wrote was edited since. It stays as it is unless forced."""


class EditImpossible(EnginesError, code="NVSHIM-E2564"):
    """Our part cannot be added to a file without changing other parts of it."""

    remedy = "write inline tables ({ … }) as tables of their own ([ … ])"


class ConfigLocked(EnginesError, code="NVSHIM-E2565", status=Status.UNAVAILABLE):
    """Another ``nvshim configure`` is changing the same files."""


class ChangedMeanwhile(EnginesError, code="NVSHIM-E2566", status=Status.ABORTED):
    """A file changed between plan and apply. Nothing was written."""


class WriteFailed(EnginesError, code="NVSHIM-E2567", status=Status.PERMISSION_DENIED):
    """A file could not be written or removed. The files after it in the plan are unchanged."""

    remedy = "check that the file system is writable, and run this as root"


class RestartRefused(EnginesError, code="NVSHIM-E2568"):
    """The requested restart would not bring the engine back. The engine was left running."""


class RestartFailed(EnginesError, code="NVSHIM-E2569", status=Status.UNAVAILABLE):
    """The engine was restarted and does not answer. Its files are in place."""

    remedy = "see the engine's log"


class RecordInvalid(EnginesError, code="NVSHIM-E2570", status=Status.DATA_LOSS):
    """Our own record of the earlier configuration cannot be read."""


class HandlerInUse(EnginesError, code="NVSHIM-E2571"):
    """Our handler is the default: without it, other containers would not start."""


class EngineElsewhere(EnginesError, code="NVSHIM-E2572"):
    """The running engine has a version that no program here has, so nothing can check for it."""


class ShimNotFound(EnginesError, code="NVSHIM-E2573"):
    """A handler of runc's type needs the path of our shim, and no shim was found."""


class SandboxerUnsafe(EnginesError, code="NVSHIM-E2574"):
    """This containerd can crash when our shim creates sandboxes. Nothing was written."""
