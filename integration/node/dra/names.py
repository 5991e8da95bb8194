"""What the API calls devices, and which they are by that. Pure; for the device plugin, too.

A device is called by its UUID, in lower case. A MIG device that is made for claims has none until
then: it is called by where on its GPU it is, ``GPU-UUID-mig-PROFILE-ID-START``, and its name stands
for its UUID.
"""

from __future__ import annotations

import re
from typing import Final

__all__ = ["PART", "gpu_of", "name_of", "uuid_of"]

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
