"""The shim's errors: E07xx and E1xxx. Codes are never reused.

The verbs load this module, so it imports nothing but the root of the error table. The errors of
checkpoints and of sandboxes are in their own rooms.
"""

from __future__ import annotations

import errno
from typing import Final

from api.errors import NvshimError, Status

# Export the root, too: code that catches one often must catch the other.
__all__ = ["NvshimError", "ShimError"]


SCARCE: Final = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOSPC, errno.EDQUOT}
)
"""The kernel's errors for resources that may be available again a moment later."""


def remedy_of(error: OSError, otherwise: str = "") -> str:
    """Return the remedy for a kernel error.

    Args:
        error: the error.
        otherwise: the remedy if no resource is exhausted; by default the class's.
    """
    if error.errno in SCARCE:
        return "look at the shim's limits and at what is full, and ask again"
    return otherwise


class ShimError(NvshimError, code="NVSHIM-E1000", status=Status.UNKNOWN):
    """Something about the shim process, a bundle, a runtime, a task or its stdio."""


class BundleUnusable(
    ShimError,
    code="NVSHIM-E1004",
    status=Status.FAILED_PRECONDITION,
    remedy="delete the container and create it again",
):
    """A file of the bundle is missing, unreadable or malformed.

    Raised by :mod:`shim.bundle` and by readers of the spec.
    """


class MountFailed(ShimError, code="NVSHIM-E1103", status=Status.FAILED_PRECONDITION):
    """The kernel refused a mount, or had not completed it in time."""


class UnmountFailed(
    ShimError,
    code="NVSHIM-E1105",
    status=Status.INTERNAL,
    remedy="see what still uses the mount (`fuser -m`), and end it",
):
    """A mount remains after all attempts, or umount(2) does not return."""


def runtime_failed(verb: str) -> str:
    """Return the text of containerd's own shim for an error, for scripts that match it.

    Source: containerd cmd/containerd-shim-runc-v2/process, runtimeError.
    """
    return f"OCI runtime {verb} failed: "


# Not NOT_FOUND, which means to Delete or Kill that the container is gone.
class ProgramNotFound(ShimError, code="NVSHIM-E1201", status=Status.FAILED_PRECONDITION):
    """A program does not exist or cannot be executed. Raised by :mod:`shim.children`."""


class ProgramTimeout(ShimError, code="NVSHIM-E1202", status=Status.DEADLINE_EXCEEDED):
    """A program did not end in time, and was killed. Raised by :func:`shim.children.run`."""


# UNKNOWN, as from containerd's own shim, whatever is missing in the image. Its text has no id: of a
# pod that restarts, Kubernetes counts equal messages, and lists each of those that differ.
class RuntimeFailed(ShimError, code="NVSHIM-E1203"):
    """runc or crun reported an error; ``found`` quotes it.

    Args:
        verb: the runtime's verb, which selects containerd's preface.
    """

    def __init__(self, asked: str, *, found: str, do: str = "", verb: str = "") -> None:
        super().__init__(asked, found=found, do=do)
        self.preface = runtime_failed(verb) if verb else ""


class InvalidRuntimeOptions(ShimError, code="NVSHIM-E1205", status=Status.INVALID_ARGUMENT):
    """The handler's options are invalid."""


class TaskNotFound(
    ShimError,
    code="NVSHIM-E1301",
    status=Status.NOT_FOUND,
    remedy="see the tasks that there are: `ctr tasks list`, or `crictl ps`",
):
    """This shim has no task with that id."""


class ProcessFinished(
    ShimError, code="NVSHIM-E1305", status=Status.NOT_FOUND, remedy="nothing is left to do"
):
    """A signal for a process that has ended. Raised by :mod:`shim.pod.container`."""


class SystemRefused(ShimError, code="NVSHIM-E1309"):
    """The kernel refused what a request needs. Raised by :mod:`shim.pod.service`.

    Its status depends on the kernel's error, so each instance has its own.
    """

    def __init__(self, asked: str, *, found: str, do: str = "", status: int) -> None:
        super().__init__(asked, found=found, do=do)
        self.status = status


