"""Errors that stop an examination: E259x. Faults of the node itself are findings."""

from __future__ import annotations

from api.errors import Status
from integration.containers.errors import InspectionError
from integration.errors import IntegrationError


class DoctorError(IntegrationError):
    """Base of the errors that stop an examination."""


class RootNotFound(DoctorError, code="NVSHIM-E2590", status=Status.NOT_FOUND):
    """The path given as the node's root is not a directory."""


class CheckUnknown(DoctorError, code="NVSHIM-E2591", status=Status.INVALID_ARGUMENT):
    """No check has this code."""


class BundleNotWritten(DoctorError, code="NVSHIM-E2592", status=Status.FAILED_PRECONDITION):
    """The bundle could not be written. No partial file is left."""


class ManifestUnusable(DoctorError, code="NVSHIM-E2593", status=Status.INVALID_ARGUMENT):
    """The given file of Kubernetes manifests cannot be read."""


class CodeUnknown(InspectionError, code="NVSHIM-E2518", status=Status.NOT_FOUND):
    """No error and no check of the doctor has this code."""
