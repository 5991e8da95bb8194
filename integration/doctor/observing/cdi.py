"""Read the node's CDI specs and find files and devices in them that no longer exist.

Source: CDI specification; hooks.cdi, the reader that the shim itself uses.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from typing import Final

from hooks.cdi.registry import Loaded, Registry
from hooks.cdi.spec import DeviceNode, Edits
from hooks.config import Config
from integration.doctor.facts import Cdi, CdiFile
from integration.doctor.places import Places

_DRIVER_FILE: Final = re.compile(r"/lib(?:cuda|nvidia-ml)\.so\.(\d+\.\d+(?:\.\d+)?)$")
_CHARACTER_DEVICES: Final = frozenset({"", "c", "u"})


def look_at_cdi(places: Places) -> Cdi:
    """Return the specs of the configured directories."""
    config = places.config()
    registry = Registry.of(config.cdi_spec_dirs)
    files = [_file(places, config, loaded) for loaded in registry.files]
    for fault in registry.faults:
        priority = next(
            (n for n, d in enumerate(registry.directories) if fault.path.startswith(d)), 0
        )
        files.append(
            CdiFile(places.within(fault.path), priority, fault.kind, fault=fault.error.found)
        )
    return Cdi(tuple(places.within(d) for d in registry.directories), tuple(files))


def _file(places: Places, config: Config, loaded: Loaded) -> CdiFile:
    spec = loaded.spec
    edits = [spec.edits, *(device.edits for device in spec.devices)]
    mounts = list(dict.fromkeys(m.host_path for each in edits for m in each.mounts if not m.kind))
    nodes = list(dict.fromkeys(node for each in edits for node in each.device_nodes))
    found = [_DRIVER_FILE.search(path) for path in mounts]
    return CdiFile(
        path=places.within(loaded.path),
        priority=loaded.priority,
        kind=spec.kind,
        devices=tuple(device.name for device in spec.devices),
        gone=tuple(dict.fromkeys((*_gone_hooks(places, edits), *_gone(places, config, mounts)))),
        wrong_nodes=tuple(_wrong(places, config, nodes)),
        drivers=tuple(sorted({match[1] for match in found if match})),
    )


def _gone(places: Places, config: Config, paths: list[str]) -> Iterator[str]:
    return (path for path in paths if not os.path.exists(_host(places, config, path)))


def _gone_hooks(places: Places, edits: list[Edits]) -> Iterator[str]:
    # The shim does not run NVIDIA's hooks. But a missing hook program means that the toolkit was
    # removed, and other engines fail with such a spec.
    for each in edits:
        for hook in each.hooks:
            if not os.path.exists(places.at(hook.path)):
                yield hook.path


def _wrong(places: Places, config: Config, nodes: list[DeviceNode]) -> Iterator[str]:
    for node in nodes:
        path = node.host_path or node.path
        try:
            seen = os.stat(_host(places, config, path))
        except OSError as error:
            yield f"{path}: {error.strerror}"
            continue
        if node.kind not in _CHARACTER_DEVICES or not (node.major or node.minor):
            continue
        there = (os.major(seen.st_rdev), os.minor(seen.st_rdev))
        if not stat.S_ISCHR(seen.st_mode):
            yield f"{path}: it is not a character device"
        elif there != (node.major, node.minor):
            yield f"{path}: it is {there[0]}:{there[1]}, not {node.major}:{node.minor}"


def _host(places: Places, config: Config, path: str) -> str:
    """Return where this process finds a host path; a simulated node has its own /dev."""
    if path.startswith("/dev/") and config.dev != "/dev":
        return config.dev + path.removeprefix("/dev")
    return places.at(path)
