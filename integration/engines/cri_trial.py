"""Find out whether containerd's CRI plugins start with a configuration, before it restarts.

``containerd config dump`` exits with 0 even if a CRI plugin refuses the result. After the next
restart, the node then starts no pods. So a second containerd loads the plugins and exits.

Rules
- It reads only the CRI plugins' tables. Its directories and sockets are in a temporary directory,
  its stream server has a free port, and plugins that use the rest of the node are disabled.
- It exits by itself and serves nothing: containerd exits if a required plugin fails, and otherwise
  because its ttrpc address is a directory.
- Only what a plugin says about its configuration counts. Other errors may be due to what this
  containerd lacks.
- containerd 1 has one CRI plugin. containerd 2 has three: for containers, images and the service.

Source: containerd 1.6 and 1.7, cmd/containerd/command/main.go, services/server/server.go,
pkg/cri/cri.go (initCRIService), pkg/cri/config/config.go (ValidatePluginConfig); containerd 2.1,
plugins/cri/runtime/plugin.go, plugins/cri/images/plugin.go, plugins/cri/cri.go,
internal/cri/config/config.go (ValidateRuntimeConfig, ValidateImageConfig, ValidateServerConfig).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from integration import tomltext
from integration.engines.effective_config import CRI, IMAGES, Containerd, cri, handlers
from integration.engines.errors import EngineNotInstalled
from integration.engines.options import PLUGINS
from integration.engines.programs import run, temporary_directory

_PLUGIN: Final = PLUGINS[2]
"""containerd 1's plugin; in containerd 2 the plugin of this name is the CRI service."""
_TRANSFER: Final = "io.containerd.transfer.v1.local"
_RUNTIME: Final = "io.containerd.runtime.v2.task"

_DISABLED: Final = (
    "io.containerd.internal.v1.opt",  # creates /opt/containerd
    "io.containerd.internal.v1.restart",
    "io.containerd.monitor.container.v1.restart",
    "io.containerd.monitor.task.v1.cgroups",
    "io.containerd.monitor.v1.cgroups",
    # the snapshotters that mount, or use volumes
    "io.containerd.snapshotter.v1.aufs",
    "io.containerd.snapshotter.v1.blockfile",
    "io.containerd.snapshotter.v1.btrfs",
    "io.containerd.snapshotter.v1.devmapper",
    "io.containerd.snapshotter.v1.erofs",
    "io.containerd.snapshotter.v1.overlayfs",
    "io.containerd.snapshotter.v1.zfs",
)
_SNAPSHOTTER: Final = "native"  # only creates a directory
_FAULT: Final = re.compile(
    rf"load required plugin (?:{'|'.join(map(re.escape, (*CRI, IMAGES)))}):.*?"
    r"((?:invalid plugin config|invalid cri image config|failed to load base OCI spec from file"
    r"|invalid stream server configuration): .*)"
)


def cri_fault(containerd: Containerd, dump: Mapping[str, Any]) -> str:
    """Return why a CRI plugin refuses a configuration; empty if none does, or it is not tried.

    Args:
        containerd: the program.
        dump: what it reads, as of :meth:`Containerd.dump`.
    """
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
    """Return the configuration of a containerd that loads the CRI plugins and exits."""
    plugins: dict[str, Any] = dump["plugins"]
    table = dict(cri(dump))
    runtimes = {
        name: {**handler, "cni_conf_dir": ""} if handler.get("cni_conf_dir") else handler
        for name, handler in handlers(dump).items()
    }
    stream = {"stream_server_address": "127.0.0.1", "stream_server_port": "0"}
    # containerd creates this directory.
    cni = {**table.get("cni", {}), "conf_dir": os.path.join(directory, "cni")}
    table |= {"cni": cni, "containerd": {**table["containerd"], "runtimes": runtimes}}
    if IMAGES in plugins:
        images = {**plugins[IMAGES], "snapshotter": _SNAPSHOTTER, "runtime_platforms": {}}
        platforms = plugins.get(_RUNTIME, {}).get("platforms", [])
        unpacked = [{"platform": each, "snapshotter": _SNAPSHOTTER} for each in platforms]
        tried = {
            CRI[0]: table,
            IMAGES: images,
            _PLUGIN: {**plugins.get(_PLUGIN, {}), **stream},
            _TRANSFER: {"unpack_config": unpacked},  # the images plugin needs it
        }
        required = list(tried)
    else:
        table |= stream
        table["containerd"]["snapshotter"] = _SNAPSHOTTER
        tried, required = {_PLUGIN: table}, [_PLUGIN]
    return {
        "version": dump["version"],
        "root": os.path.join(directory, "root"),
        "state": os.path.join(directory, "state"),
        "required_plugins": required,
        "disabled_plugins": list(_DISABLED),
        "grpc": {"address": os.path.join(directory, "grpc.sock")},
        "ttrpc": {"address": os.path.join(directory, "ttrpc")},
        "plugins": {**tried, "io.containerd.nri.v1.nri": {"disable": True}},
    }


def _lines(table: Mapping[str, Any], *path: str) -> Iterator[str]:
    """Yield the lines of a table and those below it."""
    if path:
        yield f"[{tomltext.to_key(*path)}]"
    for key, value in table.items():
        if not _is_below(value):
            yield f"{tomltext.to_key(key)} = {tomltext.to_value(value)}"
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _lines(value, *path, key)
        elif _is_below(value):
            for each in value:
                yield f"[[{tomltext.to_key(*path, key)}]]"
                yield from _lines(each)


def _is_below(value: Any) -> bool:
    """Whether a value is a table, or an array of tables."""
    several = value if isinstance(value, list) else [value]
    return any(isinstance(each, dict) for each in several)
