"""Errors of configuring an engine: E255x to E258x."""

from __future__ import annotations

from api.errors import Status
from integration.errors import IntegrationError


class EnginesError(IntegrationError, status=Status.FAILED_PRECONDITION):
    """Base of the errors of configuring an engine.

    Usually the cause is the state of the node, so that is the default status.
    """


class EngineNotInstalled(
    EnginesError, code="NVSHIM-E2550", remedy="check that the program is installed and runs"
):
    """The engine's program, which checks the configuration, was not found."""


class ConfigRefused(
    EnginesError,
    code="NVSHIM-E2554",
    remedy="correct the configuration; the engine would not start with it",
):
    """The engine itself refuses the configuration. Nothing was written."""


class RestartRefused(EnginesError, code="NVSHIM-E2568"):
    """The requested restart would not bring the engine back. The engine was left running."""


class RestartFailed(
    EnginesError, code="NVSHIM-E2569", status=Status.UNAVAILABLE, remedy="see the engine's log"
):
    """The engine was restarted and does not answer. Its files are in place."""


# fmt: off
EngineTooOld = EnginesError.row("NVSHIM-E2551 engine-too-old", Status.FAILED_PRECONDITION,
    "This release of the engine cannot use a shim.")
ConfigUnreadable = EnginesError.row("NVSHIM-E2552 config-unreadable", Status.PERMISSION_DENIED,
    "A configuration file of the engine cannot be read: no permission, not text, not a file.",
    remedy="check the file's type and encoding; it has to be UTF-8 text")
ConfigInvalid = EnginesError.row("NVSHIM-E2553 config-invalid", Status.FAILED_PRECONDITION,
    "A configuration file of the engine is not valid TOML or JSON, or has an unknown version.",
    remedy="correct the file")
ConfigDiffers = EnginesError.row("NVSHIM-E2555 config-differs", Status.FAILED_PRECONDITION,
    "With our part, the engine would read another setting differently. Nothing was written.")
ConfigIgnored = EnginesError.row("NVSHIM-E2556 config-ignored", Status.FAILED_PRECONDITION,
    "The engine would ignore our part of its configuration. Nothing was written.")
ConfigGenerated = EnginesError.row("NVSHIM-E2557 config-generated", Status.FAILED_PRECONDITION,
    "Another program regenerates the file; the message names what to edit instead.")
CriDisabled = EnginesError.row("NVSHIM-E2558 cri-disabled", Status.FAILED_PRECONDITION,
    "containerd's CRI plugin is disabled, so a handler has no effect.")
HandlerTaken = EnginesError.row("NVSHIM-E2559 handler-taken", Status.ALREADY_EXISTS,
    "A handler of that name exists already and is not ours.")
HandlerNameInvalid = EnginesError.row("NVSHIM-E2560 handler-name-invalid", Status.INVALID_ARGUMENT,
    "The name is not one that a RuntimeClass can refer to.")
DropInReplaces = EnginesError.row("NVSHIM-E2561 drop-in-replaces", Status.INVALID_ARGUMENT,
    "A drop-in was requested where it would replace a whole section of the root file.")
NotOurs = EnginesError.row("NVSHIM-E2562 not-ours", Status.ALREADY_EXISTS,
    "The file that we would write exists already and is not ours.")
ChangedByHand = EnginesError.row("NVSHIM-E2563 changed-by-hand", Status.FAILED_PRECONDITION,
    "A file that we wrote was edited since. It stays as it is unless forced.")
EditImpossible = EnginesError.row("NVSHIM-E2564 edit-impossible", Status.FAILED_PRECONDITION,
    "Our part cannot be added to a file without changing other parts of it.",
    remedy="write inline tables ({ … }) as tables of their own ([ … ])")
ConfigLocked = EnginesError.row("NVSHIM-E2565 config-locked", Status.UNAVAILABLE,
    "Another ``nvshim configure`` is changing the same files.")
ChangedMeanwhile = EnginesError.row("NVSHIM-E2566 changed-meanwhile", Status.ABORTED,
    "A file changed between plan and apply. Nothing was written.")
WriteFailed = EnginesError.row("NVSHIM-E2567 write-failed", Status.PERMISSION_DENIED,
    "A file could not be written or removed. The other files are as they were.",
    remedy="check that the file system is writable, and run this as root")
RecordInvalid = EnginesError.row("NVSHIM-E2570 record-invalid", Status.DATA_LOSS,
    "Our own record of the earlier configuration cannot be read.")
HandlerInUse = EnginesError.row("NVSHIM-E2571 handler-in-use", Status.FAILED_PRECONDITION,
    "Our handler is the default: without it, other containers would not start.")
EngineElsewhere = EnginesError.row("NVSHIM-E2572 engine-elsewhere", Status.FAILED_PRECONDITION,
    "The running engine has a version that no program here has, so nothing can check for it.")
ShimNotFound = EnginesError.row("NVSHIM-E2573 shim-not-found", Status.FAILED_PRECONDITION,
    "A handler of runc's type needs the path of our shim, and no shim was found.")
SandboxerUnsafe = EnginesError.row("NVSHIM-E2574 sandboxer-unsafe", Status.FAILED_PRECONDITION,
    "This containerd can crash when our shim creates sandboxes. Nothing was written.")
