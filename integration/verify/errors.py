"""Reasons why a node cannot be verified at all: E267x."""

from __future__ import annotations

from api.errors import Status
from integration.errors import IntegrationError


class VerifyError(IntegrationError):
    """Base of the errors that prevent a verification."""


class PodKept(
    VerifyError,
    code="NVSHIM-E2676",
    status=Status.FAILED_PRECONDITION,
    remedy="restart the engine (containers keep running), and run `nvshim verify` again, which "
    "removes such pods",
):
    """The engine does not remove a pod of this or an earlier verification.

    containerd 1.6 keeps a pod if the start of one of its containers was given up.
    """


# fmt: off
EngineMissing = VerifyError.row("NVSHIM-E2670 engine-missing", Status.NOT_FOUND,
    "No engine serves the CRI here, so no pod can be created.",
    remedy="start containerd or CRI-O, or name its socket with --cri-socket")
ImageMissing = VerifyError.row("NVSHIM-E2671 image-missing", Status.NOT_FOUND,
    "The engine has no image, and the pods need one that is already present.",
    remedy="run any pod once, so that the engine pulls the pause image")
ProbeMissing = VerifyError.row("NVSHIM-E2672 probe-missing", Status.NOT_FOUND,
    "The probe program that runs in the containers is missing from this installation.",
    remedy="install this version again; in a checkout, run `make setup`")
VerifyRunning = VerifyError.row("NVSHIM-E2673 verify-running", Status.ALREADY_EXISTS,
    "Another verification of this node is running; the two would remove each other's pods.",
    remedy="wait until it has finished")
VerifyUnusable = VerifyError.row("NVSHIM-E2674 verify-unusable", Status.FAILED_PRECONDITION,
    "The directory for the pods' logs cannot be used, or the caller is not root.",
    remedy="run it as root")
NothingVerified = VerifyError.row("NVSHIM-E2675 nothing-verified", Status.FAILED_PRECONDITION,
    "None of the requested checks can run on this node.")
