"""The device plugin's settings, and the resources that it announces."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Final, NamedTuple

from api.values import dataclass, field
from integration.node.values.health import HealthState


class Mig(StrEnum):
    """How MIG devices are announced: ``migStrategy``."""

    NONE = "none"
    SINGLE = "single"
    MIXED = "mixed"


class DeviceList(StrEnum):
    """How a container receives its devices: ``deviceListStrategy``."""

    ENVVAR = "envvar"
    VOLUME_MOUNTS = "volume-mounts"
    CDI_ANNOTATIONS = "cdi-annotations"
    CDI_CRI = "cdi-cri"


CDI: Final = frozenset({DeviceList.CDI_ANNOTATIONS, DeviceList.CDI_CRI})
"""The strategies with which a runtime injects devices from a CDI spec."""

PATTERN: Final = "*"
"""An entry of :attr:`SharedResource.devices` with this character is a pattern of model names."""

PLUGIN: Final = "nvidia-device-plugin"
"""The part of annotation keys that NVIDIA's plugin uses."""


class DeviceIds(StrEnum):
    """How devices are identified in the response to Allocate: ``deviceIDStrategy``."""

    UUID = "uuid"
    INDEX = "index"


class Allocation(StrEnum):
    """Which replicas of shared devices are preferred: ``sharedDevicesAllocationPolicy``."""

    DISTRIBUTED = "distributed"
    PACKED = "packed"


TIME_SLICING: Final = "time-slicing"
MPS: Final = "mps"


@dataclass(frozen=True, slots=True)
class SharedResource:
    """A resource whose devices are shared."""

    name: str  # the resource's name ("nvidia.com/gpu")
    replicas: int  # how many containers may share each device
    rename: str = ""  # the name of the shared resource; "" for the same name
    # the shared devices, by UUID, index or a pattern of the model's name; None for all
    devices: tuple[str, ...] | None = None
    count: int | None = None  # how many devices are shared, lowest index first; None for all

    def lists(self, names: Iterable[str], model: str) -> bool:
        """Return whether :attr:`devices` includes a device.

        Args:
            names: the names of the device there, such as its UUID and index.
            model: the model of its GPU.
        """
        wanted = frozenset(self.devices or ())
        patterns = (each for each in wanted if PATTERN in each)
        return not wanted.isdisjoint(names) or any(fnmatchcase(model, each) for each in patterns)


@dataclass(frozen=True, slots=True)
class Sharing:
    """How devices are shared."""

    kind: str = ""  # TIME_SLICING, MPS; "" for not at all
    rename_by_default: bool = False  # whether a shared resource is called NAME.shared
    fail_requests_greater_than_one: bool = False  # whether a container may have one share only
    resources: tuple[SharedResource, ...] = ()


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings; :mod:`integration.node.settings.table` describes each field."""

    mig_strategy: Mig = Mig.NONE
    fail_on_init_error: bool = True
    device_list_strategies: tuple[DeviceList, ...] = (DeviceList.CDI_CRI,)
    device_id_strategy: DeviceIds = DeviceIds.UUID
    pass_device_specs: bool = False
    gdrcopy: bool = False
    gds: bool = False
    mofed: bool = False
    cdi_annotation_prefix: str = "cdi.k8s.io/"
    mps_root: str = "/run/nvidia/mps"
    shared_devices_allocation_policy: Allocation = Allocation.DISTRIBUTED
    sharing: Sharing = field(default_factory=Sharing)  # how devices are shared
    imex_channels: tuple[int, ...] = ()
    imex_required: bool = False
    driver_root: str = ""
    dev_root: str = ""
    source: str = ""  # the file that they come from; "" for none
    notes: tuple[str, ...] = ()  # lines for the log about keys and values without effect

    @property
    def features(self) -> tuple[str, ...]:
        """The extra features that containers get, by the classes of their CDI kinds."""
        enabled = {"gdrcopy": self.gdrcopy, "gds": self.gds, "mofed": self.mofed}
        return tuple(name for name, is_enabled in enabled.items() if is_enabled)


class Device(NamedTuple):
    """A device, or a share of a device, as the kubelet knows it.

    A tuple, because there may be thousands of them, and each change creates all of them again.
    """

    id: str  # the kubelet's id: the UUID, or "UUID::N" for share N
    uuid: str  # UUID of the GPU or MIG device
    gpu: str  # UUID of its GPU; for a whole GPU, the same as ``uuid``
    # nvidia-smi's index: "0"; "0:1" for a MIG device
    index: str  # type: ignore[assignment] # hides tuple.index
    minor: int  # minor number of its GPU's device node
    numa_node: int | None = None  # None if unknown
    memory_bytes: int | None = None  # memory of the whole device; None if unknown
    state: HealthState = HealthState.HEALTHY

    @property
    def is_healthy(self) -> bool:
        """The health that the plugin announces to the kubelet."""
        return self.state.is_allocatable


@dataclasses.dataclass(frozen=True, slots=True)  # it has a __post_init__
class Resource:
    """A resource of the node. Each resource has its own plugin."""

    name: str  # "nvidia.com/gpu", "nvidia.com/mig-1g.10gb", "nvidia.com/gpu.shared"
    devices: tuple[Device, ...]  # its devices, in the order of their indices
    sharing: str = ""  # TIME_SLICING, MPS; "" if its devices are not shared
    replicas: int = 1  # shares of each device, at most; 1 if they are not shared
    one_each: bool = False  # whether a request for more than one is refused
    original: str = ""  # the name before renaming
    # the devices by id; there may be thousands
    by_id: Mapping[str, Device] = dataclasses.field(init=False, repr=False, compare=False)
    # ids of these devices
    unhealthy: frozenset[str] = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Build the indices once, because every call of the kubelet uses them."""
        by_id = {device.id: device for device in self.devices}
        object.__setattr__(self, "by_id", by_id)
        unhealthy = frozenset(id_ for id_, device in by_id.items() if not device.is_healthy)
        object.__setattr__(self, "unhealthy", unhealthy)
