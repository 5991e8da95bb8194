"""How vendors, classes and devices may be called.

==========  ==============================================  =====================
part        characters, beginning with / ending with        longest
==========  ==============================================  =====================
vendor      A-Z a-z 0-9 _ - . ; letter / letter or digit    253
class       A-Z a-z 0-9 _ - . ; letter / letter or digit    63
device      A-Z a-z 0-9 _ - . : ; letter or digit / same    253
==========  ==============================================  =====================

Source: CDI specification, "Kind" and "CDI Devices". It sets no limit on a device's name; ours is
that of a file's name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from hooks.cdi.errors import CdiNameMalformed

__all__ = ["QualifiedName", "fault_of_class", "fault_of_device", "fault_of_vendor", "parse"]

_LABEL: Final = re.compile(r"[A-Za-z](?:[A-Za-z0-9_.-]*[A-Za-z0-9])?", re.ASCII)
_DEVICE: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.:-]*[A-Za-z0-9])?", re.ASCII)
_LONGEST_VENDOR: Final = 253
_LONGEST_CLASS: Final = 63
_LONGEST_DEVICE: Final = 253


@dataclass(frozen=True, slots=True)
class QualifiedName:
    """The full name of a device, ``vendor/class=device``."""

    vendor: str
    class_: str
    device: str

    @property
    def kind(self) -> str:
        """Vendor and class, as a spec file has them."""
        return f"{self.vendor}/{self.class_}"

    def __str__(self) -> str:
        return f"{self.kind}={self.device}"


def parse(text: str) -> QualifiedName:
    """A device's full name.

    Args:
        text: as the container says it.

    Returns:
        Its parts.

    Raises:
        CdiNameMalformed: it has not the form of one.
    """
    kind, equals, device = text.partition("=")
    vendor, slash, class_ = kind.partition("/")
    if not (equals and slash):
        fault = "it is not of the form vendor/class=name"
    else:
        fault = fault_of_vendor(vendor) or fault_of_class(class_) or fault_of_device(device)
    if fault:
        raise CdiNameMalformed(
            f"the CDI device {text!r}", found=fault, do="write it as vendor.com/class=name"
        )
    return QualifiedName(vendor, class_, device)


def fault_of_vendor(vendor: str) -> str:
    """What is wrong with a vendor's name; "" if nothing is."""
    return _fault("vendor", vendor, _LABEL, _LONGEST_VENDOR)


def fault_of_class(class_: str) -> str:
    """What is wrong with a class's name; "" if nothing is."""
    return _fault("class", class_, _LABEL, _LONGEST_CLASS)


def fault_of_device(device: str) -> str:
    """What is wrong with a device's name; "" if nothing is."""
    return _fault("device", device, _DEVICE, _LONGEST_DEVICE)


def _fault(what: str, name: str, pattern: re.Pattern[str], longest: int) -> str:
    if not name:
        return f"the name of the {what} is empty"
    if len(name) > longest:
        return f"the name of the {what} is longer than {longest} characters"
    if not pattern.fullmatch(name):
        return f"{name!r} is no name of a {what}"
    return ""
