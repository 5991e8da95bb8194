"""The health state of a device."""

from __future__ import annotations

from enum import StrEnum


class HealthState(StrEnum):
    """The health state of a device. The kubelet sees the first two as healthy, the others not."""

    HEALTHY = "healthy"
    SUSPECT = "suspect"
    UNHEALTHY = "unhealthy"
    RECOVERING = "recovering"

    @property
    def is_allocatable(self) -> bool:
        """Whether a container may get the device."""
        return self in {HealthState.HEALTHY, HealthState.SUSPECT}
