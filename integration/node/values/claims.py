"""Resource claims and their devices, and device names and quantities in the API's notation.

Every service of the agent may use these values.

A device's name is its UUID, in lower case. A MIG device that the driver creates for a claim has no
UUID before that. Its name then consists of its place on its GPU (``GPU-UUID-mig-PROFILE-ID-START``)
and stands in for the UUID.

Source: Kubernetes, apimachinery/pkg/api/resource, Quantity.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal
from enum import StrEnum
from typing import Final, NamedTuple

from api.values import dataclass, field, replace

__all__ = [
    "ALL", "GPU", "INTERVALS", "MEBI", "MIG", "PART", "Claim", "ClaimDevice", "ClaimPhase",
    "Health", "Reference", "Sharing", "gpu_of", "name_of", "parse_quantity", "quantity", "uuid_of",
]  # fmt: skip


GPU: Final = "gpu"
MIG: Final = "mig"
"""The values of a device's attribute ``type``."""

INTERVALS: Final = ("Default", "Short", "Medium", "Long")
"""Time slices; the index is the driver's number."""

ALL: Final = 100
"""Percent."""


class ClaimPhase(StrEnum):
    """How far the driver has come with a claim. The values are the checkpoint's words."""

    PREPARING = "preparing"  # its devices are reserved; the kubelet has no answer yet
    PREPARED = "prepared"


@dataclass(frozen=True, slots=True)
class Sharing:
    """How the containers of a claim share a device, as its configuration says."""

    time_slice: str = ""  # one of INTERVALS; "" if the configuration names none
    daemon: str = ""  # the name of its MPS control daemon; "" for none
    threads: int = ALL  # percent of the threads that an MPS client may use
    memory: int = 0  # MiB of the device that an MPS client may use; 0 for no limit
    multi_user: bool = False  # whether clients of several users may run at the same time


@dataclass(frozen=True, slots=True)
class ClaimDevice:
    """A device of a claim."""

    request: str  # the request of the claim that asked for it, without the subrequest
    pool: str
    device: str  # its name
    uuid: str  # its UUID, or its name before it is created
    gpu: str  # UUID of the GPU that it is, or is a part of
    # whether the claim has admin access (``adminAccess``): other claims may have the device too
    admin: bool = False
    sharing: Sharing = Sharing()
    share: str = ""  # the id of the claim's share of the device; "" for the whole device
    memory: int = 0  # MiB of the share; 0 if the allocation does not say
    shares: int = 0  # how many of the device's shares; 0 if the allocation does not say
    # the subrequest that the scheduler chose ("any" of "gpu/any"); "" without a choice
    chosen: str = field(default="", compare=False)


class Reference(NamedTuple):
    """A claim as the kubelet names it."""

    namespace: str
    uid: str
    name: str

    def __str__(self) -> str:
        return f"claim {self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim for which devices are reserved or prepared.

    Claims are equal if they have the same devices, whatever their phases.
    """

    uid: str
    namespace: str
    name: str
    devices: tuple[ClaimDevice, ...]
    phase: ClaimPhase = field(default=ClaimPhase.PREPARED, compare=False)
    # what it had prepared before the transaction that is now in progress
    previous: tuple[ClaimDevice, ...] = field(default=(), compare=False)
    # the pod's name for a claim made from a template; "" for other claims, None if unknown
    pod_claim: str | None = field(default="", compare=False)
    # whether its containers get files with the attributes of its devices
    has_metadata: bool = field(default=False, compare=False)

    @property
    def reference(self) -> Reference:
        """The claim as the kubelet names it."""
        return Reference(self.namespace, self.uid, self.name)

    @property
    def is_prepared(self) -> bool:
        """Whether the last transaction on it is complete."""
        return self.phase is ClaimPhase.PREPARED

    @property
    def before(self) -> Claim | None:
        """The claim as it was before the transaction in progress; None if it had no devices."""
        if self.is_prepared:
            return self
        if not self.previous:
            return None
        return replace(self, devices=self.previous, phase=ClaimPhase.PREPARED, previous=())

    @property
    def held(self) -> tuple[ClaimDevice, ...]:
        """All devices that no other claim may get now."""
        return (*self.devices, *(each for each in self.previous if each not in self.devices))

    def __str__(self) -> str:
        return str(self.reference)


@dataclass(frozen=True, slots=True)
class Health:
    """The health of a device, as the kubelet gets it."""

    pool: str
    name: str
    is_healthy: bool
    message: str = ""  # why it is not healthy; "" if it is


PART: Final = re.compile(r"gpu-([0-9a-f-]{36})-mig-(?:[a-z0-9-]+-)?(\d+)-(\d+)", re.ASCII)
"""The name of a MIG device that the driver creates: its GPU's UUID, its profile's number, and its
first memory slice."""

_OTHER: Final = re.compile(r"[^a-z0-9-]+")


def name_of(uuid: str) -> str:
    """Return the name of a device; older drivers write UUIDs such as "MIG-GPU-…/1/0"."""
    return _OTHER.sub("-", uuid.lower())


def gpu_of(name: str) -> str:
    """Return the GPU's UUID from the name of a device that the driver creates; "" for others."""
    found = PART.fullmatch(name)
    return f"GPU-{found[1]}" if found else ""


def uuid_of(name: str) -> str:
    """Return the UUID of a device from its name, or what stands in for the UUID."""
    if PART.fullmatch(name):
        return name
    kind, _, rest = name.partition("-")
    return f"{kind.upper()}-{rest}"


MEBI: Final = 1 << 20

_FORM: Final = re.compile(
    r"\+?([0-9]{1,20}(?:\.[0-9]{0,9})?|\.[0-9]{1,9})"
    r"(?:([KMGTPE]i)|([numkMGTPE])|[eE]([+-]?[0-9]{1,2}))?",
    re.ASCII,
)
_BINARY: Final = {f"{letter}i": 1 << 10 * n for n, letter in enumerate("KMGTPE", 1)}
_DECIMAL: Final = {
    letter: Decimal(1000) ** n
    for letter, n in zip("numkMGTPE", (-3, -2, -1, 1, 2, 3, 4, 5, 6), strict=True)
}


def parse_quantity(value: object) -> int | None:
    """Return a quantity as a whole number, rounded up; None if it is invalid or negative."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    found = _FORM.fullmatch(str(value))
    if found is None:
        return None
    number, binary, decimal, exponent = found.groups()
    scale = Decimal(_BINARY[binary]) if binary else _DECIMAL.get(decimal, Decimal(1))
    return math.ceil(Decimal(number) * scale * Decimal(10) ** int(exponent or 0))


def quantity(size: int) -> str:
    """Return bytes as the API server writes them, so that it stores exactly what it gets."""
    for unit, suffix in ((1 << 40, "Ti"), (1 << 30, "Gi"), (MEBI, "Mi")):
        if size % unit == 0:
            return f"{size // unit}{suffix}"
    return f"{size // MEBI}Mi"
