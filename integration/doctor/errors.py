"""What ends an examination: E259x. What is wrong with the node itself is a finding."""

from __future__ import annotations

from api.errors import Status
from integration.containers.errors import InspectionError
from integration.errors import IntegrationError


class DoctorError(IntegrationError):
    """Base of what ends an examination before it has an answer."""


class RootNotFound(DoctorError, code="NVSHIM-E2590", status=Status.NOT_FOUND):
    """What was named as the node's root is no directory."""


class CheckUnknown(DoctorError, code="NVSHIM-E2591", status=Status.INVALID_ARGUMENT):
    """There is no check with that code."""


class BundleNotWritten(DoctorError, code="NVSHIM-E2592", status=Status.FAILED_PRECONDITION):
    """The bundle could not be written. Nothing of it is left."""


class ManifestUnusable(DoctorError, code="NVSHIM-E2593", status=Status.INVALID_ARGUMENT):
    """A file of Kubernetes manifests that was named cannot be read."""


class CodeUnknown(InspectionError, code="NVSHIM-E2518", status=Status.NOT_FOUND):
    """No error and no check of the doctor has that code."""
