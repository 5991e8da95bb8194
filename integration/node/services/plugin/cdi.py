"""The device plugin's CDI specs, for any container runtime.

The files are ``DIRECTORY/k8s.device-plugin.nvidia.com-gpu.json`` and the same with -gds, -mofed,
-gdrcopy and -imex-channel. DIRECTORY is the last of the configuration's spec directories. From
these files, a runtime with CDI support injects what our shim injects itself; our shim reads them
when it finds a CDI annotation.

Rules
- A device has one name by its index and one by its UUID, whatever ``deviceIDStrategy`` says. If
  that setting changes, existing containers keep their names, and need them at a restart.
- A spec contains the files of the default driver capabilities that the configuration supports. An
  engine injects everything in a spec, whatever the image requests. Our shim adds the files of
  further capabilities that the image names.
- File names and kinds are those of NVIDIA's plugin. A node runs one device plugin, so the plugin
  that serves the kubelet owns these files. The agent replaces files that NVIDIA's plugin left
  behind: two files with the same devices conflict, and then no container starts. A file with such
  a name but another kind belongs to another program and stays.
- The agent writes a spec before it announces the spec's devices to the kubelet, in one step, and
  only if the content differs.
- The kernel modules and files of the features may come after the agent has started, so the agent
  follows their device nodes, and the paths that are mounted.
- If someone changes or removes a spec, the agent writes it again: it watches the directory, and
  checks the files' identities before it answers Allocate.
- The specs stay when the agent stops: a container that restarts needs them, and the kubelet does
  not call Allocate again for it. The agent removes them when no strategy uses CDI, or when the
  node has no driver.
- The specs use only version 0.5.0 of the specification, so that every runtime with CDI support can
  read them. Like those of NVIDIA's plugin, they contain no groups.

Source: CDI specification; NVIDIA Container Toolkit, pkg/nvcdi.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Final

from api.values import dataclass
from hooks.cdi import files, generating, schema
from hooks.cdi.errors import CdiNotGenerated
from hooks.cdi.spec import SpecFile
from hooks.config import Config
from hooks.edits.features import FAMILIES, find_mount
from hooks.errors import CdiError, DeviceNodeMissing, NoGpus, OutOfService
from hooks.node.device_nodes import IMEX_DIRECTORY
from hooks.node.fingerprint import Fingerprint, read_names
from hooks.node.inventory import Inventory
from hooks.words import DEFAULT_CAPABILITIES, Feature
from integration.agent_errors import PluginSpecUnwritten, ServingError
from integration.cdi.writing import text_of
from integration.node.services.plugin.allocation import VENDOR
from integration.node.spec_files import put, still_true
from integration.node.values.resources import CDI, Settings
from integration.watcher import Interest

KINDS: Final = ("gpu", Feature.GDS, Feature.MOFED, Feature.GDRCOPY, "imex-channel")
"""The classes of the kinds that may have a spec."""

# The directory of a kind's nodes, and how their names start.
_FEATURE_NODES: Final = (
    *((each.directory, each.name) for kind in KINDS if kind in FAMILIES
      for each in FAMILIES[kind].nodes),
    (IMEX_DIRECTORY, "channel"),
)  # fmt: skip
_FEATURE_MOUNTS: Final = tuple(
    path for kind in KINDS if kind in FAMILIES for path in FAMILIES[kind].mounts
)


@dataclass(frozen=True, slots=True)
class Specs:
    """The current content of the specs."""

    devices: frozenset[str] = frozenset()  # full names
    fault: str = ""  # why a spec could not be written; "" if all are current
    written: tuple[str, ...] = ()  # paths that this call wrote or removed
    # the paths of the specs, and the identities of the files that were seen to have this content;
    # None while they are not known
    files: tuple[tuple[str, object], ...] | None = None

    @property
    def are_in_place(self) -> bool:
        """Whether the specs are still the files with this content. Needs one stat for each file."""
        if self.files is None:
            return False
        return all(_identity(path) == known for path, known in self.files if known is not None)


def directory_of(config: Config) -> str:
    """Return the directory of the specs."""
    return config.cdi_spec_dirs[-1]


def files_of(config: Config) -> tuple[tuple[str, object], ...]:
    """Return the paths of the specs, with values that change when a spec is written or removed."""
    paths = (path_of(kind, config) for kind in KINDS)
    return tuple((path, _identity(path)) for path in paths)


def feature_directories(inventory: Inventory | None, config: Config) -> dict[str, Interest]:
    """Return the directories where the features' device nodes and what they mount come and go.

    IMEX channels are among the features.

    Args:
        inventory: as for :func:`keep_specs`.
    """
    nodes = Interest(content=False)
    found = {_on_host(directory, config.dev): nodes for directory, _ in _FEATURE_NODES}
    names: dict[str, set[str]] = {}
    for root in _roots(inventory, config):
        for path in _FEATURE_MOUNTS:
            look = Fingerprint(root)
            host = look.resolve(path)
            # Including links on the way, and files that are missing.
            for place in (*(seen for _, seen in look.observations), *filter(None, [host])):
                directory, _, name = place.rpartition("/")
                names.setdefault(directory or "/", set()).add(name)
    return found | {
        directory: Interest(frozenset(each), content=False)
        for directory, each in names.items()
        if directory not in found
    }


def feature_files(inventory: Inventory | None, config: Config) -> tuple[tuple[str, object], ...]:
    """Return the features' device nodes, with values that change when a node is replaced.

    Also covers what the features mount, with its path on the host, and IMEX channels.
    """
    roots = _roots(inventory, config)
    mounts = ((path, find_mount(path, roots)) for path in _FEATURE_MOUNTS)
    return (*_feature_nodes(config.dev), *mounts)


def _roots(inventory: Inventory | None, config: Config) -> tuple[str, ...]:
    driver = () if inventory is None else (inventory.driver.root,)
    return tuple(dict.fromkeys((*driver, config.host_root)))


def _feature_nodes(dev: str) -> tuple[tuple[str, object], ...]:
    paths = (
        os.path.join(_on_host(directory, dev), name)
        for directory, start in _FEATURE_NODES
        for name in read_names(_on_host(directory, dev)) or ()
        if name.startswith(start)
    )
    return tuple((path, _identity(path)) for path in paths)


def _on_host(path: str, dev: str) -> str:
    return dev + path.removeprefix("/dev")


def _identity(path: str) -> object:
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def path_of(kind: str, config: Config) -> str:
    """Return the path of a spec, for a class in :data:`KINDS`."""
    return os.path.join(directory_of(config), f"{VENDOR}-{kind}.json")


def keep_specs(settings: Settings, inventory: Inventory | None, config: Config) -> Specs:
    """Bring the specs up to date.

    Args:
        inventory: the node's devices; None if there is no usable driver.

    Returns:
        The content of the specs, without those that could not be written.
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
                spec = kept[1] if kept else _spec(kind, inventory, config)
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


def _spec(kind: str, inventory: Inventory, config: Config) -> SpecFile | None:
    """Return the spec of a kind; None if the node has no such device or feature."""
    options = generating.SpecOptions(
        kind=kind,
        vendor=VENDOR,
        class_=kind,
        capabilities=DEFAULT_CAPABILITIES.intersection(config.supported_capabilities),
        groups=False,
    )
    try:
        return generating.generate(options, inventory, config)
    except (CdiNotGenerated, OutOfService, DeviceNodeMissing, NoGpus):
        return None


def _whose(kind: str, path: str, content: bytes) -> str:
    """Return why a file must stay; "" for ours and for one without a kind, which is useless."""
    try:
        tree = files.tree_of(content, path)
    except CdiError:
        return ""
    named = tree.get("kind") if isinstance(tree, dict) else None
    is_other = isinstance(named, str) and named not in {f"{VENDOR}/{kind}", ""}
    return f"it is a spec of kind {named}" if is_other else ""


def _unwritten(path: str, error: OSError) -> ServingError:
    is_there = isinstance(error, FileExistsError)
    do = "" if is_there else "check the directory's permissions and the free space"
    return PluginSpecUnwritten(f"to keep {path}", found=error.strerror or str(error), do=do)
