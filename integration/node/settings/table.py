"""The table of the device plugin's settings, for flags, the file, the checks and the documentation.

Rules
- Keys, flags, variables and defaults are those of NVIDIA's plugin. Only the default of
  deviceListStrategy differs: containers receive devices by CDI names in the kubelet's response,
  which no container can forge, instead of by a variable.
- A row without a field of :class:`~integration.node.values.resources.Settings` is either a part of
  sharing, or accepted without effect; then its text states the reason.
- The default of a setting is the default of its field.

Source: k8s-device-plugin cmd/nvidia-device-plugin/main.go and api/config/v1 (config.go, flags.go,
sharing.go, replicas.go, resources.go, imex.go).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from integration.node.settings.readers import (
    BOOLEAN,
    CHANNELS,
    DEVICES,
    DIRECTORY,
    IGNORED,
    LAYOUT_VERSION,
    PREFIX,
    REPLICAS,
    RESOURCE_NAME,
    SLICING,
    STRATEGIES,
    Kind,
    Place,
    known_key,
    one_of,
)
from integration.node.values.resources import Allocation, DeviceIds, Mig, Settings, SharedResource


class Override(NamedTuple):
    """A value from the command line or the environment."""

    path: str  # the key that it sets
    origin: str  # "--mig-strategy", "MIG_STRATEGY"
    words: tuple[str, ...]  # the raw values; several for a repeated flag


@dataclass(frozen=True, slots=True)
class Setting:
    """A key of the configuration file, and the flag that sets it."""

    path: str  # the key
    field: str  # the field of Settings; "" for none
    kind: Kind  # its type
    text: str = ""  # what it does; if it does nothing, why
    name: str = ""  # the flag without its dashes; "" for none
    variables: tuple[str, ...] = ()  # environment variables; the first that is set wins
    aliases: tuple[str, ...] = ()  # other names of the flag
    # for a setting that changes nothing: the value that needs no note; otherwise None
    neutral: Any = None
    repeated: bool = False  # whether the flag may be repeated

    @property
    def ignored(self) -> bool:
        """Whether the key is accepted without effect."""
        return self.kind is IGNORED

    @property
    def help(self) -> str:
        """The help text of the flag."""
        if self.neutral is not None:
            return f"Changes nothing: {self.text}."
        default = getattr(Settings(), self.field) if self.field else ""
        if isinstance(default, tuple):
            default = ",".join(map(str, default))
        if self.path == "flags.nvidiaDevRoot":
            default = "/"
        return f"{self.text}  [default: {default}]" if default not in {"", False} else self.text


def _ignored(
    path: str, why: str, name: str = "", *variables: str, alias: str = "", repeated: bool = False
) -> Setting:
    return Setting(
        path, "", IGNORED, why, name, variables, (alias,) if alias else (), repeated=repeated
    )


_RESOURCE_KEYS: Final = {
    "name": RESOURCE_NAME.read,
    "rename": lambda value, at: RESOURCE_NAME.read(value, at) if value != "" else "",
    "devices": DEVICES.read,
    "replicas": REPLICAS.read,
}


def _read_resources(value: Any, at: Place) -> tuple[SharedResource, ...]:
    if not isinstance(value, list) or not value:
        at.fail(value, "a list of resources, each with name and replicas")
    resources = tuple(_read_resource(entry, at.entry(number)) for number, entry in enumerate(value))
    for number, resource in enumerate(resources):
        _check_names(resource, resources[:number], at.entry(number))
    return resources


def _check_names(resource: SharedResource, before: Sequence[SharedResource], at: Place) -> None:
    """Check that an entry has a resource name and devices that no earlier entry has."""
    alike = [each for each in before if each.name == resource.name]
    taken = {each.name for each in before} | {each.rename for each in before} - {""}
    if not alike and resource.name in taken:
        at.key("name").fail(resource.name, _UNUSED)
    if resource.rename in taken:
        at.key("rename").fail(resource.rename, _UNUSED)
    if not all(each.devices and each.rename for each in (*alike, resource) if alike):
        at.key("name").fail(
            resource.name,
            f"{_UNUSED}; or set devices and rename in each entry with this name",
        )
    for each in alike:
        if both := {*(each.devices or ())} & {*(resource.devices or ())}:
            at.key("devices").fail(min(both), "in one entry only")


_UNUSED: Final = "a name that no other entry uses"


def _read_resource(value: Any, at: Place) -> SharedResource:
    if not isinstance(value, dict):
        at.fail(value, "an object with name and replicas")
    known: dict[str, Any] = {}
    for key, entry in value.items():
        name = known_key(key, _RESOURCE_KEYS, at, PARENTS)
        if name is not None and entry is not None:
            known[name] = _RESOURCE_KEYS[name](entry, at.key(name))
    for needed in ("name", "replicas"):
        if needed not in known:
            at.key(needed).fail(None, "set")
    devices, count = known.get("devices", (None, None))
    return SharedResource(known["name"], known["replicas"], known.get("rename", ""), devices, count)


_RESOURCES: Final = Kind(_read_resources)

# fmt: off
_TABLE: Final = (
    Setting("version", "", LAYOUT_VERSION),
    Setting("flags.migStrategy", "mig_strategy", one_of(Mig),
            "How to announce MIG devices.",
            "mig-strategy", ("MIG_STRATEGY",)),
    Setting("flags.failOnInitError", "fail_on_init_error", BOOLEAN,
            "the agent reports a missing driver and retries",
            "fail-on-init-error", ("FAIL_ON_INIT_ERROR",), neutral=False),
    Setting("flags.nvidiaDriverRoot", "driver_root", DIRECTORY,
            "driver-root of the configuration sets where the driver is",
            "nvidia-driver-root", ("NVIDIA_DRIVER_ROOT",), ("driver-root",), neutral=""),
    Setting("flags.nvidiaDevRoot", "dev_root", DIRECTORY,
            "The host's directory that contains dev, for --pass-device-specs.",
            "nvidia-dev-root", ("NVIDIA_DEV_ROOT",), ("dev-root",)),
    Setting("flags.plugin.passDeviceSpecs", "pass_device_specs", BOOLEAN,
            "Also pass device nodes to the kubelet.",
            "pass-device-specs", ("PASS_DEVICE_SPECS",)),
    Setting("flags.plugin.deviceListStrategy", "device_list_strategies", STRATEGIES,
            "How containers receive their devices; separate several with commas, or repeat.",
            "device-list-strategy", ("DEVICE_LIST_STRATEGY",), repeated=True),
    Setting("flags.plugin.deviceIDStrategy", "device_id_strategy", one_of(DeviceIds),
            "Identify devices by UUID or index.",
            "device-id-strategy", ("DEVICE_ID_STRATEGY",)),
    Setting("flags.plugin.sharedDevicesAllocationPolicy", "shared_devices_allocation_policy",
            one_of(Allocation),
            "Spread shares over the devices, or pack them on few.",
            "shared-devices-allocation-policy", ("SHARED_DEVICES_ALLOCATION_POLICY",)),
    Setting("flags.gdrcopyEnabled", "gdrcopy", BOOLEAN,
            "Give containers GDRCopy.",
            "gdrcopy-enabled", ("GDRCOPY_ENABLED",)),
    Setting("flags.gdsEnabled", "gds", BOOLEAN,
            "Give containers GPUDirect Storage.",
            "gds-enabled", ("GDS_ENABLED",)),
    Setting("flags.mofedEnabled", "mofed", BOOLEAN,
            "Give containers Mellanox's devices.",
            "mofed-enabled", ("MOFED_ENABLED",)),
    Setting("flags.plugin.cdiAnnotationPrefix", "cdi_annotation_prefix", PREFIX,
            "Prefix of the annotations of cdi-annotations.",
            "cdi-annotation-prefix", ("CDI_ANNOTATION_PREFIX",)),
    Setting("flags.mpsRoot", "mps_root", DIRECTORY,
            "The host's directory for MPS daemons.",
            "mps-root", ("MPS_ROOT",)),
    Setting("imex.channelIDs", "imex_channels", CHANNELS,
            "IMEX channels to give every container: 0, or none.",
            "imex-channel-ids", ("IMEX_CHANNEL_IDS",), repeated=True),
    Setting("imex.required", "imex_required", BOOLEAN,
            "Fail if an IMEX channel is missing.",
            "imex-required", ("IMEX_REQUIRED",)),
    *(
        Setting(f"sharing.{key}.{name}", "", kind)
        for key in ("timeSlicing", "mps")
        for name, kind in (
            ("renameByDefault", BOOLEAN), ("failRequestsGreaterThanOne", BOOLEAN),
            ("resources", _RESOURCES), ("strategy", SLICING),
        )
    ),
    _ignored("flags.deviceDiscoveryStrategy",
             "platform of the configuration sets how devices are found",
             "device-discovery-strategy", "DEVICE_DISCOVERY_STRATEGY"),
    _ignored("flags.plugin.nvidiaCTKPath", "this product uses no CDI hooks",
             "nvidia-cdi-hook-path", "NVIDIA_CDI_HOOK_PATH", "NVIDIA_CTK_PATH",
             alias="nvidia-ctk-path"),
    _ignored("flags.plugin.containerDriverRoot",
             "the agent finds the driver below the node's root as it is mounted",
             "driver-root-ctr-path", "DRIVER_ROOT_CTR_PATH", "CONTAINER_DRIVER_ROOT",
             alias="container-driver-root"),
    _ignored("flags.plugin.cdiFeatureFlags", "they configure NVIDIA's generator of CDI specs",
             "cdi-feature-flags", "CDI_FEATURE_FLAGS", repeated=True),
    _ignored("flags.plugin.cdiDisableHooks", "this product uses no CDI hooks",
             "cdi-disable-hooks", "CDI_DISABLE_HOOKS", repeated=True),
    _ignored("flags.gfd", "it configures gpu-feature-discovery"),
    _ignored("flags.useNodeFeatureAPI", "it configures gpu-feature-discovery"),
    _ignored("flags.restartOnDeviceUnhealthy", "a device recovers without a restart"),
    _ignored("resources", "NVIDIA's plugin ignores it as well; sharing can rename a resource"),
)
# fmt: on

SETTINGS: Final = {setting.path: setting for setting in _TABLE}
"""Every key of the file, by its path."""


def _parents() -> dict[str, list[str]]:
    """Return the objects that each key or object belongs to, by its name in lower case."""
    parents: dict[str, dict[str, None]] = {
        name: {"an entry of sharing.timeSlicing.resources": None} for name in _RESOURCE_KEYS
    }
    for path in SETTINGS:
        parent, _, name = path.rpartition(".")
        while name:
            at = parents.setdefault(name.casefold(), {})
            at[parent or "the top of the file"] = None
            parent, _, name = parent.rpartition(".")
    return {name: list(objects) for name, objects in parents.items()}


PARENTS: Final = _parents()
"""The objects that a key belongs to, by its name in lower case."""

FLAGS: Final = tuple(setting for setting in _TABLE if setting.name)
"""The settings that a flag or a variable can set, too."""