class StdioUnavailable(
    ShimError,
    code="NVSHIM-E1401",
    status=Status.FAILED_PRECONDITION,
    remedy="see that the client of containerd still runs, and that the file can be written",
):
    """A fifo, file or terminal cannot be opened. Raised by :mod:`shim.stdio`."""


# fmt: off
# -- E10xx: the verbs, the bundle, the socket ---------------------------------
InvalidInvocation = ShimError.row("NVSHIM-E1001 invalid-invocation", Status.INVALID_ARGUMENT,
    "Flags, or a request, that no containerd sends.")
InvalidIdentifier = ShimError.row("NVSHIM-E1002 invalid-identifier", Status.INVALID_ARGUMENT,
    "An id or namespace that could not safely become part of a path.")
RequestTooLarge = ShimError.row("NVSHIM-E1003 request-too-large", Status.RESOURCE_EXHAUSTED,
    "More on stdin than any containerd writes.")
SocketDirectoryUnusable = ShimError.row(
    "NVSHIM-E1005 socket-directory-unusable", Status.FAILED_PRECONDITION,
    "No directory for sockets that is ours alone.")
SocketPathTooLong = ShimError.row("NVSHIM-E1006 socket-path-too-long", Status.INVALID_ARGUMENT,
    "A socket's path does not fit the kernel's address.")
SocketUnavailable = ShimError.row("NVSHIM-E1007 socket-unavailable", Status.UNAVAILABLE,
    "The socket could not be made or reached.",
    remedy="see who owns the directory of sockets, and whether its file system is full")
ServerNotStarted = ShimError.row("NVSHIM-E1008 server-not-started", Status.UNAVAILABLE,
    "The process for the shim could not be set up.")
ContainerdNotFound = ShimError.row("NVSHIM-E0700 containerd-not-found", Status.UNAVAILABLE,
    "No containerd listens at the address that a fork server was started for.")
ProcessContextDiffers = ShimError.row(
    "NVSHIM-E0701 process-context-differs", Status.FAILED_PRECONDITION,
    "The namespaces, cgroup, limits or rights of a fork server are not containerd's.")
ShimCgroupUnusable = ShimError.row("NVSHIM-E1009 shim-cgroup-unusable", Status.FAILED_PRECONDITION,
    "The cgroup that ``ShimCgroup`` names cannot be joined.",
    remedy="name a cgroup that exists, or leave ShimCgroup out of the handler's options")
CoreSchedulingUnavailable = ShimError.row(
    "NVSHIM-E1010 core-scheduling-unavailable", Status.FAILED_PRECONDITION,
    "``SCHED_CORE`` is set and the kernel refuses.")
HandlerOptionsMalformed = ShimError.row(
    "NVSHIM-E1012 handler-options-malformed", Status.INVALID_ARGUMENT,
    "Stdin does not contain runtime options.")
FeaturesUnknown = ShimError.row("NVSHIM-E1013 features-unknown", Status.UNIMPLEMENTED,
    "A low-level runtime does not report its features.",
    remedy="update the low-level runtime: runc 1.1 and crun 1.8 say what they can do")

# -- E11xx: mounts --------------------------------------------------------------------------
# Not UNIMPLEMENTED, after which containerd 2 assumes an older shim and repeats the call.
MountOptionUnsupported = ShimError.row(
    "NVSHIM-E1101 mount-option-unsupported", Status.INVALID_ARGUMENT,
    "This shim does not support a mount option.")
MountOptionsTooLong = ShimError.row("NVSHIM-E1102 mount-options-too-long", Status.INVALID_ARGUMENT,
    "The mount options do not fit into one page, the limit of mount(2).")
MountTargetUnusable = ShimError.row(
    "NVSHIM-E1104 mount-target-unusable", Status.FAILED_PRECONDITION,
    "The mount target is a link, or not a directory.",
    remedy="use an image with a directory there")
MountMappingInvalid = ShimError.row("NVSHIM-E1106 mount-mapping-invalid", Status.INVALID_ARGUMENT,
    "``uidmap`` or ``gidmap`` is not a mapping, or one of the two is missing.")

