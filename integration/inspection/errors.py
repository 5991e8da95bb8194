"""Errors of reading and changing our configuration, and of names: the rest of E251x."""

from __future__ import annotations

from api.errors import Status
from integration.containers.errors import InspectionError

# fmt: off
SettingUnknown = InspectionError.row("NVSHIM-E2514 setting-unknown", Status.NOT_FOUND,
    "The configuration has no such key.")
SettingRefused = InspectionError.row("NVSHIM-E2515 setting-refused", Status.INVALID_ARGUMENT,
    "A key cannot have that value, or the file would not be valid with it.")
SettingsNotWritten = InspectionError.row(
    "NVSHIM-E2516 settings-not-written", Status.PERMISSION_DENIED,
    "The configuration file cannot be written. It is as it was.")
SettingsChanged = InspectionError.row("NVSHIM-E2517 settings-changed", Status.ABORTED,
    "Another program has changed the configuration file meanwhile. It was not overwritten.")
NameUnknown = InspectionError.row("NVSHIM-E2519 name-unknown", Status.NOT_FOUND,
    "No file of the driver and no package of that name is in the tables.")
