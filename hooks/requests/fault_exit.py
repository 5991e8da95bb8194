"""Which exit code a container wants to have if a failure of a GPU ends it.

A container says so by the annotation :data:`ANNOTATION`. It is its own exit code, so whoever may
annotate it may say so. "0" keeps the container's own, whatever the node's configuration says
(``fault-exit-code`` in ``[node]``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from hooks.errors import FaultExitCodeWrong

ANNOTATION: Final = "io.containerd.nvidia.v1.fault-exit-code"

_LARGEST: Final = 255
_DIGITS: Final = 3


def read_wish(spec: Mapping[str, Any]) -> int | None:
    """The exit code that a container wants.

    Args:
        spec: config.json, decoded.

    Returns:
        1 to 255; 0 to keep its own; None if it does not say.

    Raises:
        FaultExitCodeWrong: it says something else.
    """
    annotations = spec.get("annotations")
    if not isinstance(annotations, dict) or ANNOTATION not in annotations:
        return None
    wish = annotations[ANNOTATION]
    if isinstance(wish, str) and wish.isascii() and wish.isdigit() and len(wish) <= _DIGITS:
        code = int(wish)
        if code <= _LARGEST:
            return code
    raise FaultExitCodeWrong(
        f"annotation {ANNOTATION}",
        found=f"{wish!r}",
        do="write an exit code, 1 to 255, or 0 for the container's own",
    )
