"""What is thought of a device, in a word."""

from __future__ import annotations

from enum import StrEnum


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