# -- E12xx: the low-level runtime -----------------------------------------------------------
RuntimeMisbehaved = ShimError.row("NVSHIM-E1204 runtime-misbehaved", Status.INTERNAL,
    "A runtime reported success but did not do its work.")
SystemdNotRunning = ShimError.row("NVSHIM-E1206 systemd-not-running", Status.FAILED_PRECONDITION,
    "systemd should create the cgroups, but is not running.")
ContainerLeft = ShimError.row("NVSHIM-E1207 container-left", Status.INTERNAL,
    "A runtime reports that it has deleted a container, but still has it.")

# -- E13xx: the state of tasks and processes ------------------------------------------------
TaskExists = ShimError.row("NVSHIM-E1302 task-exists", Status.ALREADY_EXISTS,
    "A task of that id is there already.")
ProcessNotFound = ShimError.row("NVSHIM-E1303 process-not-found", Status.NOT_FOUND,
    "No exec of that id in the container.")
ProcessExists = ShimError.row("NVSHIM-E1304 process-exists", Status.ALREADY_EXISTS,
    "An exec of that id is there already.")
WrongProcessState = ShimError.row("NVSHIM-E1306 wrong-process-state", Status.FAILED_PRECONDITION,
    "What is asked cannot be done to a process in its state.",
    remedy="wait until the operation before this one is done, and try again")
KilledWhileStarting = ShimError.row("NVSHIM-E1310 killed-while-starting", Status.ABORTED,
    "A container, or an exec, was killed or deleted while its Create or Start was under way.")
InvalidSignal = ShimError.row("NVSHIM-E1307 invalid-signal", Status.INVALID_ARGUMENT,
    "A number that is no signal's.")

# -- E14xx: stdio ---------------------------------------------------------------------------
# Not UNIMPLEMENTED, like E1101.
StdioUnsupported = ShimError.row("NVSHIM-E1402 stdio-unsupported", Status.INVALID_ARGUMENT,
    "This shim does not support the scheme of a stdio URI.")
InvalidLogUri = ShimError.row("NVSHIM-E1403 invalid-log-uri", Status.INVALID_ARGUMENT,
    "A logger's URI cannot be parsed.")
LoggerNotAllowed = ShimError.row("NVSHIM-E1404 logger-not-allowed", Status.PERMISSION_DENIED,
    "The operator does not allow a logger.")
LoggerFailed = ShimError.row("NVSHIM-E1405 logger-failed", Status.FAILED_PRECONDITION,
    "A logger exited, or closed its output, before it was ready.")
# Not DEADLINE_EXCEEDED: that is what a caller makes of a shim that does not answer.
LoggerNotReady = ShimError.row("NVSHIM-E1406 logger-not-ready", Status.FAILED_PRECONDITION,
    "A logger did not become ready in time.")
StdioTimeout = ShimError.row("NVSHIM-E1407 stdio-timeout", Status.FAILED_PRECONDITION,
    "The file system of a log or input file does not answer.")

# -- E150x: cgroups: statistics, limits ------------------------------------------------------
CgroupNotFound = ShimError.row("NVSHIM-E1501 cgroup-not-found", Status.NOT_FOUND,
    "The container has no cgroup of its own, or it is gone.")
InvalidResources = ShimError.row("NVSHIM-E1502 invalid-resources", Status.INVALID_ARGUMENT,
    "The limits are malformed.")

# -- E17xx: the worker -----------------------------------------------------------------------
# Not DEADLINE_EXCEEDED: that is what a caller makes of a shim that does not answer.
WorkerTimeout = ShimError.row("NVSHIM-E1701 worker-timeout", Status.UNAVAILABLE,
    "Preparing a container took too long, and was stopped.")
WorkerFailed = ShimError.row("NVSHIM-E1702 worker-failed", Status.INTERNAL,
    "The process that prepares a container exited without an answer, or because of a bug.",
    remedy="create the container again; if that fails too, report this with containerd's log")
