"""The shim's errors: its branch of the tree in :mod:`api.errors`, and the leaves.

The docstring of each leaf says when it is raised, and where. Codes are never reused::

    ShimError
    ├── E10xx  the verbs, the bundle, the socket
    ├── E11xx  mounts
    ├── E12xx  the low-level runtime
    ├── E13xx  the state of tasks and processes
    ├── E14xx  stdio
    ├── E150x  cgroups: statistics, limits
    ├── E152x  checkpoint and restore (shim.checkpoint.errors)
    ├── E16xx  the sandbox (shim.sandbox.errors)
    └── E17xx  the worker

The verbs load this module, so it imports nothing but the root of the tree.
"""

from __future__ import annotations

import errno
from typing import Final

from api.errors import NvshimError, Status

# The root goes with its branch: who catches one often has to catch the other.
__all__ = ["NvshimError", "ShimError"]

SCARCE: Final = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOSPC, errno.EDQUOT}
)
"""The kernel's errors of resources that may be available again a moment later."""


def remedy_of(error: OSError, otherwise: str = "") -> str:
    """What can be done about an error of the kernel.

    Args:
        error: it.
        otherwise: what can be done if no resource is used up; by default the class's remedy.
    """
    if error.errno in SCARCE:
        return "look at the shim's limits and at what is full, and ask again"
    return otherwise


class ShimError(NvshimError):
    """Something about the shim process, a bundle, a runtime, a task or its stdio."""

    code = "NVSHIM-E1000"
    status = Status.UNKNOWN


# -- E10xx: the verbs, the bundle, the socket ---------------------------------


class InvalidInvocation(ShimError):
    """Flags, or a request, that no containerd sends.

    Raised by :func:`shim.verbs.invocation.parse`, by :mod:`shim.pod.service` and by the ``start``
    verb.
    """

    code = "NVSHIM-E1001"
    status = Status.INVALID_ARGUMENT


class InvalidIdentifier(ShimError):
    """An id or namespace that could not safely become part of a path.

    Raised by :func:`shim.files.check_id`.
    """

    code = "NVSHIM-E1002"
    status = Status.INVALID_ARGUMENT


class RequestTooLarge(ShimError):
    """More on stdin than any containerd writes. Raised by the ``start`` verb."""

    code = "NVSHIM-E1003"
    status = Status.RESOURCE_EXHAUSTED


class BundleUnusable(ShimError):
    """A file of the bundle is missing, unreadable or not what it has to be.

    Raised by :mod:`shim.bundle` and by readers of the spec.
    """

    code = "NVSHIM-E1004"
    status = Status.FAILED_PRECONDITION
    remedy = "delete the container and create it again"


class SocketDirectoryUnusable(ShimError):
    """No directory for sockets that is ours alone. Raised by :mod:`shim.sockets`."""

    code = "NVSHIM-E1005"
    status = Status.FAILED_PRECONDITION


class SocketPathTooLong(ShimError):
    """A socket's path does not fit the kernel's address. Raised by :func:`shim.sockets.path_of`."""

    code = "NVSHIM-E1006"
    status = Status.INVALID_ARGUMENT


class SocketUnavailable(ShimError):
    """The socket could not be made or reached. Raised by :mod:`shim.sockets`."""

    code = "NVSHIM-E1007"
    status = Status.UNAVAILABLE
    remedy = "see who owns the directory of sockets, and whether its file system is full"


class ServerNotStarted(ShimError):
    """The process for the shim could not be set up. Raised by the ``start`` verb."""

    code = "NVSHIM-E1008"
    status = Status.UNAVAILABLE


class ContainerdNotFound(ShimError):
    """No containerd listens at the address that a fork server was started for.

    Raised by :mod:`shim.forkserver.systemd_start`.
    """

    code = "NVSHIM-E0700"
    status = Status.UNAVAILABLE


class ProcessContextDiffers(ShimError):
    """The namespaces, cgroup, limits or rights of a fork server are not containerd's.

    Raised by :mod:`shim.forkserver.systemd_start`.
    """

    code = "NVSHIM-E0701"
    status = Status.FAILED_PRECONDITION


class ShimCgroupUnusable(ShimError):
    """The cgroup that ``ShimCgroup`` names cannot be joined. Raised by the ``start`` verb."""

    code = "NVSHIM-E1009"
    status = Status.FAILED_PRECONDITION
    remedy = "name a cgroup that exists, or leave ShimCgroup out of the handler's options"


class CoreSchedulingUnavailable(ShimError):
    """``SCHED_CORE`` is set and the kernel refuses. Raised by the ``start`` verb."""

    code = "NVSHIM-E1010"
    status = Status.FAILED_PRECONDITION


