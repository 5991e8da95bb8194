"""What can go wrong in tools: E24xx, E26xx."""

from __future__ import annotations

from api.errors import Status
from integration.cri.errors import CriError
from integration.errors import IntegrationError


class ProgramNotAdapted(IntegrationError, code="NVSHIM-E2402", status=Status.FAILED_PRECONDITION):
    """A program of another release could not be made to run beside its own libraries."""


class LauncherUnusable(IntegrationError, code="NVSHIM-E2404", status=Status.INVALID_ARGUMENT):
    """A launcher that the kernel could not execute, or that cannot be written or compiled."""


class CheckFailed(IntegrationError, code="NVSHIM-E2470", status=Status.INTERNAL):
    """Something is not as it has to be. The report lists it as failed."""


class CheckNotPossible(IntegrationError, code="NVSHIM-E2471", status=Status.FAILED_PRECONDITION):
    """Something cannot be found out on this machine. The report says why."""


# fmt: off
DemoFailed = IntegrationError.row("NVSHIM-E2401 demo-failed", Status.INTERNAL,
    "The demo's container did not see what it should.")
CriuUnusable = IntegrationError.row("NVSHIM-E2403 criu-unusable", Status.FAILED_PRECONDITION,
    "No CRIU at hand works with this kernel.")
StreamRefused = CriError.row("NVSHIM-E2423 stream-refused", Status.FAILED_PRECONDITION,
    "The streaming server does not open the stream; the message quotes it.")
StreamBroken = CriError.row("NVSHIM-E2424 stream-broken", Status.DATA_LOSS,
    "A stream ended in the middle, or carried what it must not.")
CniNotInstalled = CriError.row("NVSHIM-E2425 cni-not-installed", Status.FAILED_PRECONDITION,
    "A plugin that makes the pods' network is not on this machine.")
ToolMissing = IntegrationError.row("NVSHIM-E2441 tool-missing", Status.FAILED_PRECONDITION,
    "A program that machines are made or run with is not on the path.")
GuestNotBuilt = IntegrationError.row("NVSHIM-E2444 guest-not-built", Status.UNAVAILABLE,
    "A part of a guest could not be had or not be made. Nothing of it is kept.")
MachineFailed = IntegrationError.row("NVSHIM-E2448 machine-failed", Status.INTERNAL,
    "The machine ended and its job did not: the kernel panicked, or the emulator refused.")
MachineTimeout = IntegrationError.row("NVSHIM-E2449 machine-timeout", Status.DEADLINE_EXCEEDED,
    "The job did not end in time. The machine was killed.")
BundleNotBuilt = IntegrationError.row("NVSHIM-E2461 bundle-not-built", Status.FAILED_PRECONDITION,
    "Something that the bundle is made of is missing, or could not be adapted.")
MachineUnfit = IntegrationError.row("NVSHIM-E2464 machine-unfit", Status.FAILED_PRECONDITION,
    "A machine on which nothing can be run: not root, no room, no mounts.")
BlockMissing = IntegrationError.row("NVSHIM-E2691 block-missing", Status.FAILED_PRECONDITION,
    "A page has no place for the table that is generated into it.")
TreeNotBuilt = IntegrationError.row("NVSHIM-E2603 tree-not-built", Status.FAILED_PRECONDITION,
    "A step of building a tree or a package failed. What stood there before is as it was.")
LibraryMissing = IntegrationError.row("NVSHIM-E2604 library-missing", Status.FAILED_PRECONDITION,
    "A program of the tree needs a library that none of the packages has.")
ReleaseNotReady = IntegrationError.row("NVSHIM-E2605 release-not-ready", Status.FAILED_PRECONDITION,
    "A tagged commit lacks what a release has to have.")
SignatureFailed = IntegrationError.row("NVSHIM-E2606 signature-failed", Status.FAILED_PRECONDITION,
    "A release could not be signed, or its signature does not verify.")
