"""The flags and environment variables of the device plugin, as NVIDIA's has them.

Each says what one key of the configuration file says, by the key's path, and comes before it; a
flag comes before a variable. One table, so that the command line, the file and the documentation
cannot differ.

Source: k8s-device-plugin cmd/nvidia-device-plugin/main.go and api/config/v1/flags.go.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

__all__ = ["FLAGS", "Flag", "Given"]


class Given(NamedTuple):
    """What a flag or variable says.

    Attributes:
        path: of the key that it stands for.
        origin: "--mig-strategy", "MIG_STRATEGY".
        words: as they were given; several for one that may be given several times.
    """

    path: str
    origin: str
    words: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag of the command line.

    Attributes:
        name: without its dashes.
        path: of the key in the configuration file.
        variables: of the environment, the first of which that is set counts.
        meaning: for the help; of one that means nothing here, why.
        aliases: other names of it.
        kind: how it is given: "text", "boolean" (the name alone is true), "many" (a comma list,
            or several times).
        metavar: what stands for its value in the help.
        ignored: whether it means nothing here.
    """

    name: str
    path: str
    variables: tuple[str, ...]
    meaning: str
    aliases: tuple[str, ...] = ()
    kind: str = "text"
    metavar: str = "TEXT"
    ignored: bool = False


def _flag(name: str, path: str, variable: str, meaning: str, metavar: str = "TEXT") -> Flag:
    return Flag(name, path, (variable,), meaning, metavar=metavar)


def _boolean(name: str, path: str, variable: str, meaning: str) -> Flag:
    return Flag(name, path, (variable,), meaning, kind="boolean", metavar="true|false")


def _many(name: str, path: str, variable: str, meaning: str, metavar: str) -> Flag:
    return Flag(name, path, (variable,), meaning, kind="many", metavar=metavar)


FLAGS: Final = (
    _flag(
        "mig-strategy",
        "flags.migStrategy",
        "MIG_STRATEGY",
        "How MIG devices are told of.  [default: none]",
        "none|single|mixed",
    ),
    _boolean(
        "fail-on-init-error",
        "flags.failOnInitError",
        "FAIL_ON_INIT_ERROR",
        "Changes nothing: a driver that is not there is said, and waited for.",
    ),
    Flag(
        "nvidia-driver-root",
        "flags.nvidiaDriverRoot",
        ("NVIDIA_DRIVER_ROOT",),
        "Changes nothing: driver-root of the configuration says where the driver is.",
        aliases=("driver-root",),
        metavar="DIR",
    ),
    Flag(
        "nvidia-dev-root",
        "flags.nvidiaDevRoot",
        ("NVIDIA_DEV_ROOT",),
        "The host's directory of dev, for --pass-device-specs.  [default: /]",
        aliases=("dev-root",),
        metavar="DIR",
    ),
    _boolean(
        "pass-device-specs",
        "flags.plugin.passDeviceSpecs",
        "PASS_DEVICE_SPECS",
        "The kubelet is told the device nodes as well.",
    ),
    _many(
        "device-list-strategy",
        "flags.plugin.deviceListStrategy",
        "DEVICE_LIST_STRATEGY",
        "How a container is told what it has; several, with commas or one by one.  "
        "[default: cdi-cri]",
        "envvar|volume-mounts|cdi-annotations|cdi-cri",
    ),
    _flag(
        "device-id-strategy",
        "flags.plugin.deviceIDStrategy",
        "DEVICE_ID_STRATEGY",
        "What devices are called there.  [default: uuid]",
        "uuid|index",
    ),
    _flag(
        "shared-devices-allocation-policy",
        "flags.plugin.sharedDevicesAllocationPolicy",
        "SHARED_DEVICES_ALLOCATION_POLICY",
        "Which shares of devices are preferred.  [default: distributed]",
        "distributed|packed",
    ),
    _boolean(
        "gdrcopy-enabled",
        "flags.gdrcopyEnabled",
        "GDRCOPY_ENABLED",
        "Containers get GDRCopy.",
    ),
    _boolean(
        "gds-enabled",
        "flags.gdsEnabled",
        "GDS_ENABLED",
        "Containers get GPUDirect Storage.",
    ),
    _boolean(
        "mofed-enabled",
        "flags.mofedEnabled",
        "MOFED_ENABLED",
        "Containers get Mellanox's devices.",
    ),
    _flag(
        "cdi-annotation-prefix",
        "flags.plugin.cdiAnnotationPrefix",
        "CDI_ANNOTATION_PREFIX",
        "How the annotations of cdi-annotations begin.  [default: cdi.k8s.io/]",
        "PREFIX",
    ),
    _flag(
        "mps-root",
        "flags.mpsRoot",
        "MPS_ROOT",
        "The host's directory of MPS daemons.  [default: /run/nvidia/mps]",
        "DIR",
    ),
    _many(
        "imex-channel-ids",
        "imex.channelIDs",
        "IMEX_CHANNEL_IDS",
        "IMEX channels that every container gets: 0, or none.",
        "NUMBER",
    ),
    _boolean(
        "imex-required",
        "imex.required",
        "IMEX_REQUIRED",
        "A channel that is not there is an error.",
    ),
    Flag(
        "device-discovery-strategy",
        "flags.deviceDiscoveryStrategy",
        ("DEVICE_DISCOVERY_STRATEGY",),
        "the configuration's platform says how devices are found",
        ignored=True,
    ),
    Flag(
        "nvidia-cdi-hook-path",
        "flags.plugin.nvidiaCTKPath",
        ("NVIDIA_CDI_HOOK_PATH", "NVIDIA_CTK_PATH"),
        "nothing here is a hook",
        aliases=("nvidia-ctk-path",),
        ignored=True,
    ),
    Flag(
        "driver-root-ctr-path",
        "flags.plugin.containerDriverRoot",
        ("DRIVER_ROOT_CTR_PATH", "CONTAINER_DRIVER_ROOT"),
        "the driver is found below the node's root as it is mounted here",
        aliases=("container-driver-root",),
        ignored=True,
    ),
    Flag(
        "cdi-feature-flags",
        "flags.plugin.cdiFeatureFlags",
        ("CDI_FEATURE_FLAGS",),
        "they are of NVIDIA's generator",
        kind="many",
        ignored=True,
    ),
    Flag(
        "cdi-disable-hooks",
        "flags.plugin.cdiDisableHooks",
        ("CDI_DISABLE_HOOKS",),
        "nothing here is a hook",
        kind="many",
        ignored=True,
    ),
)  # fmt: skip
"""Every flag that stands for a key of the file."""
