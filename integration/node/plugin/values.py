"""What the device plugin is to do, and what it tells the kubelet of, as values."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from integration.node.health.values import State

if TYPE_CHECKING:
    from collections.abc import Mapping


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
    """A resource whose devices are shared.

    Attributes:
        name: of the resource ("nvidia.com/gpu").
        replicas: how many may share each device.
        rename: what it is called then; "" for the same name.
        devices: which of them, by UUID or index; None for all.
        count: how many of them, by index; None for all.
    """

    name: str
    replicas: int
    rename: str = ""
    devices: tuple[str, ...] | None = None
    count: int | None = None


@dataclass(frozen=True, slots=True)
class Sharing:
    """How devices are shared.

    Attributes:
        kind: :data:`TIME_SLICING`, :data:`MPS`; "" for not at all.
        rename_by_default: a resource is called NAME.shared.
        fail_requests_greater_than_one: nobody gets two shares.
        resources: what is shared.
    """

    kind: str = ""
    rename_by_default: bool = False
    fail_requests_greater_than_one: bool = False
    resources: tuple[SharedResource, ...] = ()


@dataclass(frozen=True, slots=True)
class Settings:
    """What the device plugin is to do; :mod:`.table` says what each field means.

    Attributes:
        sharing: how devices are shared.
        source: the file that they are from; "" for none.
        notes: what was said and means nothing here, for people.
    """

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
    sharing: Sharing = field(default_factory=Sharing)
    imex_channels: tuple[int, ...] = ()
    imex_required: bool = False
    driver_root: str = ""
    dev_root: str = ""
    source: str = ""
    notes: tuple[str, ...] = ()

    @property
    def features(self) -> tuple[str, ...]:
        """What containers get beside their devices, by the names of the CDI kinds."""
        wished = {"gdrcopy": self.gdrcopy, "gds": self.gds, "mofed": self.mofed}
        return tuple(name for name, is_wished in wished.items() if is_wished)


@dataclass(frozen=True, slots=True)
class Device:
    """One device, or one share of one, as the kubelet knows it.

    Attributes:
        id: what the kubelet calls it: the UUID, or "UUID::N" for the share N of one.
        uuid: of the GPU or MIG device.
        gpu: UUID of the GPU that it is, or is a part of.
        index: as nvidia-smi has it: "0"; "0:1" for a MIG device.
        minor: the number in the node of its GPU.
        numa_node: where it is; None if that is not known.
        memory_bytes: of the whole device; None if NVML did not say.
        state: what is thought of it.
    """

    id: str
    uuid: str
    gpu: str
    index: str
    minor: int
    numa_node: int | None = None
    memory_bytes: int | None = None
    state: State = State.HEALTHY

    @property
    def is_healthy(self) -> bool:
        """What the kubelet is told."""
        return self.state.is_given


@dataclass(frozen=True, slots=True)
class Resource:
    """A resource of the node, for which there is one plugin.

    Attributes:
        name: "nvidia.com/gpu", "nvidia.com/mig-1g.10gb", "nvidia.com/gpu.shared".
        devices: what there is of it, in the order of their indices.
        sharing: :data:`TIME_SLICING`, :data:`MPS`; "" if its devices are not shared.
        replicas: shares of each device; 1 if they are not shared.
        one_each: whether a request for more than one is refused.
        original: the name without renaming.
        by_id: the devices by their ids, of which there may be thousands.
    """

    name: str
    devices: tuple[Device, ...]
    sharing: str = ""
    replicas: int = 1
    one_each: bool = False
    original: str = ""
    by_id: Mapping[str, Device] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Make what is looked up with each call of a kubelet's."""
        object.__setattr__(self, "by_id", {device.id: device for device in self.devices})
