"""The CDI specs of what the device plugin gives, for any container runtime.

``DIRECTORY/k8s.device-plugin.nvidia.com-gpu.json``, and likewise -gds, -mofed, -gdrcopy and
-imex-channel, in the last of the configuration's spec directories. A runtime that knows CDI gives
by them what our shim gives of itself; our shim, told of an annotation, goes by them as well.

Rules
- They have the files of the usual driver capabilities, as far as these may be had: an engine gives
  all that a spec has, whatever the image asks for. What it names beyond them our shim adds.
- They have the names that NVIDIA's plugin gives them, and are of its kinds. A node has one device
  plugin, so whoever serves the kubelet has these files: those that NVIDIA's has left are replaced,
  as two files with the same devices would be a conflict, by which no container starts. A file of
  that name that is of another kind is somebody else's, and stays.
- A spec is written before the kubelet is told of its devices, in one step, and only if it differs.
- Whoever changes or removes one has it made anew: the directory is watched, and it is looked at
  before a container is given what only a spec tells of.
- It stays when the agent ends, since containers are started again by it, which no kubelet asks for
  anew. It is removed when nothing is given by CDI any more, or there is no driver.
- Version 0.5.0 of the specification is enough for them, so that every runtime that knows CDI can
  read them: there are no groups in them, as in NVIDIA's.

Source: CDI specification; NVIDIA Container Toolkit, pkg/nvcdi.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from typing import Final

from hooks.cdi import files, generating, schema
from hooks.cdi.errors import CdiNotGenerated
from hooks.cdi.spec import SpecFile
from hooks.config import Config
from hooks.errors import CdiError, DeviceNodeMissing, NoGpus, OutOfService
from hooks.node.inventory import Inventory
from hooks.words import DEFAULT_CAPABILITIES, Feature
from integration.agent_errors import PluginSpecUnwritten
from integration.cdi.writing import text_of
from integration.node.services.plugin.allocation import VENDOR
from integration.node.spec_files import put, still_true
from integration.node.values.resources import CDI, DeviceIds, Settings

KINDS: Final = ("gpu", Feature.GDS, Feature.MOFED, Feature.GDRCOPY, "imex-channel")
"""What there may be a spec of; the class of its kind is called so."""


@dataclass(frozen=True, slots=True)
class Specs:
    """What the specs have now."""

    devices: frozenset[str] = frozenset()  # the full names
    fault: str = ""  # why something of it could not be written; "" if all is well
    written: tuple[str, ...] = ()  # the paths of those that were written or removed this time


def directory_of(config: Config) -> str:
    """Where the specs are."""
    return config.cdi_spec_dirs[-1]


def state_of(config: Config) -> tuple[object, ...]:
    """What is another once a spec was written, replaced or removed."""

    def state(path: str) -> object:
        try:
            seen = os.stat(path)
        except OSError:
            return None
        return seen.st_dev, seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns

    return tuple(state(path_of(kind, config)) for kind in KINDS)


def path_of(kind: str, config: Config) -> str:
    """Where the spec of a kind, of :data:`KINDS`, is."""
    return os.path.join(directory_of(config), f"{VENDOR}-{kind}.json")


def keep_specs(settings: Settings, inventory: Inventory | None, config: Config) -> Specs:
    """Bring the specs up to date.

    Args:
        inventory: what the node has; None if there is no driver that can be used.

    Returns:
        What they have. What could not be written is not among it.
    """
    wanted = _wanted(settings)
    devices: set[str] = set()
    faults: list[str] = []
    written: list[str] = []
    for kind in KINDS:
        path = path_of(kind, config)
        try:
            spec, kept, whose = None, None, partial(_whose, kind, path)
            if inventory is not None and kind in wanted:
                kept = still_true(path, inventory, config, whose) if kind == "gpu" else None
                spec = kept[1] if kept else _spec(kind, settings, inventory, config)
            text = None if spec is None else text_of(schema.to_tree(spec), "json").encode()
            if put(path, kept[0] if kept else text, whose):
                written.append(path)
        except OSError as error:
            faults.append(str(_unwritten(path, error)))
        else:
            if spec is not None:
                devices.update(f"{spec.kind}={device.name}" for device in spec.devices)
    return Specs(frozenset(devices), "; ".join(faults), tuple(written))


def _wanted(settings: Settings) -> tuple[str, ...]:
    if CDI.isdisjoint(settings.device_list_strategies):
        return ()
    return ("gpu", *settings.features, *(["imex-channel"] if settings.imex_channels else []))


def _spec(kind: str, settings: Settings, inventory: Inventory, config: Config) -> SpecFile | None:
    """The spec of a kind; None if the node has nothing of it."""
    by_index = settings.device_id_strategy == DeviceIds.INDEX
    wish = generating.SpecOptions(
        kind=kind,
        vendor=VENDOR,
        class_=kind,
        strategies=("index",) if by_index else ("uuid",),
        capabilities=DEFAULT_CAPABILITIES.intersection(config.supported_capabilities),
        groups=False,
    )
    try:
        return generating.generate(wish, inventory, config)
    except (CdiNotGenerated, OutOfService, DeviceNodeMissing, NoGpus):
        return None


def _whose(kind: str, path: str, content: bytes) -> str:
    """What keeps a file from being replaced; one that says no kind is of no use to anybody."""
    try:
        tree = files.tree_of(content, path)
    except CdiError:
        return ""
    found = tree.get("kind") if isinstance(tree, dict) else None
    is_other = isinstance(found, str) and found not in {f"{VENDOR}/{kind}", ""}
    return f"it is a spec of {found}" if is_other else ""


def _unwritten(path: str, error: OSError) -> PluginSpecUnwritten:
    is_there = isinstance(error, FileExistsError)
    do = "" if is_there else "see who may write there, and whether there is space"
    return PluginSpecUnwritten(f"to keep {path}", found=error.strerror or str(error), do=do)
