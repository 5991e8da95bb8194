"""The kind of each command's document.

A document of ``-o json`` or ``-o yaml`` is an object with ``apiVersion``, ``kind`` and the keys of
its kind in docs/reference/nvshim.schema.json. The kind of a list ends in ``List``, and its objects
are in ``items``. Removing a key or changing its meaning raises the version.
"""

from __future__ import annotations

from typing import Final

API_VERSION: Final = "nvshim/v1"

ERROR: Final = "Error"
"""The document on stderr when a command fails."""
HOLDINGS: Final = "HoldingList"
HEALTH: Final = "HealthList"

KINDS: Final = {
    "list": "GpuList",
    "info": "NodeInfo",
    "ps": "ProcessList",
    "top": "Usage",
    "version": "Version",
    "explain": "Explanation",
    "doctor": "Examination",
    "verify": "Verification",
    "ledger list": HOLDINGS,
    "ledger check": "LedgerCheck",
    "ledger faults": "FaultList",
    "ledger claims": "ClaimList",
    "ledger release": "Released",
    "status": "InstallationStatus",
    "install": "Installation",
    "uninstall": "Uninstallation",
    "configure containerd": "EngineChange",
    "configure docker": "EngineChange",
    "configure crio": "EngineChange",
    "config show": "Settings",
    "config get": "Setting",
    "config set": "SettingChange",
    "config unset": "SettingChange",
    "config validate": "SettingsCheck",
    "node": "PluginSettings",
    "node-installer": "InstallerState",
    "devices create": "DeviceStepList",
    "cdi list": "CdiDeviceList",
    "cdi validate": "CdiCheckList",
    "drain": "Drain",
    "undrain": "Undrain",
    "reset": "Reset",
    "mig apply": "MigLayout",
    "mig diff": "MigDifference",
    "mig list": "MigLayoutList",
    "health list": HEALTH,
    "health clear": HEALTH,
    "simulate create": "SimulatedNode",
    "simulate show": "SimulatedNode",
    "simulate list": "SimulatedNodeList",
    "simulate scenarios": "ScenarioList",
}
"""By the command's words."""
