"""Errors of looking at a node: E251x."""

from __future__ import annotations

from api.errors import Status
from integration.errors import IntegrationError


class InspectionError(IntegrationError, code="NVSHIM-E2510"):
    """Base of what can go wrong while somebody looks at a node, or at our configuration."""


class ContainerUnknown(InspectionError, code="NVSHIM-E2511", status=Status.NOT_FOUND):
    """No running container is meant by what was given."""


class ContainerAmbiguous(InspectionError, code="NVSHIM-E2512", status=Status.INVALID_ARGUMENT):
    """More than one running container can be meant."""


class StateUnreadable(InspectionError, code="NVSHIM-E2513", status=Status.PERMISSION_DENIED):
    """containerd's state directory, or a process, may not be looked into."""


class SettingUnknown(InspectionError, code="NVSHIM-E2514", status=Status.NOT_FOUND):
    """The configuration has no such key."""


class SettingRefused(InspectionError, code="NVSHIM-E2515", status=Status.INVALID_ARGUMENT):
    """A key cannot have that value, or the file would not be valid with it."""


class SettingsNotWritten(InspectionError, code="NVSHIM-E2516", status=Status.PERMISSION_DENIED):
    """The configuration file cannot be written. It is as it was."""


class CodeUnknown(InspectionError, code="NVSHIM-E2518", status=Status.NOT_FOUND):
    """No error and no check of the doctor has that code."""


class SettingsChanged(InspectionError, code="NVSHIM-E2517", status=Status.ABORTED):
    """Somebody else has changed the configuration file meanwhile. It is as they left it."""
