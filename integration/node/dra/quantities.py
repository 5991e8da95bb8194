"""Quantities as Kubernetes writes them: "10Gi", "512M", "1e9", 4.

Source: Kubernetes, apimachinery/pkg/api/resource, Quantity.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Final

__all__ = ["MEBI", "parse_quantity", "quantity"]

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
