"""Errors that stop an examination: E259x. Faults of the node itself are findings."""

from __future__ import annotations

from api.errors import Status
from integration.containers.errors import InspectionError
from integration.errors import IntegrationError


class DoctorError(IntegrationError):
    """Base of the errors that stop an examination."""


# fmt: off
RootNotFound = DoctorError.row("NVSHIM-E2590 root-not-found", Status.NOT_FOUND,
    "The path given as the node's root is not a directory.")
CheckUnknown = DoctorError.row("NVSHIM-E2591 check-unknown", Status.INVALID_ARGUMENT,
    "No check has this code.")
BundleNotWritten = DoctorError.row("NVSHIM-E2592 bundle-not-written", Status.FAILED_PRECONDITION,
    "The bundle could not be written. No partial file is left.")
ManifestUnusable = DoctorError.row("NVSHIM-E2593 manifest-unusable", Status.INVALID_ARGUMENT,
    "The given file of Kubernetes manifests cannot be read.")
CodeUnknown = InspectionError.row("NVSHIM-E2518 code-unknown", Status.NOT_FOUND,
    "No error and no check of the doctor has this code.")
