"""What can go wrong with a virtual machine.

Leaves of the tree in :mod:`api.errors`, beside those in :mod:`integration.errors`::

    IntegrationError
    └── VmError                 E244x
        ├── ToolMissing         E2441
        ├── GuestUnknown        E2442
        ├── KernelUnusable      E2443
        ├── RootNotBuilt        E2444
        ├── DiskNotBuilt        E2445
        ├── PythonNotPrepared   E2446
        ├── ShareMissing        E2447
        ├── MachineFailed       E2448
        └── MachineTimeout      E2449
"""

from __future__ import annotations

from api.errors import Status
from integration.errors import IntegrationError


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
