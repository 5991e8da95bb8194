"""What can go wrong with the device plugin.

Leaves of the tree in :mod:`api.errors`, below :class:`~integration.node.errors.NodeAgentError`::

    PluginError                     E2703-E2734
    └── SettingsError               E2720-E2729  what it is told to do
        ├── SettingsUnreadable      E2720  the file cannot be read
        ├── SettingsMalformed       E2721  it is neither YAML nor JSON
        ├── UnknownSetting          E2722  a key that means nothing
        ├── WrongSetting            E2723  a value that means nothing
        ├── SettingsConflict        E2724  two settings that exclude each other
        └── NoSettingsChosen        E2725  which of several files holds is not said
"""

from __future__ import annotations

from api.errors import Status
from integration.node.errors import NodeAgentError

__all__ = [
    "NoSettingsChosen",
    "PluginError",
    "SettingsConflict",
    "SettingsError",
    "SettingsMalformed",
    "SettingsUnreadable",
    "UnknownSetting",
    "WrongSetting",
]


class PluginError(NodeAgentError):
    """Base of what can go wrong with the device plugin."""


class SettingsError(PluginError):
    """Base of what can be wrong with its settings. Raised by :mod:`.settings`."""


class SettingsUnreadable(SettingsError):
    """The configuration file is not there, or cannot be read."""

    code = "NVSHIM-E2720"
    status = Status.NOT_FOUND


class SettingsMalformed(SettingsError):
    """The configuration file is neither YAML nor JSON, or of a version that is not known."""

    code = "NVSHIM-E2721"
    status = Status.INVALID_ARGUMENT


class UnknownSetting(SettingsError):
    """The configuration file has a key that means nothing: a setting that would be ignored."""

    code = "NVSHIM-E2722"
    status = Status.INVALID_ARGUMENT


class WrongSetting(SettingsError):
    """A value of the file, of a flag or of a variable is none that there is."""

    code = "NVSHIM-E2723"
    status = Status.INVALID_ARGUMENT


class SettingsConflict(SettingsError):
    """Two settings exclude each other."""

    code = "NVSHIM-E2724"
    status = Status.INVALID_ARGUMENT


class NoSettingsChosen(SettingsError):
    """There are several configurations, and none of them is chosen, or one that is not there."""

    code = "NVSHIM-E2725"
    status = Status.NOT_FOUND
