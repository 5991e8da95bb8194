"""Names of devices, as values: what a list of them came to.

How they are written is :mod:`hooks.requests.naming`'s matter, what a node has of that name
:mod:`hooks.edits.grant`'s. The values are written out by hand, for :mod:`hooks.requests.request`
is light.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final, TypeAlias

__all__ = [
    "AllDevices",
    "DeviceName",
    "Devices",
    "Feature",
    "GpuBusId",
    "GpuIndex",
    "GpuUuid",
    "MigIndex",
    "MigInstance",
    "MigUuid",
    "NamedDevices",
    "Names",
    "NoDevices",
    "Value",
    "Void",
]


class Value:
    """An immutable value with slots: what a frozen dataclass gives, without its import."""

    __slots__: tuple[str, ...] = ()

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable")

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in self.__slots__)

    def __hash__(self) -> int:
        return hash((type(self), *(getattr(self, name) for name in self.__slots__)))

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.__slots__)
        return f"{type(self).__name__}({fields})"


class GpuIndex(Value):
    """A GPU by its index: its place in PCI bus order, from 0."""

    __slots__ = __match_args__ = ("index",)
    index: int

    def __init__(self, index: int) -> None:
        object.__setattr__(self, "index", index)

    def __str__(self) -> str:
        return str(self.index)


class GpuUuid(Value):
    """A GPU by its UUID or the beginning of it: ``GPU-`` and lower-case hexadecimal."""

    __slots__ = __match_args__ = ("uuid",)
    uuid: str

    def __init__(self, uuid: str) -> None:
        object.__setattr__(self, "uuid", uuid)

    def __str__(self) -> str:
        return self.uuid


class GpuBusId(Value):
    """A GPU by its PCI address, written as sysfs does: ``0000:07:00.0``."""

    __slots__ = __match_args__ = ("bus_id",)
    bus_id: str

    def __init__(self, bus_id: str) -> None:
        object.__setattr__(self, "bus_id", bus_id)

    def __str__(self) -> str:
        return self.bus_id


class MigIndex(Value):
    """A MIG device by its index within the GPU with an index."""

    __slots__ = __match_args__ = ("gpu", "index")
    gpu: int
    index: int

    def __init__(self, gpu: int, index: int) -> None:
        object.__setattr__(self, "gpu", gpu)
        object.__setattr__(self, "index", index)

    def __str__(self) -> str:
        return f"{self.gpu}:{self.index}"


class MigUuid(Value):
    """A MIG device by its UUID or the beginning of it: ``MIG-`` and lower-case hexadecimal."""

    __slots__ = __match_args__ = ("uuid",)
    uuid: str

    def __init__(self, uuid: str) -> None:
        object.__setattr__(self, "uuid", uuid)

    def __str__(self) -> str:
        return self.uuid


class MigInstance(Value):
    """A MIG device as drivers before 470 name it: by its GPU's UUID and its two instances."""

    __slots__ = __match_args__ = ("gpu", "gpu_instance", "compute_instance")
    gpu: str
    gpu_instance: int
    compute_instance: int

    def __init__(self, gpu: str, gpu_instance: int, compute_instance: int) -> None:
        object.__setattr__(self, "gpu", gpu)
        object.__setattr__(self, "gpu_instance", gpu_instance)
        object.__setattr__(self, "compute_instance", compute_instance)

    def __str__(self) -> str:
        return f"MIG-{self.gpu}/{self.gpu_instance}/{self.compute_instance}"


class Void(Value):
    """None of the driver is asked."""

    __slots__ = ()


class NoDevices(Value):
    """The driver's files and control nodes are asked, and no GPU (``none``)."""

    __slots__ = ()


class AllDevices(Value):
    """Every full GPU and every MIG device of the node is asked (``all``)."""

    __slots__ = ()


class NamedDevices(Value):
    """These devices are asked, in this order; no name twice, at least one."""

    __slots__ = __match_args__ = ("devices",)
    devices: tuple[DeviceName, ...]

    def __init__(self, devices: tuple[DeviceName, ...]) -> None:
        object.__setattr__(self, "devices", devices)


if TYPE_CHECKING:
    DeviceName: TypeAlias = GpuIndex | GpuUuid | GpuBusId | MigIndex | MigUuid | MigInstance
    Devices: TypeAlias = Void | NoDevices | AllDevices | NamedDevices
else:  # names for importers; the unions themselves are for the type checker
    DeviceName = (GpuIndex, GpuUuid, GpuBusId, MigIndex, MigUuid, MigInstance)
    Devices = (Void, NoDevices, AllDevices, NamedDevices)


class Feature:
    """What may be asked beside GPUs, by the words of the record."""

    GDS: Final = "gds"
    MOFED: Final = "mofed"
    GDRCOPY: Final = "gdrcopy"
    NVSWITCH: Final = "nvswitch"
    MIG_CONFIG: Final = "mig-config"
    MIG_MONITOR: Final = "mig-monitor"
    MANAGEMENT: Final = "management"  # every node of the driver


class Names(Value):
    """What a list names.

    Attributes:
        devices: of NVIDIA's devices, which.
        features: what else of NVIDIA's, words of :class:`Feature`.
        imex_channels: numbers of IMEX channels; None for every one that the node has.
        cdi_devices: fully qualified names that only a CDI file can tell the meaning of.
    """

    __slots__ = __match_args__ = ("devices", "features", "imex_channels", "cdi_devices")
    devices: Devices
    features: frozenset[str]
    imex_channels: tuple[int, ...] | None
    cdi_devices: tuple[str, ...]

    def __init__(
        self,
        devices: Devices,
        features: frozenset[str] = frozenset(),
        imex_channels: tuple[int, ...] | None = (),
        cdi_devices: tuple[str, ...] = (),
    ) -> None:
        object.__setattr__(self, "devices", devices)
        object.__setattr__(self, "features", features)
        object.__setattr__(self, "imex_channels", imex_channels)
        object.__setattr__(self, "cdi_devices", cdi_devices)

    @property
    def of_nvidia(self) -> bool:
        """Whether anything of NVIDIA's is named that the node itself knows."""
        named = not isinstance(self.devices, Void)
        return named or bool(self.features) or self.imex_channels != ()
