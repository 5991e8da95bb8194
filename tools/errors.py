"""What can go wrong in tools.

Leaves of the tree in :mod:`api.errors`, below :class:`~integration.errors.IntegrationError`::

    IntegrationError
    ├── DemoFailed             E2401  the demo
    ├── ProgramNotAdapted      E2402  programs of another release
    ├── CriuUnusable           E2403  no CRIU for this kernel
    ├── LauncherUnusable       E2404  the program that containerd executes
    ├── CriError               a client of the CRI, see integration.cri.errors
    │   ├── StreamRefused      E2423
    │   ├── StreamBroken       E2424
    │   └── CniNotInstalled    E2425
    ├── VmError                virtual machines
    │   ├── ToolMissing        E2441
    │   ├── GuestNotBuilt      E2444
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


class DemoFailed(IntegrationError, code="NVSHIM-E2401", status=Status.INTERNAL):
    """The demo's container did not see what it should. Raised by :mod:`tools.demo`."""


class ProgramNotAdapted(IntegrationError, code="NVSHIM-E2402", status=Status.FAILED_PRECONDITION):
    """A program of another release could not be made to run beside its own libraries."""


class CriuUnusable(IntegrationError, code="NVSHIM-E2403", status=Status.FAILED_PRECONDITION):
    """No CRIU at hand works with this kernel. Raised by :func:`tools.criu.find_criu`."""


class LauncherUnusable(IntegrationError, code="NVSHIM-E2404", status=Status.INVALID_ARGUMENT):
    """A launcher that the kernel could not execute, or that cannot be written or compiled."""


class StreamRefused(CriError, code="NVSHIM-E2423", status=Status.FAILED_PRECONDITION):
    """The streaming server does not open the stream; the message quotes it."""


class StreamBroken(CriError, code="NVSHIM-E2424", status=Status.DATA_LOSS):
    """A stream ended in the middle, or carried what it must not."""


class CniNotInstalled(CriError, code="NVSHIM-E2425", status=Status.FAILED_PRECONDITION):
    """A plugin that makes the pods' network is not on this machine."""


class VmError(IntegrationError):
    """Base of what making or running a virtual machine raises."""


class ToolMissing(VmError, code="NVSHIM-E2441", status=Status.FAILED_PRECONDITION):
    """A program that machines are made or run with is not on the path."""


class GuestNotBuilt(VmError, code="NVSHIM-E2444", status=Status.UNAVAILABLE):
    """A part of a guest could not be had or not be made. Nothing of it is kept."""


class MachineFailed(VmError, code="NVSHIM-E2448", status=Status.INTERNAL):
    """The machine ended and its job did not: the kernel panicked, or the emulator refused."""


class MachineTimeout(VmError, code="NVSHIM-E2449", status=Status.DEADLINE_EXCEEDED):
    """The job did not end in time. The machine was killed."""


class GpuBundleError(IntegrationError):
    """Base of what :mod:`tools.gpu` raises."""


class BundleNotBuilt(GpuBundleError, code="NVSHIM-E2461", status=Status.FAILED_PRECONDITION):
    """Something that the bundle is made of is missing, or could not be adapted."""


class MachineUnfit(GpuBundleError, code="NVSHIM-E2464", status=Status.FAILED_PRECONDITION):
    """A machine on which nothing can be run: not root, no room, no mounts."""


class CheckFailed(GpuBundleError, code="NVSHIM-E2470", status=Status.INTERNAL):
    """Something is not as it has to be. The report lists it as failed."""


class CheckNotPossible(GpuBundleError, code="NVSHIM-E2471", status=Status.FAILED_PRECONDITION):
    """Something cannot be found out on this machine. The report says why."""


class DocumentationError(IntegrationError):
    """Base of what can go wrong while the documentation is made."""


class BlockMissing(DocumentationError, code="NVSHIM-E2691", status=Status.FAILED_PRECONDITION):
    """A page has no place for the table that is generated into it. Raised by ``make reference``."""


class DistError(IntegrationError):
    """Base of what can go wrong while a tree is built."""


class TreeNotBuilt(DistError, code="NVSHIM-E2603", status=Status.FAILED_PRECONDITION):
    """A step of building a tree or a package failed. What stood there before is as it was."""


class LibraryMissing(DistError, code="NVSHIM-E2604", status=Status.FAILED_PRECONDITION):
    """A program of the tree needs a library that none of the packages has."""


class ReleaseNotReady(DistError, code="NVSHIM-E2605", status=Status.FAILED_PRECONDITION):
    """A tagged commit lacks what a release has to have. Raised by ``make release``."""


class SignatureFailed(DistError, code="NVSHIM-E2606", status=Status.FAILED_PRECONDITION):
    """A release could not be signed, or its signature does not verify."""
