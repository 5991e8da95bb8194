"""What the device plugin is to do, and what it tells the kubelet of, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from integration.node.values.health import HealthState


class Mig(StrEnum):
    """How MIG devices are told of: ``migStrategy``."""

    NONE = "none"
    SINGLE = "single"
    MIXED = "mixed"


class DeviceList(StrEnum):
    """How a container is told what it has: ``deviceListStrategy``."""

    ENVVAR = "envvar"
    VOLUME_MOUNTS = "volume-mounts"
    CDI_ANNOTATIONS = "cdi-annotations"
    CDI_CRI = "cdi-cri"


CDI: Final = frozenset({DeviceList.CDI_ANNOTATIONS, DeviceList.CDI_CRI})
"""The strategies by which a runtime applies a CDI spec itself."""

PLUGIN: Final = "nvidia-device-plugin"
"""The name that NVIDIA's plugin puts into the keys of its annotations."""


class DeviceIds(StrEnum):
    """What devices are called there: ``deviceIDStrategy``."""

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

    name: str  # of the resource ("nvidia.com/gpu")
    replicas: int  # how many may share each device
    rename: str = ""  # what it is called then; "" for the same name
    devices: tuple[str, ...] | None = None  # which of them, by UUID or index; None for all
    count: int | None = None  # how many of them, by index; None for all


@dataclass(frozen=True, slots=True)
class Sharing:
    """How devices are shared."""

    kind: str = ""  # TIME_SLICING, MPS; "" for not at all
    rename_by_default: bool = False  # a resource is called NAME.shared
    fail_requests_greater_than_one: bool = False  # nobody gets two shares
    resources: tuple[SharedResource, ...] = ()  # what is shared


@dataclass(frozen=True, slots=True)
class Settings:
    """What the device plugin is to do; :mod:`.table` says what each field means."""

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
    source: str = ""  # the file that they are from; "" for none
    notes: tuple[str, ...] = ()  # what was said and means nothing here, for people

    @property
    def features(self) -> tuple[str, ...]:
        """What containers get beside their devices, by the names of the CDI kinds."""
        wished = {"gdrcopy": self.gdrcopy, "gds": self.gds, "mofed": self.mofed}
        return tuple(name for name, is_wished in wished.items() if is_wished)


@dataclass(frozen=True, slots=True)
class Device:
    """One device, or one share of one, as the kubelet knows it."""

    id: str  # what the kubelet calls it: the UUID, or "UUID::N" for the share N of one
    uuid: str  # of the GPU or MIG device
    gpu: str  # UUID of the GPU that it is, or is a part of
    index: str  # as nvidia-smi has it: "0"; "0:1" for a MIG device
    minor: int  # the number in the node of its GPU
    numa_node: int | None = None  # where it is; None if that is not known
    memory_bytes: int | None = None  # of the whole device; None if NVML did not say
    state: HealthState = HealthState.HEALTHY  # what is thought of it

    @property
    def is_healthy(self) -> bool:
        """What the kubelet is told."""
        return self.state.is_given


@dataclass(frozen=True, slots=True)
class Resource:
    """A resource of the node, for which there is one plugin."""

    name: str  # "nvidia.com/gpu", "nvidia.com/mig-1g.10gb", "nvidia.com/gpu.shared"
    devices: tuple[Device, ...]  # what there is of it, in the order of their indices
    sharing: str = ""  # TIME_SLICING, MPS; "" if its devices are not shared
    replicas: int = 1  # shares of each device; 1 if they are not shared
    one_each: bool = False  # whether a request for more than one is refused
    original: str = ""  # the name without renaming
    # the devices by their ids, of which there may be thousands
    by_id: Mapping[str, Device] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Make what is looked up with each call of a kubelet's."""
        object.__setattr__(self, "by_id", {device.id: device for device in self.devices})
