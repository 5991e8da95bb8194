"""What can go wrong while an engine is configured: E255x to E258x."""

from __future__ import annotations

from api.errors import Status
from integration.errors import IntegrationError


class EnginesError(IntegrationError):
    """Base of what can go wrong while an engine is configured.

    Most often something on the node stands in the way, so that is the status of all that say none.
    """

    status = Status.FAILED_PRECONDITION


class EngineNotInstalled(EnginesError, code="NVSHIM-E2550"):
    """The engine's program, which is to check what is written for it, is not found."""

    remedy = "see that the program is installed and can be run"


class EngineTooOld(EnginesError, code="NVSHIM-E2551"):
    """This release of the engine cannot be told of a shim."""


class ConfigUnreadable(EnginesError, code="NVSHIM-E2552", status=Status.PERMISSION_DENIED):
    """A file of the engine's configuration cannot be read: permission, not text, no file."""

    remedy = "see the file's type and encoding (it has to be text in UTF-8)"


class ConfigInvalid(EnginesError, code="NVSHIM-E2553"):
    """A file of the engine's configuration is no TOML or JSON, or of a version nobody knows."""

    remedy = "correct the file"


class ConfigRefused(EnginesError, code="NVSHIM-E2554"):
    """The engine itself refuses a configuration. Nothing was put in place."""

    remedy = "correct the configuration; the engine would not start with it"


class ConfigDiffers(EnginesError, code="NVSHIM-E2555"):
    """With our part the engine would read something else differently. Nothing was put in place."""


class ConfigIgnored(EnginesError, code="NVSHIM-E2556"):
    """The engine would not see our part of its configuration. Nothing was put in place."""


class ConfigGenerated(EnginesError, code="NVSHIM-E2557"):
    """The file is written anew by another program; the message names what to edit instead."""


class CriDisabled(EnginesError, code="NVSHIM-E2558"):
    """containerd serves no kubelet, so that a handler in its configuration has no effect."""


class HandlerTaken(EnginesError, code="NVSHIM-E2559", status=Status.ALREADY_EXISTS):
    """Somebody else has configured a handler of that name."""


class HandlerNameInvalid(EnginesError, code="NVSHIM-E2560", status=Status.INVALID_ARGUMENT):
    """No RuntimeClass can name a handler so."""


class DropInReplaces(EnginesError, code="NVSHIM-E2561", status=Status.INVALID_ARGUMENT):
    """A drop-in was asked for where it would replace a whole section of the root file."""


class NotOurs(EnginesError, code="NVSHIM-E2562", status=Status.ALREADY_EXISTS):
    """There is a file of somebody else where ours is to be."""


class ChangedByHand(EnginesError, code="NVSHIM-E2563"):
    """What we have written was changed since. It stays as it is unless forced."""


class EditImpossible(EnginesError, code="NVSHIM-E2564"):
    """Our part cannot be written into a file without changing what others wrote."""

    remedy = "write inline tables ({ … }) as tables of their own ([ … ])"


class ConfigLocked(EnginesError, code="NVSHIM-E2565", status=Status.UNAVAILABLE):
    """Another ``nvshim configure`` is at work on the same files."""


class ChangedMeanwhile(EnginesError, code="NVSHIM-E2566", status=Status.ABORTED):
    """A file changed between the plan and its execution. Nothing was put in place."""


class WriteFailed(EnginesError, code="NVSHIM-E2567", status=Status.PERMISSION_DENIED):
    """A file could not be written or removed. What was not reached is as it was."""

    remedy = "see that the file system can be written, and run this as root"


class RestartRefused(EnginesError, code="NVSHIM-E2568"):
    """The restart that was asked for would not bring the engine back. Nothing was done to it."""


class RestartFailed(EnginesError, code="NVSHIM-E2569", status=Status.UNAVAILABLE):
    """The engine was told to restart, and does not answer. Its files are in place."""

    remedy = "see the engine's log"


class RecordInvalid(EnginesError, code="NVSHIM-E2570", status=Status.DATA_LOSS):
    """Our own record of what was configured cannot be understood."""


class HandlerInUse(EnginesError, code="NVSHIM-E2571"):
    """Others have made ours the default: without it, no container of theirs would start."""


class EngineElsewhere(EnginesError, code="NVSHIM-E2572"):
    """The engine that runs is of a version that no program here has, so none can check for it."""


class ShimNotFound(EnginesError, code="NVSHIM-E2573"):
    """A handler of runc's type needs the path of our shim, and there is none of its name."""


class SandboxerUnsafe(EnginesError, code="NVSHIM-E2574"):
    """This containerd can end when our shim makes sandboxes. Nothing was put in place."""