class HandlerOptionsMalformed(ShimError):
    """The runtime's options on stdin are no options. Raised by ``-info``."""

    code = "NVSHIM-E1012"
    status = Status.INVALID_ARGUMENT


class FeaturesUnknown(ShimError):
    """A low-level runtime does not say what it can do."""

    code = "NVSHIM-E1013"
    status = Status.UNIMPLEMENTED
    remedy = "update the low-level runtime: runc 1.1 and crun 1.8 say what they can do"


# -- E11xx: mounts --------------------------------------------------------------------------


class MountOptionUnsupported(ShimError):
    """A mount option that this shim does not implement. Raised by :mod:`shim.rootfs.mounts`."""

    # Not UNIMPLEMENTED: containerd 2 takes that for an older shim, and asks it once more as such.
    code = "NVSHIM-E1101"
    status = Status.INVALID_ARGUMENT


class MountOptionsTooLong(ShimError):
    """Mount options that do not fit the one page that mount(2) takes.

    Raised by :mod:`shim.rootfs.mounts`.
    """

    code = "NVSHIM-E1102"
    status = Status.INVALID_ARGUMENT


class MountFailed(ShimError):
    """The kernel refused a mount, or had not completed it in time."""

    code = "NVSHIM-E1103"
    status = Status.FAILED_PRECONDITION


class MountTargetUnusable(ShimError):
    """The mount target is a link, or not a directory. Raised by :mod:`shim.rootfs.mounts`."""

    code = "NVSHIM-E1104"
    status = Status.FAILED_PRECONDITION
    remedy = "use an image with a directory there"


class UnmountFailed(ShimError):
    """A mount is still there after all attempts, or umount(2) does not return."""

    code = "NVSHIM-E1105"
    status = Status.INTERNAL
    remedy = "see what still uses the mount (`fuser -m`), and end it"


class MountMappingInvalid(ShimError):
    """``uidmap`` and ``gidmap`` that are no mappings, or one without the other.

    Raised by :mod:`shim.rootfs.mounts`.
    """

    code = "NVSHIM-E1106"
    status = Status.INVALID_ARGUMENT


def runtime_failed(verb: str) -> str:
    """The preface of an error by which scripts know it: what containerd's own shim says.

    Source: containerd cmd/containerd-shim-runc-v2/process, runtimeError.
    """
    return f"OCI runtime {verb} failed: "


# -- E12xx: the low-level runtime -----------------------------------------------------------


class ProgramNotFound(ShimError):
    """A program that is not there or cannot be executed. Raised by :mod:`shim.children`."""

    # Not NOT_FOUND: as the answer to Delete or Kill, that means that the container is gone.
    code = "NVSHIM-E1201"
    status = Status.FAILED_PRECONDITION


class ProgramTimeout(ShimError):
    """A program did not end in time, and was killed. Raised by :func:`shim.children.run`."""

    code = "NVSHIM-E1202"
    status = Status.DEADLINE_EXCEEDED


class RuntimeFailed(ShimError):
    """runc or crun reported an error; ``found`` quotes it.

    Its status depends on that word, so it is the instance's.

    Args:
        verb: what the runtime was to do; its preface is containerd's own for that.
    """

    code = "NVSHIM-E1203"

    def __init__(
        self, asked: str, *, found: str, do: str = "", status: int, verb: str = ""
    ) -> None:
        super().__init__(asked, found=found, do=do)
        self.status = status
        self.preface = runtime_failed(verb) if verb else ""


class RuntimeMisbehaved(ShimError):
    """A runtime reported success and did not do its work. Raised by :mod:`shim.pod.creation`."""

    code = "NVSHIM-E1204"
    status = Status.INTERNAL


class InvalidRuntimeOptions(ShimError):
    """The handler's options cannot be understood."""

    code = "NVSHIM-E1205"
    status = Status.INVALID_ARGUMENT


class SystemdNotRunning(ShimError):
    """systemd is to make the cgroups and is not there. Raised by :mod:`shim.runtime.options`."""

    code = "NVSHIM-E1206"
    status = Status.FAILED_PRECONDITION


class ContainerLeft(ShimError):
    """A runtime says that it has deleted a container, and keeps it. Raised at Delete."""

    code = "NVSHIM-E1207"
    status = Status.INTERNAL


# -- E13xx: the state of tasks and processes ------------------------------------------------


class TaskNotFound(ShimError):
    """No task of that id in this shim."""

    code = "NVSHIM-E1301"
    status = Status.NOT_FOUND
    remedy = "see the tasks that there are: `ctr tasks list`, or `crictl ps`"


class TaskExists(ShimError):
    """A task of that id is there already. Raised by :mod:`shim.pod.service`."""

    code = "NVSHIM-E1302"
    status = Status.ALREADY_EXISTS


