"""Find out whether containerd's CRI plugin starts with a configuration, before a restart does.

``containerd config dump`` exits with 0 also if the CRI plugin refuses what it dumps. After the next
restart, the node then starts no pods. So a second containerd loads the plugin and exits.

Rules
- It reads only the CRI plugin's table. Its directories and sockets are in a temporary directory,
  its stream server has a free port, and plugins that use the rest of the node are disabled.
- It exits by itself and serves nothing: containerd exits if a required plugin fails, and otherwise
  because its ttrpc address is a directory.
- Only what the plugin says about its configuration counts. Other errors may be due to what this
  containerd lacks.
- It is done with containerd 1, which gets no new plugins. What those of a later containerd 2 do
  when they start is not known.

Source: containerd 1.6 and 1.7, cmd/containerd/command/main.go, services/server/server.go,
pkg/cri/cri.go (initCRIService), pkg/cri/config/config.go (ValidatePluginConfig).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from integration import tomltext
from integration.engines.effective_config import Containerd, cri, handlers
from integration.engines.errors import EngineNotInstalled
from integration.engines.options import PLUGINS
from integration.engines.programs import run, temporary_directory

_PLUGIN: Final = PLUGINS[2]
_DISABLED: Final = (
    "io.containerd.internal.v1.opt",  # creates /opt/containerd
    "io.containerd.internal.v1.restart",
    "io.containerd.monitor.v1.cgroups",
    # the snapshotters that mount, or use volumes
    "io.containerd.snapshotter.v1.aufs",
    "io.containerd.snapshotter.v1.blockfile",
    "io.containerd.snapshotter.v1.btrfs",
    "io.containerd.snapshotter.v1.devmapper",
    "io.containerd.snapshotter.v1.overlayfs",
    "io.containerd.snapshotter.v1.zfs",
)
_FAULT: Final = re.compile(
    rf"load required plugin {re.escape(_PLUGIN)}:.*?"
    r"((?:invalid plugin config|failed to load base OCI spec from file): .*)"
)


def cri_fault(containerd: Containerd, dump: Mapping[str, Any]) -> str:
    """Return why the CRI plugin refuses a configuration; empty if it does not, or is not tried.

    Args:
        containerd: the program.
        dump: what it reads, as of :meth:`Containerd.dump`.
    """
    if containerd.merges:
        return ""
    with temporary_directory() as directory:
        path = os.path.join(directory, "config.toml")
        os.mkdir(os.path.join(directory, "ttrpc"))
        with open(path, "w", encoding="utf-8") as file:
            file.write("\n".join(_lines(_trial_config(directory, dump))))
        try:
            output = run([containerd.program, "--config", path]).stderr
        except EngineNotInstalled:
            return ""
    found = _FAULT.search(output)
    return found[1] if found else ""


def _trial_config(directory: str, dump: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of a containerd that loads the CRI plugin and exits."""
    table = dict(cri(dump))
    runtimes = {
        name: {**handler, "cni_conf_dir": ""} if handler.get("cni_conf_dir") else handler
        for name, handler in handlers(dump).items()
    }
    table |= {
        "stream_server_address": "127.0.0.1",
        "stream_server_port": "0",
        # containerd creates this directory.
        "cni": {**table.get("cni", {}), "conf_dir": os.path.join(directory, "cni")},
        # This snapshotter only creates a directory.
        "containerd": {**table["containerd"], "snapshotter": "native", "runtimes": runtimes},
    }
    return {
        "version": 2,
        "root": os.path.join(directory, "root"),
        "state": os.path.join(directory, "state"),
        "required_plugins": [_PLUGIN],
        "disabled_plugins": list(_DISABLED),
        "grpc": {"address": os.path.join(directory, "grpc.sock")},
        "ttrpc": {"address": os.path.join(directory, "ttrpc")},
        "plugins": {_PLUGIN: table, "io.containerd.nri.v1.nri": {"disable": True}},
    }


def _lines(table: Mapping[str, Any], *path: str) -> Iterator[str]:
    """Yield the lines of a table and those below it."""
    if path:
        yield f"[{tomltext.to_key(*path)}]"
    for key, value in table.items():
        if not isinstance(value, dict):
            yield f"{tomltext.to_key(key)} = {tomltext.to_value(value)}"
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _lines(value, *path, key)
