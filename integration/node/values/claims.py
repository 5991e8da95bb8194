"""Claims and what they have, and how the API calls devices and writes quantities.

Other parts of the agent go by it, too.

A device is called by its UUID, in lower case. A MIG device that is made for claims has none until
then: it is called by where on its GPU it is, ``GPU-UUID-mig-PROFILE-ID-START``, and its name stands
for its UUID.

Source: Kubernetes, apimachinery/pkg/api/resource, Quantity.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Final, NamedTuple

__all__ = [
    "ALL", "GPU", "INTERVALS", "MEBI", "MIG", "PART", "Claim", "ClaimDevice", "Health",
    "Reference", "Sharing", "gpu_of", "name_of", "parse_quantity", "quantity", "uuid_of",
]  # fmt: skip


GPU: Final = "gpu"
MIG: Final = "mig"
"""The kinds of devices, as their attribute ``type`` has them."""

INTERVALS: Final = ("Default", "Short", "Medium", "Long")
"""Time slices, by the driver's numbers."""

ALL: Final = 100
"""Percent."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """How the containers of a claim share a device, as its configuration asks."""

    time_slice: str = ""  # of integration.node.services.dra.claims.INTERVALS; "" if it does not say
    daemon: str = ""  # what its MPS control daemon is called; "" for none
    threads: int = ALL  # percent of the threads that a client of MPS may have
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


class Reference(NamedTuple):
    """A claim as the kubelet names it."""

    namespace: str
    uid: str
    name: str

    def __str__(self) -> str:
        return f"claim {self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim that was prepared."""

    uid: str
    namespace: str
    name: str
    devices: tuple[ClaimDevice, ...]

    @property
    def reference(self) -> Reference:
        """It, as the kubelet names it."""
        return Reference(self.namespace, self.uid, self.name)

    def __str__(self) -> str:
        return str(self.reference)


@dataclass(frozen=True, slots=True)
class Health:
    """What is thought of a device."""

    pool: str
    name: str
    is_healthy: bool
    message: str = ""  # why it is not healthy; "" if it is


PART: Final = re.compile(r"gpu-([0-9a-f-]{36})-mig-(?:[a-z0-9-]+-)?(\d+)-(\d+)", re.ASCII)
"""The name of a MIG device that is made for claims: its GPU's UUID, its profile's number, and the
first of its memory slices."""

_OTHER: Final = re.compile(r"[^a-z0-9-]+")


def name_of(uuid: str) -> str:
    """What a device of a UUID is called; "MIG-GPU-…/1/0", as older drivers say it, too."""
    return _OTHER.sub("-", uuid.lower())


def gpu_of(name: str) -> str:
    """The UUID of the GPU of a device that is made for claims, by its name; "" if it is none."""
    found = PART.fullmatch(name)
    return f"GPU-{found[1]}" if found else ""


def uuid_of(name: str) -> str:
    """The UUID of the device of a name, or what stands for it."""
    if PART.fullmatch(name):
        return name
    kind, _, rest = name.partition("-")
    return f"{kind.upper()}-{rest}"


MEBI: Final = 1 << 20

_FORM: Final = re.compile(
    r"([0-9]{1,20}(?:\.[0-9]{0,9})?|\.[0-9]{1,9})(?:([KMGTPE]i)|([numkMGTPE])|[eE]([0-9]{1,2}))?",
    re.ASCII,
)
_BINARY: Final = {f"{letter}i": 1 << 10 * n for n, letter in enumerate("KMGTPE", 1)}
_DECIMAL: Final = {
    letter: Decimal(1000) ** n
    for letter, n in zip("numkMGTPE", (-3, -2, -1, 1, 2, 3, 4, 5, 6), strict=True)
}


def parse_quantity(value: object) -> int | None:
    """A quantity as a whole number, rounded up; None if it is none, or is negative."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    found = _FORM.fullmatch(str(value))
    if found is None:
        return None
    number, binary, decimal, exponent = found.groups()
    scale = Decimal(_BINARY[binary]) if binary else _DECIMAL.get(decimal, Decimal(1))
    return math.ceil(Decimal(number) * scale * Decimal(10) ** int(exponent or 0))


def quantity(size: int) -> str:
    """Bytes as the API server writes them itself, so that what it keeps is what was sent."""
    for unit, suffix in ((1 << 40, "Ti"), (1 << 30, "Gi"), (MEBI, "Mi")):
        if size % unit == 0:
            return f"{size // unit}{suffix}"
    return f"{size // MEBI}Mi"