class ProcessNotFound(ShimError):
    """No exec of that id in the container. Raised by :mod:`shim.pod.container`."""

    code = "NVSHIM-E1303"
    status = Status.NOT_FOUND


class ProcessExists(ShimError):
    """An exec of that id is there already. Raised by :mod:`shim.pod.container`."""

    code = "NVSHIM-E1304"
    status = Status.ALREADY_EXISTS


class ProcessFinished(ShimError):
    """A signal for a process that has ended. Raised by :mod:`shim.pod.container`."""

    code = "NVSHIM-E1305"
    status = Status.NOT_FOUND
    remedy = "nothing: it has ended"


class WrongProcessState(ShimError):
    """What is asked cannot be done to a process in its state. Raised by :mod:`shim.pod.process`."""

    code = "NVSHIM-E1306"
    status = Status.FAILED_PRECONDITION
    remedy = "wait until the operation before this one is done, and try again"


class KilledWhileStarting(ShimError):
    """A container, or an exec, was killed or deleted while its Create or Start was under way.

    Raised by :mod:`shim.pod.creation` and :mod:`shim.pod.container`.
    """

    code = "NVSHIM-E1310"
    status = Status.ABORTED


class InvalidSignal(ShimError):
    """A number that is no signal's. Raised by :mod:`shim.pod.container`."""

    code = "NVSHIM-E1307"
    status = Status.INVALID_ARGUMENT


class SystemRefused(ShimError):
    """The kernel refused what a request needs. Raised by :mod:`shim.pod.service`.

    Its status depends on the kernel's word, so it is the instance's.
    """

    code = "NVSHIM-E1309"

    def __init__(self, asked: str, *, found: str, do: str = "", status: int) -> None:
        super().__init__(asked, found=found, do=do)
        self.status = status


# -- E14xx: stdio ---------------------------------------------------------------------------


class StdioUnavailable(ShimError):
    """A fifo, file or terminal cannot be opened. Raised by :mod:`shim.stdio`."""

    code = "NVSHIM-E1401"
    status = Status.FAILED_PRECONDITION
    remedy = "see that the client of containerd still runs, and that the file can be written"


class StdioUnsupported(ShimError):
    """A stdio URI of a scheme that this shim does not serve. Raised by :mod:`shim.stdio`."""

    # Not UNIMPLEMENTED, as E1101 is not.
    code = "NVSHIM-E1402"
    status = Status.INVALID_ARGUMENT


class InvalidLogUri(ShimError):
    """A logger's URI that cannot be understood. Raised by :mod:`shim.stdio.logger`."""

    code = "NVSHIM-E1403"
    status = Status.INVALID_ARGUMENT


class LoggerNotAllowed(ShimError):
    """A logger that the operator does not allow. Raised by :mod:`shim.stdio.logger`."""

    code = "NVSHIM-E1404"
    status = Status.PERMISSION_DENIED


class LoggerFailed(ShimError):
    """A logger that was not ready when it ended or closed. Raised by :mod:`shim.stdio.logger`."""

    code = "NVSHIM-E1405"
    status = Status.FAILED_PRECONDITION


class LoggerNotReady(ShimError):
    """A logger that did not become ready in time. Raised by :mod:`shim.stdio.logger`."""

    # Not DEADLINE_EXCEEDED: that is what a caller makes of a shim that does not answer.
    code = "NVSHIM-E1406"
    status = Status.FAILED_PRECONDITION


class StdioTimeout(ShimError):
    """The file system of a log or input file does not answer. Raised by :mod:`shim.stdio.files`."""

    code = "NVSHIM-E1407"
    status = Status.FAILED_PRECONDITION


# -- E150x: cgroups: statistics, limits ------------------------------------------------------


class CgroupNotFound(ShimError):
    """The container has no cgroup of its own, or it is gone. Raised by :mod:`shim.cgroup.stats`."""

    code = "NVSHIM-E1501"
    status = Status.NOT_FOUND


class InvalidResources(ShimError):
    """Limits that no runtime could understand. Raised by :mod:`shim.cgroup.resources`."""

    code = "NVSHIM-E1502"
    status = Status.INVALID_ARGUMENT


# -- E17xx: the worker -----------------------------------------------------------------------


class WorkerTimeout(ShimError):
    """Preparing a container took too long, and was stopped. Raised by :mod:`shim.work.worker`."""

    # Not DEADLINE_EXCEEDED: that is what a caller makes of a shim that does not answer.
    code = "NVSHIM-E1701"
    status = Status.UNAVAILABLE


class WorkerFailed(ShimError):
    """The process that prepares a container ended without an answer, or by a defect.

    Raised by :mod:`shim.work.worker`.
    """

    code = "NVSHIM-E1702"
    status = Status.INTERNAL
    remedy = "create the container again; if that fails too, report this with containerd's log"
