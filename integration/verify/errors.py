"""Reasons why a node cannot be verified at all: E267x."""

from __future__ import annotations

from api.errors import Status
from integration.errors import IntegrationError


class VerifyError(IntegrationError):
    """Base of the errors that prevent a verification."""


class EngineMissing(VerifyError, code="NVSHIM-E2670", status=Status.NOT_FOUND):
    """No engine serves the CRI here, so no pod can be created."""

    remedy = "start containerd or CRI-O, or name its socket with --cri-socket"


class ImageMissing(VerifyError, code="NVSHIM-E2671", status=Status.NOT_FOUND):
    """The engine has no image, and the pods need one that is already present."""

    remedy = "run any pod once, so that the engine pulls the pause image"


class ProbeMissing(VerifyError, code="NVSHIM-E2672", status=Status.NOT_FOUND):
    """The probe program that runs in the containers is missing from this installation."""

    remedy = "install this version again; in a checkout, run `make setup`"


class VerifyRunning(VerifyError, code="NVSHIM-E2673", status=Status.ALREADY_EXISTS):
    """Another verification of this node is running; the two would remove each other's pods."""

    remedy = "wait until it has finished"


class VerifyUnusable(VerifyError, code="NVSHIM-E2674", status=Status.FAILED_PRECONDITION):
    """The directory for the pods' logs cannot be used, or the caller is not root."""

    remedy = "run it as root"


class NothingVerified(VerifyError, code="NVSHIM-E2675", status=Status.FAILED_PRECONDITION):
    """None of the requested checks can run on this node."""
