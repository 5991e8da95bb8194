"""What claims have, and what is thought of devices. Other parts of the agent go by it, too."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Claim", "ClaimDevice", "Health", "Sharing"]


@dataclass(frozen=True, slots=True)
class Sharing:
    """How the containers of a claim share a device, as its configuration asks."""

    time_slice: str = ""  # of integration.node.dra.configuration.INTERVALS; "" if it does not say
    daemon: str = ""  # what its MPS control daemon is called; "" for none
    threads: int = 100  # percent of the threads that a client of MPS may have
    memory: int = 0  # MiB that a client of MPS may have of the device; 0 for no limit
    multi_user: bool = False  # whether clients of several users may work at the same time


@dataclass(frozen=True, slots=True)
class ClaimDevice:
    """A device that a claim has."""

    request: str  # of the claim that asked for it, without the subrequest
    pool: str  # of the device
    device: str  # its name
    uuid: str  # likewise
    gpu: str  # UUID of the GPU that it is, or is a part of
    # whether the claim may only look after it (``adminAccess``): others may have it too
    admin: bool = False
    sharing: Sharing = Sharing()  # what its configuration asks for
    share: str = ""  # the id of the share of it that the claim has; "" if it has all of it
    memory: int = 0  # MiB of the share; 0 if it does not say
    shares: int = 0  # how many of the device's the share is; 0 if it does not say


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
    """What is thought of a device."""

    pool: str
    name: str
    is_healthy: bool
    message: str = ""  # why it is not healthy; "" if it is
