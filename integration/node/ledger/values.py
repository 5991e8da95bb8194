"""Who holds what, and who uses what, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from integration.inspection.bundles import Container
    from integration.inspection.shares import Share

Allocated = Mapping[tuple[str, str], Mapping[str, tuple[tuple[str, str], ...]]]
"""What the kubelet has given: by the pod's namespace and name, and the container's name, resources
and their device ids. A pod without containers is known as well."""


@dataclass(frozen=True, slots=True)
class Holding:
    """What one container holds.

    Attributes:
        container: which; it is running, or was created and not started yet.
        devices: UUIDs of GPUs and MIG devices.
        gpus: UUIDs of the GPUs that those are, or are parts of.
        stale: what of the driver that it was made with is no more; "" for nothing. Such a pod is
            to be drained.
        orphan: why nobody seems to know of it any more; "" if somebody does.
        shares: the parts of GPUs that resource claims have given it.
    """

    container: Container
    devices: tuple[str, ...]
    gpus: tuple[str, ...] = ()
    stale: str = ""
    orphan: str = ""
    shares: tuple[Share, ...] = ()


@dataclass(frozen=True, slots=True)
class Unheld:
    """A device that the kubelet has given to a container, and that no container of that name has.

    For a while that is so of every pod: until its image is there. Once a container runs without it,
    it is a fault: the pod is Running and Ready, and has no GPU.

    Attributes:
        namespace: of the pod.
        pod: its name.
        container: its name in the pod.
        resource: whose device it is ("nvidia.com/gpu").
        device: what the kubelet calls it.
        pid: of the container that runs without it; 0 if none runs.
        pod_uid: of the pod of that container; "" if it is not known.
    """

    namespace: str
    pod: str
    container: str
    resource: str
    device: str
    pid: int = 0
    pod_uid: str = ""

    @property
    def title(self) -> str:
        """What people call the container."""
        return f"{self.namespace}/{self.pod}/{self.container}"


@dataclass(frozen=True, slots=True)
class Denied:
    """What a container of a pod has asked for and was not given, since nobody granted it.

    Attributes:
        namespace: of the pod.
        pod: its name.
        pod_uid: "" if it is not known.
        container: its name in the pod.
        why: what it may not have, and why, for people.
    """

    namespace: str
    pod: str
    pod_uid: str
    container: str
    why: str


@dataclass(frozen=True, slots=True)
class Ledger:
    """Who holds what at one moment.

    Attributes:
        when: seconds since boot (CLOCK_BOOTTIME). Two that differ in nothing else are equal.
        holdings: a container each.
        unknown: why some containers could not be read, a line each.
        unheld: what the kubelet has given, and nobody has.
        denied: what containers of pods were not given.
        stopped: what those held whose init has ended, and whose bundle is still there.
        containers: all that there are, with and without devices; they are not compared.
    """

    when: float = field(default=0.0, compare=False)
    holdings: tuple[Holding, ...] = ()
    unknown: tuple[str, ...] = ()
    unheld: tuple[Unheld, ...] = ()
    denied: tuple[Denied, ...] = ()
    stopped: tuple[Holding, ...] = ()
    containers: tuple[Container, ...] = field(default=(), compare=False, repr=False)

    @property
    def missing(self) -> tuple[Unheld, ...]:
        """Of what is unheld, what a container runs without."""
        return tuple(each for each in self.unheld if each.pid)

    def holders(self, uuid: str) -> tuple[Holding, ...]:
        """Who holds a device: that one, or the whole GPU that it is a part of counts for a GPU.

        Args:
            uuid: of a GPU or MIG device. For a GPU, those who hold a part of it are included.
        """
        return tuple(each for each in self.holdings if uuid in {*each.devices, *each.gpus})


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """What one container uses of one device at one moment; None for what is not known.

    Attributes:
        holding: whose it is; None for processes of no container.
        device: UUID of the GPU or MIG device.
        processes: their pids, in the node's pid namespace.
        memory_bytes: of the device's memory.
        sm_percent: of the time that its kernels ran.
        memory_percent: of the time that memory was read or written.
        encoder_percent: of the encoder's time.
        decoder_percent: of the decoder's time.
        energy_joules: its share since it is watched, by time on the multiprocessors.
    """

    holding: Holding | None
    device: str
    processes: tuple[int, ...] = ()
    memory_bytes: int | None = None
    sm_percent: int | None = None
    memory_percent: int | None = None
    encoder_percent: int | None = None
    decoder_percent: int | None = None
    energy_joules: float | None = None


def as_document(ledger: Ledger) -> dict[str, Any]:
    """All of a ledger, but when it was so."""
    return {
        "holdings": [holding_row(each) for each in ledger.holdings],
        "unheld": [asdict(each) for each in ledger.unheld],
        "denied": [asdict(each) for each in ledger.denied],
        "unknown": list(ledger.unknown),
    }


def holding_row(holding: Holding) -> dict[str, Any]:
    """What one container holds."""
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
