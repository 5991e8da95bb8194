"""What claims have, and what is thought of devices. Other parts of the agent go by it, too."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Claim", "ClaimDevice", "Health", "Sharing"]


@dataclass(frozen=True, slots=True)
class Sharing:
    """How the containers of a claim share a device, as its configuration asks.

    Attributes:
        time_slice: of :data:`~integration.node.dra.configuration.INTERVALS`; "" if it does not say.
        daemon: what its MPS control daemon is called; "" for none.
        threads: percent of the threads that a client of MPS may have.
        memory: MiB that a client of MPS may have of the device; 0 for no limit.
        multi_user: whether clients of several users may work at the same time.
    """

    time_slice: str = ""
    daemon: str = ""
    threads: int = 100
    memory: int = 0
    multi_user: bool = False


@dataclass(frozen=True, slots=True)
class ClaimDevice:
    """A device that a claim has.

    Attributes:
        request: of the claim that asked for it, without the subrequest.
        pool: of the device.
        device: its name.
        uuid: likewise.
        gpu: UUID of the GPU that it is, or is a part of.
        admin: whether the claim may only look after it (``adminAccess``): others may have it too.
        sharing: what its configuration asks for.
        share: the id of the share of it that the claim has; "" if it has all of it.
        memory: MiB of the share; 0 if it does not say.
        shares: how many of the device's the share is; 0 if it does not say.
    """

    request: str
    pool: str
    device: str
    uuid: str
    gpu: str
    admin: bool = False
    sharing: Sharing = Sharing()
    share: str = ""
    memory: int = 0
    shares: int = 0


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim that was prepared."""

    uid: str
    namespace: str
    name: str
    devices: tuple[ClaimDevice, ...]

    def __str__(self) -> str:
        return f"claim {self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class Health:
    """What is thought of a device.

    Attributes:
        message: why it is not healthy; "" if it is.
    """

    pool: str
    name: str
    is_healthy: bool
    message: str = ""
