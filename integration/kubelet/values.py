"""What the kubelet says it has allocated, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Allocated = Mapping[tuple[str, str], Mapping[str, tuple[tuple[str, str], ...]]]
"""What the kubelet has given: by the pod's namespace and name, and the container's name, resources
and their device ids. A pod without containers is known as well."""


@dataclass(frozen=True, slots=True)
class Claimed:
    """A device that a container has by a resource claim, as the kubelet says."""

    namespace: str  # of the claim
    name: str  # likewise
    driver: str
    cdi_names: tuple[str, ...]
    container: tuple[str, str, str]  # the pod's namespace and name, and the container's name
