"""What can go wrong while an engine is configured: E255x to E258x."""

from __future__ import annotations

from api.errors import Status
from integration.errors import IntegrationError


class EnginesError(IntegrationError):
    """Base of what can go wrong while an engine is configured.

    Most often something on the node stands in the way, so that is the status of all that say none.
    """

    status = Status.FAILED_PRECONDITION


class EngineNotInstalled(EnginesError):
    """The engine's program, which is to check what is written for it, is not found."""

    code = "NVSHIM-E2550"
    remedy = "see that the program is installed and can be run"


class EngineTooOld(EnginesError):
    """This release of the engine cannot be told of a shim."""

    code = "NVSHIM-E2551"


class ConfigUnreadable(EnginesError):
    """A file of the engine's configuration cannot be read: permission, not text, no file."""

    code = "NVSHIM-E2552"
    status = Status.PERMISSION_DENIED
    remedy = "see the file's type and encoding (it has to be text in UTF-8)"


class ConfigInvalid(EnginesError):
    """A file of the engine's configuration is no TOML or JSON, or of a version nobody knows."""

    code = "NVSHIM-E2553"
    remedy = "correct the file"


class ConfigRefused(EnginesError):
    """The engine itself refuses a configuration. Nothing was put in place."""

    code = "NVSHIM-E2554"
    remedy = "correct the configuration; the engine would not start with it"


class ConfigDiffers(EnginesError):
    """With our part the engine would read something else differently. Nothing was put in place."""

    code = "NVSHIM-E2555"


class ConfigIgnored(EnginesError):
    """The engine would not see our part of its configuration. Nothing was put in place."""

    code = "NVSHIM-E2556"


class ConfigGenerated(EnginesError):
    """The file is written anew by another program; the message names what to edit instead."""

    code = "NVSHIM-E2557"


class CriDisabled(EnginesError):
    """containerd serves no kubelet, so that a handler in its configuration has no effect."""

    code = "NVSHIM-E2558"


class HandlerTaken(EnginesError):
    """Somebody else has configured a handler of that name."""

    code = "NVSHIM-E2559"
    status = Status.ALREADY_EXISTS


class HandlerNameInvalid(EnginesError):
    """No RuntimeClass can name a handler so."""

    code = "NVSHIM-E2560"
    status = Status.INVALID_ARGUMENT


class DropInReplaces(EnginesError):
    """A drop-in was asked for where it would replace a whole section of the root file."""

    code = "NVSHIM-E2561"
    status = Status.INVALID_ARGUMENT


class NotOurs(EnginesError):
    """There is a file of somebody else where ours is to be."""

    code = "NVSHIM-E2562"
    status = Status.ALREADY_EXISTS


class ChangedByHand(EnginesError):
    """What we have written was changed since. It stays as it is unless forced."""

    code = "NVSHIM-E2563"


class EditImpossible(EnginesError):
    """Our part cannot be written into a file without changing what others wrote."""

    code = "NVSHIM-E2564"
    remedy = "write inline tables ({ … }) as tables of their own ([ … ])"


class ConfigLocked(EnginesError):
    """Another ``nvshim configure`` is at work on the same files."""

    code = "NVSHIM-E2565"
    status = Status.UNAVAILABLE


class ChangedMeanwhile(EnginesError):
    """A file changed between the plan and its execution. Nothing was put in place."""

    code = "NVSHIM-E2566"
    status = Status.ABORTED


class WriteFailed(EnginesError):
    """A file could not be written or removed. What was not reached is as it was."""

    code = "NVSHIM-E2567"
    status = Status.PERMISSION_DENIED
    remedy = "see that the file system can be written, and run this as root"


class RestartRefused(EnginesError):
    """The restart that was asked for would not bring the engine back. Nothing was done to it."""

    code = "NVSHIM-E2568"


class RestartFailed(EnginesError):
    """The engine was told to restart, and does not answer. Its files are in place."""

    code = "NVSHIM-E2569"
    status = Status.UNAVAILABLE
    remedy = "see the engine's log"


class RecordInvalid(EnginesError):
    """Our own record of what was configured cannot be understood."""

    code = "NVSHIM-E2570"
    status = Status.DATA_LOSS


class HandlerInUse(EnginesError):
    """Others have made ours the default: without it, no container of theirs would start."""

    code = "NVSHIM-E2571"


class EngineElsewhere(EnginesError):
    """The engine that runs is of a version that no program here has, so none can check for it."""

    code = "NVSHIM-E2572"


class ShimNotFound(EnginesError):
    """A handler of runc's type needs the path of our shim, and there is none of its name."""

    code = "NVSHIM-E2573"
