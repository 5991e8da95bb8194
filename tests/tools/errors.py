"""What can go wrong in tools.

Leaves of the tree in :mod:`api.errors`, below :class:`~integration.errors.IntegrationError`::

    IntegrationError
    ├── DemoFailed             E2401  the demo
    ├── ProgramNotAdapted      E2402  programs of another release
    ├── CriuUnusable           E2403  no CRIU for this kernel
    ├── CriError               a client of the CRI, see integration.cri.errors
    │   ├── StreamRefused      E2423
    │   ├── StreamBroken       E2424
    │   └── CniNotInstalled    E2425
    ├── VmError                virtual machines
    │   ├── ToolMissing        E2441
    │   ├── GuestUnknown       E2442
    │   ├── KernelUnusable     E2443
    │   ├── RootNotBuilt       E2444
    │   ├── DiskNotBuilt       E2445
    │   ├── PythonNotPrepared  E2446
    │   ├── ShareMissing       E2447
    │   ├── MachineFailed      E2448
    │   └── MachineTimeout     E2449
    ├── GpuBundleError         the bundle for machines with GPUs
    │   ├── BundleNotBuilt     E2461
    │   ├── MachineUnfit       E2464
    │   ├── CheckFailed        E2470  what a report lists
    │   └── CheckNotPossible   E2471
    ├── DistError              the builder of self-contained trees
    │   ├── TreeNotBuilt       E2603
    │   ├── LibraryMissing     E2604
    │   ├── ReleaseNotReady    E2605
    │   └── SignatureFailed    E2606
    └── DocumentationError     the documentation
        └── BlockMissing       E2691
"""

from __future__ import annotations

from api.errors import Status
from integration.cri.errors import CriError
from integration.errors import IntegrationError


class DemoFailed(IntegrationError):
    """The demo's container did not see what it should. Raised by :mod:`tests.tools.demo`."""

    code = "NVSHIM-E2401"
    status = Status.INTERNAL


class ProgramNotAdapted(IntegrationError):
    """A program of another release could not be made to run beside its own libraries."""

    code = "NVSHIM-E2402"
    status = Status.FAILED_PRECONDITION


class CriuUnusable(IntegrationError):
    """No CRIU at hand works with this kernel. Raised by :func:`tests.tools.criu.find_criu`."""

    code = "NVSHIM-E2403"
    status = Status.FAILED_PRECONDITION


class StreamRefused(CriError):
    """The streaming server does not open the stream; the message quotes it."""

    code = "NVSHIM-E2423"
    status = Status.FAILED_PRECONDITION


class StreamBroken(CriError):
    """A stream ended in the middle, or carried what it must not."""

    code = "NVSHIM-E2424"
    status = Status.DATA_LOSS


class CniNotInstalled(CriError):
    """A plugin that makes the pods' network is not on this machine."""

    code = "NVSHIM-E2425"
    status = Status.FAILED_PRECONDITION


class VmError(IntegrationError):
    """Base of what making or running a virtual machine raises."""


class ToolMissing(VmError):
    """A program that machines are made or run with is not on the path."""

    code = "NVSHIM-E2441"
    status = Status.FAILED_PRECONDITION


class GuestUnknown(VmError):
    """There is no guest of that name."""

    code = "NVSHIM-E2442"
    status = Status.INVALID_ARGUMENT


class KernelUnusable(VmError):
    """The kernel's package is not laid out, or its image not compressed, in a way known here."""

    code = "NVSHIM-E2443"
    status = Status.FAILED_PRECONDITION


class RootNotBuilt(VmError):
    """The guest's packages could not be had or not be installed. Nothing of the root is kept."""

    code = "NVSHIM-E2444"
    status = Status.UNAVAILABLE


class DiskNotBuilt(VmError):
    """The disk or the initial root could not be written. Nothing of it is kept."""

    code = "NVSHIM-E2445"
    status = Status.INTERNAL


class PythonNotPrepared(VmError):
    """The Python packages for the guest's interpreter could not be had, or not be compiled."""

    code = "NVSHIM-E2446"
    status = Status.UNAVAILABLE


class ShareMissing(VmError):
    """A directory that is to be shared with a machine is not there."""

    code = "NVSHIM-E2447"
    status = Status.NOT_FOUND


class MachineFailed(VmError):
    """The machine ended and its job did not: the kernel panicked, or the emulator refused."""

    code = "NVSHIM-E2448"
    status = Status.INTERNAL


class MachineTimeout(VmError):
    """The job did not end in time. The machine was killed."""

    code = "NVSHIM-E2449"
    status = Status.DEADLINE_EXCEEDED


class GpuBundleError(IntegrationError):
    """Base of what :mod:`tests.tools.gpu` raises."""


class BundleNotBuilt(GpuBundleError):
    """Something that the bundle is made of is missing, or could not be adapted."""

    code = "NVSHIM-E2461"
    status = Status.FAILED_PRECONDITION


class MachineUnfit(GpuBundleError):
    """A machine on which nothing can be run: not root, no room, no mounts."""

    code = "NVSHIM-E2464"
    status = Status.FAILED_PRECONDITION


class CheckFailed(GpuBundleError):
    """Something is not as it has to be. The report lists it as failed."""

    code = "NVSHIM-E2470"
    status = Status.INTERNAL


class CheckNotPossible(GpuBundleError):
    """Something cannot be found out on this machine. The report says why."""

    code = "NVSHIM-E2471"
    status = Status.FAILED_PRECONDITION


class DocumentationError(IntegrationError):
    """Base of what can go wrong while the documentation is made."""


class BlockMissing(DocumentationError):
    """A page has no place for the table that is generated into it. Raised by ``make reference``."""

    code = "NVSHIM-E2691"
    status = Status.FAILED_PRECONDITION


class DistError(IntegrationError):
    """Base of what can go wrong while a tree is built."""


class TreeNotBuilt(DistError):
    """A step of building a tree or a package failed. What stood there before is as it was."""

    code = "NVSHIM-E2603"
    status = Status.FAILED_PRECONDITION


class LibraryMissing(DistError):
    """A program of the tree needs a library that none of the packages has."""

    code = "NVSHIM-E2604"
    status = Status.FAILED_PRECONDITION


class ReleaseNotReady(DistError):
    """A tagged commit lacks what a release has to have. Raised by ``make release``."""

    code = "NVSHIM-E2605"
    status = Status.FAILED_PRECONDITION


class SignatureFailed(DistError):
    """A release could not be signed, or its signature does not verify."""

    code = "NVSHIM-E2606"
    status = Status.FAILED_PRECONDITION
