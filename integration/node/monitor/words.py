"""What a child says, read with care: it speaks for a foreign library that may be broken.

Whatever does not fit is None, and the caller decides what that means; nothing here raises.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

from api.errors import one_line

__all__ = ["entries", "line_of", "number", "parse", "text", "uuid"]

_UUID: Final = re.compile(
    r"(GPU|MIG)-([0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12})", re.IGNORECASE
)
_LONGEST: Final = 200


def parse(line: bytes) -> dict[str, Any]:
    """One line.

    Args:
        line: without its end.

    Returns:
        The object that it is; an empty one if it is none.
    """
    try:
        said = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}


def number(value: Any, most: float, least: float = 0, *, fraction: bool = False) -> Any:
    """A number between two others, both included; None for anything else.

    Args:
        fraction: whether it need not be whole.
    """
    kinds = (int, float) if fraction else (int,)
    if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= most:
        return None
    return value


def uuid(value: Any, kind: str) -> str:
    """A UUID of NVML.

    Args:
        kind: "GPU" or "MIG".

    Returns:
        It, in lower case after the kind; "" for anything else.
    """
    match = _UUID.fullmatch(value) if isinstance(value, str) else None
    if match is None or match[1].upper() != kind:
        return ""
    return f"{kind}-{match[2].lower()}"


def text(value: Any) -> str:
    """A text for people, on one line; "" for anything else."""
    return line_of(value) if isinstance(value, str) else ""


def line_of(value: str) -> str:
    """A text on one line, not too long."""
    return one_line(value[:_LONGEST])


def entries(value: Any, most: int) -> list[Any]:
    """A list's first entries; none if it is no list."""
    return value[:most] if isinstance(value, list) else []
