"""The health of a device, as a value."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["DeviceHealth", "State"]


class State(StrEnum):
    """What is thought of a device. Kubelets are told two of them: the first two are healthy."""

    HEALTHY = "healthy"
    SUSPECT = "suspect"
    UNHEALTHY = "unhealthy"
    RECOVERING = "recovering"

    @property
    def is_given(self) -> bool:
        """Whether a container may get the device."""
        return self in {State.HEALTHY, State.SUSPECT}


@dataclass(frozen=True, slots=True)
class DeviceHealth:
    """What is thought of one device, and why.

    Attributes:
        uuid: of the GPU or MIG device.
        state: what is thought of it.
        since: when it came to be so, in seconds since the epoch.
        reason: one line for people; "" for one that is healthy and always was.
        xid: the last that counted; 0 for none.
        blamed: the containers that its reason is attributed to, as people call them.
    """

    uuid: str
    state: State = State.HEALTHY
    since: float = 0.0
    reason: str = ""
    xid: int = 0
    blamed: tuple[str, ...] = ()
