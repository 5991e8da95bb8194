"""What keeps a node from being verified at all: E267x."""

from __future__ import annotations

from api.errors import Status
from integration.errors import IntegrationError


class VerifyError(IntegrationError):
    """Base of what keeps a node from being verified."""


class EngineMissing(VerifyError, code="NVSHIM-E2670", status=Status.NOT_FOUND):
    """No engine serves the CRI here, so no pod can be made."""

    remedy = "start containerd or CRI-O, or name its socket with --cri-socket"


class ImageMissing(VerifyError, code="NVSHIM-E2671", status=Status.NOT_FOUND):
    """The engine has no image at all, and pods are made of one that is there."""

    remedy = "run any pod once, which has the engine get the image of pause containers"


class ProbeMissing(VerifyError, code="NVSHIM-E2672", status=Status.NOT_FOUND):
    """The program that runs in the containers is not where this installation has it."""

    remedy = "install that version again; in a checkout, run `make setup`"


class VerifyRunning(VerifyError, code="NVSHIM-E2673", status=Status.ALREADY_EXISTS):
    """Somebody verifies this node already; two would remove each other's pods."""

    remedy = "wait for its end"


class VerifyUnusable(VerifyError, code="NVSHIM-E2674", status=Status.FAILED_PRECONDITION):
    """There is no place for the logs of the pods, or whoever asks is not root."""

    remedy = "run it as root"


class NothingVerified(VerifyError, code="NVSHIM-E2675", status=Status.FAILED_PRECONDITION):
    """None of the checks that were asked for can be made on this node."""
