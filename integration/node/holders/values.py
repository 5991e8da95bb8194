"""Values: the devices that containers hold, and their use of them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from api.values import dataclass, field
from integration.containers.bundles import Container
from integration.containers.shares import Share


@dataclass(frozen=True, slots=True)
class Holding:
    """The devices of one container."""

    container: Container  # running, or created and not started yet
    devices: tuple[str, ...]  # UUIDs of GPUs and MIG devices
    gpus: tuple[str, ...] = ()  # UUIDs of these GPUs, and of the parents of these MIG devices
    # which part of the driver from its creation was removed; "" for none. Drain such a pod.
    stale: str = ""
    orphan: str = ""  # why no shim or kubelet manages it; "" if one does
    shares: tuple[Share, ...] = ()  # its shares of GPUs from resource claims


@dataclass(frozen=True, slots=True)
class Unheld:
    """A device that the kubelet allocated to a container, and that this container does not hold.

    This is normal while the pod's image is pulled. It is a fault once the container runs: the pod
    is Running and Ready, but has no GPU.
    """

    namespace: str  # of the pod
    pod: str  # its name
    container: str  # its name in the pod
    resource: str  # the device's resource ("nvidia.com/gpu")
    device: str  # the kubelet's id of the device
    pid: int = 0  # of the container that runs without it; 0 if none runs
    pod_uid: str = ""  # of the pod of that container; "" if unknown

    @property
    def title(self) -> str:
        """The container's name for display."""
        return f"{self.namespace}/{self.pod}/{self.container}"


@dataclass(frozen=True, slots=True)
class Denied:
    """A request of a pod's container that the policy denied."""

    namespace: str  # of the pod
    pod: str  # its name
    pod_uid: str  # "" if unknown
    container: str  # its name in the pod
    why: str  # what was denied, and why, for display


@dataclass(frozen=True, slots=True)
class Ledger:
    """The holders of all devices at one moment."""

    # seconds since boot (CLOCK_BOOTTIME); ignored by comparisons
    when: float = field(default=0.0, compare=False)
    holdings: tuple[Holding, ...] = ()  # one for each container
    unknown: tuple[str, ...] = ()  # why some containers could not be read, a line each
    unheld: tuple[Unheld, ...] = ()  # allocated by the kubelet, but held by no container
    denied: tuple[Denied, ...] = ()  # denied requests of pods' containers
    # the holdings of containers whose init has exited and whose bundle still exists
    stopped: tuple[Holding, ...] = ()
    # all containers, with and without devices; ignored by comparisons
    containers: tuple[Container, ...] = field(default=(), compare=False, repr=False)

    @property
    def missing(self) -> tuple[Unheld, ...]:
        """The unheld devices whose container runs."""
        return tuple(each for each in self.unheld if each.pid)

    def holders(self, uuid: str) -> tuple[Holding, ...]:
        """Return the holders of a device.

        Args:
            uuid: the UUID of a GPU or MIG device. The holders of a GPU include those of its MIG
                devices.
        """
        return tuple(each for each in self.holdings if uuid in {*each.devices, *each.gpus})


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """The use of one device by one container at one moment; None for an unknown figure."""

    holding: Holding | None  # the container's; None for processes outside containers
    device: str  # UUID of the GPU or MIG device
    processes: tuple[int, ...] = ()  # their pids, in the node's pid namespace
    memory_bytes: int | None = None  # device memory
    sm_percent: int | None = None
    memory_percent: int | None = None  # utilisation of the memory bandwidth
    encoder_percent: int | None = None
    decoder_percent: int | None = None
    energy_joules: float | None = None  # energy attributed to the container (see :mod:`.energy`)


def as_document(ledger: Ledger) -> dict[str, Any]:
    """Return a ledger as JSON, without its time."""
    return {
        "holdings": [holding_row(each) for each in ledger.holdings],
        "unheld": [asdict(each) for each in ledger.unheld],
        "denied": [asdict(each) for each in ledger.denied],
        "unknown": list(ledger.unknown),
    }


def holding_row(holding: Holding) -> dict[str, Any]:
    """Return a holding as JSON."""
    container = holding.container
    return {
        **container.to_json(),
        "bundle": container.bundle,
        "devices": list(holding.devices),
        "gpus": list(holding.gpus),
        "stale": holding.stale or None,
        "orphan": holding.orphan or None,
        "shares": [
            {
                "id": each.id,
                "device": each.device,
                "memory_bytes": each.memory << 20,
                "shares": each.shares,
            }
            for each in holding.shares
        ],
    }
