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

from typing import Any, Final, NamedTuple

from hooks.schema import IGNORED, Kind, Setting
from integration.node.settings.readers import (
    BOOLEAN,
    CHANNELS,
    DEVICES,
    DIRECTORY,
    LAYOUT_VERSION,
    PREFIX,
    RENAME,
    REPLICAS,
    RESOURCE_NAME,
    SLICING,
    STRATEGIES,
    one_of,
)
from integration.node.values.resources import Allocation, DeviceIds, Mig, Settings


class Override(NamedTuple):
    """A value from the command line or the environment."""

    path: str  # the key that it sets
    origin: str  # "--mig-strategy", "MIG_STRATEGY"
    words: tuple[str, ...]  # the raw values; several for a repeated flag


RESOURCES: Final = Kind(list, "a list of resources, each with name and replicas")
"""A list of objects with the keys of :data:`RESOURCE_KEYS`."""

RESOURCE_KEYS: Final = {
    "name": RESOURCE_NAME,
    "rename": RENAME,
    "devices": DEVICES,
    "replicas": REPLICAS,
}

_DEFAULTS: Final = Settings()


def _define(
    key: str,
    field: str,
    kind: Kind,
    text: str = "",
    flag: str = "",
    *variables: str,
    alias: str = "",
) -> Setting:
    """Declare a setting; without a field it is a part of another, or has no effect."""
    options = tuple(f"--{name}" for name in (flag, alias) if name)
    default = getattr(_DEFAULTS, field) if field else None
    return Setting(field, kind, default, text, key, variables, options)


# fmt: off
_TABLE: Final = (
    _define("version", "", LAYOUT_VERSION),
    _define("flags.migStrategy", "mig_strategy", one_of(Mig),
            "How to announce MIG devices.",
            "mig-strategy", "MIG_STRATEGY"),
    _define("flags.failOnInitError", "fail_on_init_error", BOOLEAN,
            "the agent reports a missing driver and retries",
            "fail-on-init-error", "FAIL_ON_INIT_ERROR"),
    _define("flags.nvidiaDriverRoot", "driver_root", DIRECTORY,
            "driver-root of the configuration sets where the driver is",
            "nvidia-driver-root", "NVIDIA_DRIVER_ROOT", alias="driver-root"),
    _define("flags.nvidiaDevRoot", "dev_root", DIRECTORY,
            "The host's directory that contains dev, for --pass-device-specs.",
            "nvidia-dev-root", "NVIDIA_DEV_ROOT", alias="dev-root"),
    _define("flags.plugin.passDeviceSpecs", "pass_device_specs", BOOLEAN,
            "Also pass device nodes to the kubelet.",
            "pass-device-specs", "PASS_DEVICE_SPECS"),
    _define("flags.plugin.deviceListStrategy", "device_list_strategies", STRATEGIES,
            "How containers receive their devices; separate several with commas, or repeat.",
            "device-list-strategy", "DEVICE_LIST_STRATEGY"),
    _define("flags.plugin.deviceIDStrategy", "device_id_strategy", one_of(DeviceIds),
            "Identify devices by UUID or index.",
            "device-id-strategy", "DEVICE_ID_STRATEGY"),
    _define("flags.plugin.sharedDevicesAllocationPolicy", "shared_devices_allocation_policy",
            one_of(Allocation),
            "Spread shares over the devices, or pack them on few.",
            "shared-devices-allocation-policy", "SHARED_DEVICES_ALLOCATION_POLICY"),
    _define("flags.gdrcopyEnabled", "gdrcopy", BOOLEAN,
            "Give containers GDRCopy.",
            "gdrcopy-enabled", "GDRCOPY_ENABLED"),
    _define("flags.gdsEnabled", "gds", BOOLEAN,
            "Give containers GPUDirect Storage.",
            "gds-enabled", "GDS_ENABLED"),
    _define("flags.mofedEnabled", "mofed", BOOLEAN,
            "Give containers Mellanox's devices.",
            "mofed-enabled", "MOFED_ENABLED"),
    _define("flags.plugin.cdiAnnotationPrefix", "cdi_annotation_prefix", PREFIX,
            "Prefix of the annotations of cdi-annotations.",
            "cdi-annotation-prefix", "CDI_ANNOTATION_PREFIX"),
    _define("flags.mpsRoot", "mps_root", DIRECTORY,
            "The host's directory for MPS daemons.",
            "mps-root", "MPS_ROOT"),
    _define("imex.channelIDs", "imex_channels", CHANNELS,
            "IMEX channels to give every container: 0, or none.",
            "imex-channel-ids", "IMEX_CHANNEL_IDS"),
    _define("imex.required", "imex_required", BOOLEAN,
            "Fail if an IMEX channel is missing.",
            "imex-required", "IMEX_REQUIRED"),
    *(
        _define(f"sharing.{key}.{name}", "", kind)
        for key in ("timeSlicing", "mps")
        for name, kind in (
            ("renameByDefault", BOOLEAN), ("failRequestsGreaterThanOne", BOOLEAN),
            ("resources", RESOURCES), ("strategy", SLICING),
        )
    ),
    _define("flags.deviceDiscoveryStrategy", "", IGNORED,
            "platform of the configuration sets how devices are found",
            "device-discovery-strategy", "DEVICE_DISCOVERY_STRATEGY"),
    _define("flags.plugin.nvidiaCTKPath", "", IGNORED, "this product uses no CDI hooks",
            "nvidia-cdi-hook-path", "NVIDIA_CDI_HOOK_PATH", "NVIDIA_CTK_PATH",
            alias="nvidia-ctk-path"),
    _define("flags.plugin.containerDriverRoot", "", IGNORED,
            "the agent finds the driver below the node's root as it is mounted",
            "driver-root-ctr-path", "DRIVER_ROOT_CTR_PATH", "CONTAINER_DRIVER_ROOT",
            alias="container-driver-root"),
    _define("flags.plugin.cdiFeatureFlags", "", IGNORED,
            "they configure NVIDIA's generator of CDI specs",
            "cdi-feature-flags", "CDI_FEATURE_FLAGS"),
    _define("flags.plugin.cdiDisableHooks", "", IGNORED, "this product uses no CDI hooks",
            "cdi-disable-hooks", "CDI_DISABLE_HOOKS"),
    _define("flags.gfd", "", IGNORED, "it configures gpu-feature-discovery"),
    _define("flags.useNodeFeatureAPI", "", IGNORED, "it configures gpu-feature-discovery"),
    _define("flags.restartOnDeviceUnhealthy", "", IGNORED, "a device recovers without a restart"),
    _define("resources", "", IGNORED,
            "NVIDIA's plugin ignores it as well; sharing can rename a resource"),
)
# fmt: on

SETTINGS: Final = {setting.key: setting for setting in _TABLE}
"""Every key of the file, by its path."""

NEUTRAL: Final[dict[str, Any]] = {"flags.failOnInitError": False, "flags.nvidiaDriverRoot": ""}
"""Settings that change nothing here, each with the value that needs no note."""


def _parents() -> dict[str, list[str]]:
    """Return the objects that each key or object belongs to, by its name in lower case."""
    parents: dict[str, dict[str, None]] = {
        name: {"an entry of sharing.timeSlicing.resources": None} for name in RESOURCE_KEYS
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

FLAGS: Final = tuple(setting for setting in _TABLE if setting.options)
"""The settings that a flag or a variable can set, too."""
