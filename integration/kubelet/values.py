"""The devices that a kubelet has allocated, as values."""

from __future__ import annotations

from collections.abc import Mapping

from api.values import dataclass

Allocated = Mapping[tuple[str, str], Mapping[str, tuple[tuple[str, str], ...]]]
"""By the pod's namespace and name, and by the container's name: resources and device ids. Pods
without containers are included."""


@dataclass(frozen=True, slots=True)
class Claimed:
    """A container's devices from a resource claim."""

    namespace: str  # the claim's
    name: str  # the claim's
    driver: str
    cdi_names: tuple[str, ...]
    container: tuple[str, str, str]  # the pod's namespace and name, and the container's name
