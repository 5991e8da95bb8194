"""Errors of reading and changing our configuration: the rest of E251x."""

from __future__ import annotations

from api.errors import Status
from integration.containers.errors import InspectionError


class SettingUnknown(InspectionError, code="NVSHIM-E2514", status=Status.NOT_FOUND):
    """The configuration has no such key."""


class SettingRefused(InspectionError, code="NVSHIM-E2515", status=Status.INVALID_ARGUMENT):
    """A key cannot have that value, or the file would not be valid with it."""


class SettingsNotWritten(InspectionError, code="NVSHIM-E2516", status=Status.PERMISSION_DENIED):
    """The configuration file cannot be written. It is as it was."""


class SettingsChanged(InspectionError, code="NVSHIM-E2517", status=Status.ABORTED):
    """Somebody else has changed the configuration file meanwhile. It is as they left it."""
