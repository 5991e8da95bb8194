"""What each error of the driver makes of a device, from the agent's table."""

from __future__ import annotations

import re
from typing import Final

from integration.node.health.xids import XIDS, Scope, Severity
from tests.tools.reference.markdown import code, prose, table

__all__ = ["page"]

_HEAD: Final = """\
# Errors of the driver

Look up an XID from the kernel's log, `nvshim list --health` or an event of the node agent. The
table follows NVIDIA's catalogue; a number that is not here makes a device unhealthy. To change it,
set `xids` in [`[health]`](configuration.md), or, as with NVIDIA's device plugin,
`DP_DISABLE_HEALTHCHECKS` and `DP_ENABLE_HEALTHCHECKS`.
"""

_COLUMNS: Final = """\
To put a device back at any time, run `nvshim health clear`.

*of*: on a GPU in MIG mode, the error is that of the instance it names, or of the whole GPU.
*fault*: whose it is, when the end of a container is explained; empty if it ends no container.
"""

# Of engines that are there several times.
_NUMBER: Final = re.compile(r" \d+(?=: exception$)")

_SEVERITIES: Final = (
    (Severity.IGNORE, "logged and counted", "at once"),
    (
        Severity.SUSPECT,
        "the device is still given; several in a while make it unhealthy",
        "after a while without an error",
    ),
    (
        Severity.UNHEALTHY,
        "the device is not given",
        "after the quiet time without an error",
    ),
    (
        Severity.FATAL,
        "no device of the GPU is given",
        "as above, once a reset, a reload of the driver or a boot was seen",
    ),
)

_SCOPES: Final = {Scope.GPU: "GPU", Scope.INSTANCE: "instance"}


def page() -> str:
    """The page of all errors."""
    severities = table(
        ("severity", "what it means", "when the device is well again"),
        [(code(severity.value), means, over) for severity, means, over in _SEVERITIES],
    )
    alike: dict[tuple[str, ...], list[int]] = {}
    for xid in XIDS.values():
        cells = (
            code(xid.name),
            prose(_NUMBER.sub("", xid.meaning)),
            code(xid.severity.value),
            _SCOPES[xid.scope],
            xid.whose.value if xid.ends else "",
            prose(xid.remedy.value),
        )
        alike.setdefault(cells, []).append(xid.number)
    rows = [(_ranges(numbers), *cells) for cells, numbers in alike.items()]
    head = ("XID", "name", "meaning", "severity", "of", "fault", "what to do")
    return f"{_HEAD}\n{severities}\n{_COLUMNS}\n{table(head, rows)}"


def _ranges(numbers: list[int]) -> str:
    """Numbers, with a range in place of those that follow each other: ``39-41, 70``."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)
