"""Errors of tools: E24xx, E26xx."""

from __future__ import annotations

from api.errors import Status
from integration.cri.errors import CriError
from integration.errors import IntegrationError


class ProgramNotAdapted(IntegrationError, code="NVSHIM-E2402", status=Status.FAILED_PRECONDITION):
    """A program of another release could not be adapted to its own libraries."""


class LauncherUnusable(IntegrationError, code="NVSHIM-E2404", status=Status.INVALID_ARGUMENT):
    """A launcher that the kernel cannot execute, or that cannot be written or compiled."""


class CheckFailed(IntegrationError, code="NVSHIM-E2470", status=Status.INTERNAL):
    """A check found a fault. The report lists it as failed."""


class CheckNotPossible(IntegrationError, code="NVSHIM-E2471", status=Status.FAILED_PRECONDITION):
    """A check is not possible on this machine. The report says why."""


# fmt: off
DemoFailed = IntegrationError.row("NVSHIM-E2401 demo-failed", Status.INTERNAL,
    "The demo's container did not see what it should.")
CriuUnusable = IntegrationError.row("NVSHIM-E2403 criu-unusable", Status.FAILED_PRECONDITION,
    "No available CRIU works with this kernel.")
StreamRefused = CriError.row("NVSHIM-E2423 stream-refused", Status.FAILED_PRECONDITION,
    "The streaming server refused the stream; the message quotes its answer.")
StreamBroken = CriError.row("NVSHIM-E2424 stream-broken", Status.DATA_LOSS,
    "A stream closed early, or violated the protocol.")
CniNotInstalled = CriError.row("NVSHIM-E2425 cni-not-installed", Status.FAILED_PRECONDITION,
    "A CNI plugin for the pods' network is not installed.")
ToolMissing = IntegrationError.row("NVSHIM-E2441 tool-missing", Status.FAILED_PRECONDITION,
    "A program that builds or runs virtual machines is not on the path.")
GuestNotBuilt = IntegrationError.row("NVSHIM-E2444 guest-not-built", Status.UNAVAILABLE,
    "A part of a guest could not be downloaded or created. Nothing of it is kept.")
MachineFailed = IntegrationError.row("NVSHIM-E2448 machine-failed", Status.INTERNAL,
    "The machine stopped before its job: the kernel panicked, or the emulator failed.")
MachineTimeout = IntegrationError.row("NVSHIM-E2449 machine-timeout", Status.DEADLINE_EXCEEDED,
    "The job timed out. The machine was killed.")
BundleNotBuilt = IntegrationError.row("NVSHIM-E2461 bundle-not-built", Status.FAILED_PRECONDITION,
    "An input of the bundle is missing, or could not be adapted.")
MachineUnfit = IntegrationError.row("NVSHIM-E2464 machine-unfit", Status.FAILED_PRECONDITION,
    "The machine cannot run containers: not root, no space, or no mounts.")
BlockMissing = IntegrationError.row("NVSHIM-E2691 block-missing", Status.FAILED_PRECONDITION,
    "A page has no place for a generated table.")
TreeNotBuilt = IntegrationError.row("NVSHIM-E2603 tree-not-built", Status.FAILED_PRECONDITION,
    "A build step of a tree or a package failed. The previous one is unchanged.")
LibraryMissing = IntegrationError.row("NVSHIM-E2604 library-missing", Status.FAILED_PRECONDITION,
    "A program of the tree needs a library that no package contains.")
ReleaseNotReady = IntegrationError.row("NVSHIM-E2605 release-not-ready", Status.FAILED_PRECONDITION,
    "A tagged commit is not ready for a release.")
SignatureFailed = IntegrationError.row("NVSHIM-E2606 signature-failed", Status.FAILED_PRECONDITION,
    "A release could not be signed, or its signature does not verify.")
