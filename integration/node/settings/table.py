"""Every setting of the device plugin: the one table that flags, file, checks and documentation use.

Rules
- Keys, flags, variables and defaults are those of NVIDIA's plugin. Only the default of the device
  list differs: containers get devices by CDI names in the kubelet's answer, which no container can
  forge, and not by a variable.
- A row without a field of :class:`~integration.node.values.resources.Settings` is either a part of
  sharing, or accepted and without a meaning here; then its text says why.
- The default of a setting is that of its field.

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


class Given(NamedTuple):
    """A value from the command line or the environment."""

    path: str  # of the key that it stands for
    origin: str  # "--mig-strategy", "MIG_STRATEGY"
    words: tuple[str, ...]  # as they were given; several for a flag that may be repeated


@dataclass(frozen=True, slots=True)
class Setting:
    """A key of the configuration file, and the flag that stands for it."""

    path: str  # the key
    field: str  # of Settings; "" for none
    kind: Kind  # what it may be
    text: str = ""  # what it does; if it does nothing, why
    name: str = ""  # the flag without its dashes; "" for none
    variables: tuple[str, ...] = ()  # of the environment, the first of which that is set counts
    aliases: tuple[str, ...] = ()  # other names of the flag
    # of one that changes nothing, the value that needs no note; None for any other
    heeded: Any = None
    repeated: bool = False  # whether the flag may be given several times

    @property
    def ignored(self) -> bool:
        """Whether it is accepted and means nothing here."""
        return self.kind is IGNORED

    @property
    def help(self) -> str:
        """For the command line."""
        if self.heeded is not None:
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


_OF_RESOURCE: Final = {
    "name": RESOURCE_NAME.read,
    "rename": lambda value, at: RESOURCE_NAME.read(value, at) if value != "" else "",
    "devices": DEVICES.read,
    "replicas": REPLICAS.read,
}


def _read_resources(value: Any, at: Place) -> tuple[SharedResource, ...]:
    if not isinstance(value, list) or not value:
        at.fail(value, "a list of resources, each with name and replicas")
    found = tuple(_read_resource(entry, at.entry(number)) for number, entry in enumerate(value))
    for number, resource in enumerate(found):
        _check_names(resource, found[:number], at.entry(number))
    return found


def _check_names(resource: SharedResource, before: Sequence[SharedResource], at: Place) -> None:
    """See that an entry makes a resource of its own, of devices of its own."""
    alike = [each for each in before if each.name == resource.name]
    taken = {each.name for each in before} | {each.rename for each in before} - {""}
    if not alike and resource.name in taken:
        at.key("name").fail(resource.name, _UNUSED)
    if resource.rename in taken:
        at.key("rename").fail(resource.rename, _UNUSED)
    if not all(each.devices and each.rename for each in (*alike, resource) if alike):
        at.key("name").fail(
            resource.name,
            f"{_UNUSED}; or give each entry of it a list of devices and a rename",
        )
    for each in alike:
        if both := {*(each.devices or ())} & {*(resource.devices or ())}:
            at.key("devices").fail(min(both), "in one entry only")


_UNUSED: Final = "a name that is not in the list already"


def _read_resource(value: Any, at: Place) -> SharedResource:
    if not isinstance(value, dict):
        at.fail(value, "an object with name and replicas")
    known: dict[str, Any] = {}
    for key, given in value.items():
        name = known_key(key, _OF_RESOURCE, at, PARENTS)
        if name is not None and given is not None:
            known[name] = _OF_RESOURCE[name](given, at.key(name))
    for needed in ("name", "replicas"):
        if needed not in known:
            at.key(needed).fail(None, "there")
    devices, count = known.get("devices", (None, None))
    return SharedResource(known["name"], known["replicas"], known.get("rename", ""), devices, count)


_RESOURCES: Final = Kind(_read_resources)

# fmt: off
_TABLE: Final = (
    Setting("version", "", LAYOUT_VERSION),
    Setting("flags.migStrategy", "mig_strategy", one_of(Mig),
            "How MIG devices are told of.",
            "mig-strategy", ("MIG_STRATEGY",)),
    Setting("flags.failOnInitError", "fail_on_init_error", BOOLEAN,
            "a driver that is not there is said, and waited for",
            "fail-on-init-error", ("FAIL_ON_INIT_ERROR",), heeded=False),
    Setting("flags.nvidiaDriverRoot", "driver_root", DIRECTORY,
            "driver-root of the configuration says where the driver is",
            "nvidia-driver-root", ("NVIDIA_DRIVER_ROOT",), ("driver-root",), heeded=""),
    Setting("flags.nvidiaDevRoot", "dev_root", DIRECTORY,
            "The host's directory of dev, for --pass-device-specs.",
            "nvidia-dev-root", ("NVIDIA_DEV_ROOT",), ("dev-root",)),
    Setting("flags.plugin.passDeviceSpecs", "pass_device_specs", BOOLEAN,
            "The kubelet is told the device nodes as well.",
            "pass-device-specs", ("PASS_DEVICE_SPECS",)),
    Setting("flags.plugin.deviceListStrategy", "device_list_strategies", STRATEGIES,
            "How a container is told what it has; several, with commas or one by one.",
            "device-list-strategy", ("DEVICE_LIST_STRATEGY",), repeated=True),
    Setting("flags.plugin.deviceIDStrategy", "device_id_strategy", one_of(DeviceIds),
            "What devices are called there.",
            "device-id-strategy", ("DEVICE_ID_STRATEGY",)),
    Setting("flags.plugin.sharedDevicesAllocationPolicy", "shared_devices_allocation_policy",
            one_of(Allocation),
            "Which shares of devices are preferred.",
            "shared-devices-allocation-policy", ("SHARED_DEVICES_ALLOCATION_POLICY",)),
    Setting("flags.gdrcopyEnabled", "gdrcopy", BOOLEAN,
            "Containers get GDRCopy.",
            "gdrcopy-enabled", ("GDRCOPY_ENABLED",)),
    Setting("flags.gdsEnabled", "gds", BOOLEAN,
            "Containers get GPUDirect Storage.",
            "gds-enabled", ("GDS_ENABLED",)),
    Setting("flags.mofedEnabled", "mofed", BOOLEAN,
            "Containers get Mellanox's devices.",
            "mofed-enabled", ("MOFED_ENABLED",)),
    Setting("flags.plugin.cdiAnnotationPrefix", "cdi_annotation_prefix", PREFIX,
            "How the annotations of cdi-annotations begin.",
            "cdi-annotation-prefix", ("CDI_ANNOTATION_PREFIX",)),
    Setting("flags.mpsRoot", "mps_root", DIRECTORY,
            "The host's directory of MPS daemons.",
            "mps-root", ("MPS_ROOT",)),
    Setting("imex.channelIDs", "imex_channels", CHANNELS,
            "IMEX channels that every container gets: 0, or none.",
            "imex-channel-ids", ("IMEX_CHANNEL_IDS",), repeated=True),
    Setting("imex.required", "imex_required", BOOLEAN,
            "A channel that is not there is an error.",
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
             "the configuration's platform says how devices are found",
             "device-discovery-strategy", "DEVICE_DISCOVERY_STRATEGY"),
    _ignored("flags.plugin.nvidiaCTKPath", "nothing here is a hook",
             "nvidia-cdi-hook-path", "NVIDIA_CDI_HOOK_PATH", "NVIDIA_CTK_PATH",
             alias="nvidia-ctk-path"),
    _ignored("flags.plugin.containerDriverRoot",
             "the driver is found below the node's root as it is mounted here",
             "driver-root-ctr-path", "DRIVER_ROOT_CTR_PATH", "CONTAINER_DRIVER_ROOT",
             alias="container-driver-root"),
    _ignored("flags.plugin.cdiFeatureFlags", "they are of NVIDIA's generator",
             "cdi-feature-flags", "CDI_FEATURE_FLAGS", repeated=True),
    _ignored("flags.plugin.cdiDisableHooks", "nothing here is a hook",
             "cdi-disable-hooks", "CDI_DISABLE_HOOKS", repeated=True),
    _ignored("flags.gfd", "it is of gpu-feature-discovery"),
    _ignored("flags.useNodeFeatureAPI", "it is of gpu-feature-discovery"),
    _ignored("flags.restartOnDeviceUnhealthy", "a device recovers without a restart"),
    _ignored("resources", "NVIDIA's plugin ignores it as well; sharing can rename a resource"),
)
# fmt: on

SETTINGS: Final = {setting.path: setting for setting in _TABLE}
"""Every key of the file, by its path."""


def _parents() -> dict[str, list[str]]:
    """Where keys belong, by their names in lower case; also objects, and those of a resource."""
    found: dict[str, dict[str, None]] = {
        name: {"an entry of sharing.timeSlicing.resources": None} for name in _OF_RESOURCE
    }
    for path in SETTINGS:
        parent, _, name = path.rpartition(".")
        while name:
            at = found.setdefault(name.casefold(), {})
            at[parent or "the top of the file"] = None
            parent, _, name = parent.rpartition(".")
    return {name: list(parents) for name, parents in found.items()}


PARENTS: Final = _parents()
"""Where keys belong, by their names in lower case."""

FLAGS: Final = tuple(setting for setting in _TABLE if setting.name)
"""Those that can be given as a flag or a variable, too."""
