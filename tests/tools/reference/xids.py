"""What each error of the driver makes of a device, from the agent's table."""

from __future__ import annotations

from typing import Final

from integration.node.health.xids import XIDS, Scope, Severity
from tests.tools.reference.markdown import code, prose, table

__all__ = ["page"]

_HEAD: Final = """\
# Errors of the driver

NVIDIA's driver numbers its errors (XIDs). `nvshim node` goes by this table, made after NVIDIA's own
catalogue; `xids` in [`[health]`](configuration.md) changes it, and so do `DP_DISABLE_HEALTHCHECKS`
and `DP_ENABLE_HEALTHCHECKS`, as with NVIDIA's device plugin. A number that is not here makes a
device unhealthy.
"""

_SEVERITIES: Final = (
    (Severity.IGNORE, "is said and counted", "at once"),
    (
        Severity.SUSPECT,
        "the device is suspect, and still given; several in a while make it unhealthy",
        "by itself, after a while without an error",
    ),
    (
        Severity.UNHEALTHY,
        "the device is not given",
        "by itself: it has to answer without an error for the quiet time",
    ),
    (
        Severity.FATAL,
        "the device is not given, nor any other of its GPU",
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
    rows = [
        (
            str(xid.number),
            code(xid.name),
            prose(xid.meaning),
            code(xid.severity.value),
            _SCOPES[xid.scope],
            xid.whose.value if xid.ends else "",
            prose(xid.remedy.value),
        )
        for xid in XIDS.values()
    ]
    head = ("XID", "name", "meaning", "severity", "of", "fault", "what to do")
    return (
        f"{_HEAD}\n{severities}\n"
        "A person can put a device back at any time: `nvshim health clear`.\n\n"
        "Of a GPU in MIG mode an error is of the instance that it names, or of the whole GPU: the "
        "column *of*.\n\n"
        "The column *fault* says whose it is by the number alone, when the end of a container is\n"
        "explained. It is empty for errors that end no container.\n\n"
        f"{table(head, rows)}"
    )
