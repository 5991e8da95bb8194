"""Who holds what, and who uses what, as values."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from integration.containers.bundles import Container
    from integration.containers.shares import Share


@dataclass(frozen=True, slots=True)
class Holding:
    """What one container holds."""

    container: Container  # which; it is running, or was created and not started yet
    devices: tuple[str, ...]  # UUIDs of GPUs and MIG devices
    gpus: tuple[str, ...] = ()  # UUIDs of the GPUs that those are, or are parts of
    # what of the driver that it was made with is no more; "" for nothing. Such a pod is to be
    # drained.
    stale: str = ""
    orphan: str = ""  # why nobody seems to know of it any more; "" if somebody does
    shares: tuple[Share, ...] = ()  # the parts of GPUs that resource claims have given it


@dataclass(frozen=True, slots=True)
class Unheld:
    """A device that the kubelet has given to a container, and that no container of that name has.

    For a while that is so of every pod: until its image is there. Once a container runs without it,
    it is a fault: the pod is Running and Ready, and has no GPU.
    """

    namespace: str  # of the pod
    pod: str  # its name
    container: str  # its name in the pod
    resource: str  # whose device it is ("nvidia.com/gpu")
    device: str  # what the kubelet calls it
    pid: int = 0  # of the container that runs without it; 0 if none runs
    pod_uid: str = ""  # of the pod of that container; "" if it is not known

    @property
    def title(self) -> str:
        """What people call the container."""
        return f"{self.namespace}/{self.pod}/{self.container}"


@dataclass(frozen=True, slots=True)
class Denied:
    """What a container of a pod has asked for and was not given, since nobody granted it."""

    namespace: str  # of the pod
    pod: str  # its name
    pod_uid: str  # "" if it is not known
    container: str  # its name in the pod
    why: str  # what it may not have, and why, for people


@dataclass(frozen=True, slots=True)
class Ledger:
    """Who holds what at one moment."""

    # seconds since boot (CLOCK_BOOTTIME). Two that differ in nothing else are equal.
    when: float = field(default=0.0, compare=False)
    holdings: tuple[Holding, ...] = ()  # a container each
    unknown: tuple[str, ...] = ()  # why some containers could not be read, a line each
    unheld: tuple[Unheld, ...] = ()  # what the kubelet has given, and nobody has
    denied: tuple[Denied, ...] = ()  # what containers of pods were not given
    # what those held whose init has ended, and whose bundle is still there
    stopped: tuple[Holding, ...] = ()
    # all that there are, with and without devices; they are not compared
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
    """What one container uses of one device at one moment; None for what is not known."""

    holding: Holding | None  # whose it is; None for processes of no container
    device: str  # UUID of the GPU or MIG device
    processes: tuple[int, ...] = ()  # their pids, in the node's pid namespace
    memory_bytes: int | None = None  # of the device's memory
    sm_percent: int | None = None  # of the time that its kernels ran
    memory_percent: int | None = None  # of the time that memory was read or written
    encoder_percent: int | None = None  # of the encoder's time
    decoder_percent: int | None = None  # of the decoder's time
    # its share since it is watched, by time on the multiprocessors
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
