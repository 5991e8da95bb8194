"""Describe the cause of a container's end in one line, readable without our documentation.

Rules
- A fault of the device, the host or a neighbour is described by the GPU, its time, and the time
  from it to the exit; an application's fault, by its meaning.
- Of several faults, the message describes the most relevant one
  (:func:`shim.causes.record.by_weight`), and counts the others.
- A fault counts for :data:`RELEVANT` seconds. Libraries may give up only minutes after a GPU has
  failed (NCCL's watchdog after ten, by default), but an older fault does not explain an exit. A
  neighbour's fault that may not have reached the container counts only for :data:`NEARBY` seconds:
  where processes take turns on a GPU, the crash of one seldom harms another.
- A neighbour is not identified: no pod, container, process or pid.
- At most :data:`LONGEST` bytes of UTF-8, without control characters. Times are UTC.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable
from typing import Final

from api.errors import one_line
from shim.causes.record import Fault, Whose, by_weight
from shim.causes.xids import Action, about

__all__ = ["LONGEST", "RELEVANT", "exit_message", "relevant"]

LONGEST: Final = 400
"""The largest message, in bytes."""
RELEVANT: Final = 1800.0
"""Seconds before a container's end in which a fault may have caused it."""
NEARBY: Final = 10.0
"""The same for a neighbour's fault that may not have reached the container."""
LATE: Final = 5.0
"""Seconds after a container's end until a fault may be recorded."""

_XID: Final = "xid"
_UUID: Final = re.compile(r"((?:GPU|MIG)-[0-9a-f]{4})[0-9a-f]{4}-[0-9a-f-]{27}")
_MINUTES: Final = 120.0
_ROOM: Final = 120  # characters of a name or an action, whose length is not bounded

_HEADS: Final = {
    Whose.DEVICE: "GPU failure",
    Whose.HOST: "Node failure",
    Whose.NEIGHBOUR: "GPU error",
    Whose.APPLICATION: "GPU error",
    Whose.UNCLEAR: "GPU error",
}
# Whose fault it is: if certain, and if uncertain.
_VERDICTS: Final = {
    Whose.DEVICE: ("Not the application's fault.", "Probably not the application's fault."),
    Whose.HOST: ("Not the application's fault.", "Probably not the application's fault."),
    Whose.NEIGHBOUR: (
        "Not this container's fault.",
        "That may have nothing to do with this container.",
    ),
    Whose.APPLICATION: ("Likely the application.",) * 2,
    Whose.UNCLEAR: ("It is not known whose fault that is.",) * 2,
}
_NEEDS: Final = {
    Action.RESET: "The GPU needs a reset.",
    Action.RESET_LATER: "The GPU needs a reset when it is free.",
    Action.REPLACE: "The GPU needs a reset, and a replacement if it fails again.",
    Action.REBOOT: "{node} needs a reboot.",
    Action.LINKS: "Check the NVLinks of {node}, and reset the GPU.",
    Action.MECHANICS: "{node} needs its power cables and cooling checked.",
    Action.SOFTWARE: "{node} needs newer driver and firmware.",
    Action.SUPPORT: "If it comes back, ask the hardware's vendor.",
    Action.DRAIN: "What uses the GPU has to end.",
    Action.DRAIN_AND_RESET: "The GPU has to be drained and needs a reset.",
    Action.IMEX: "{node} needs its IMEX domain restarted.",
    Action.BUS_RESET: "The GPU needs a reset of its bus.",
    Action.SWITCHES: "{node} needs a reset of all its GPUs and NVSwitches.",
    Action.CATALOGUE: "What the GPU needs is in NVIDIA's Xid catalogue.",
}


def relevant(faults: Iterable[Fault], end: float, start: float = 0.0) -> list[Fault]:
    """Return the faults that may be related to a container's end, most relevant first.

    Args:
        faults: all known faults of the container.
        end: when the container ended, in seconds since the epoch.
        start: when the container started, in seconds since the epoch.
    """

    def may_matter(fault: Fault) -> bool:
        is_doubtful = fault.whose == Whose.NEIGHBOUR and not fault.sure
        earliest = end - (NEARBY if is_doubtful else RELEVANT)
        return max(start - 1, earliest) <= fault.at <= end + LATE

    return by_weight(filter(may_matter, faults), end)


def exit_message(
    faults: Iterable[Fault], end: float | None = None, node: str = "", original: int | None = None
) -> str:
    """Describe faults in one line; "" if there are none.

    Args:
        faults: the faults to describe or count.
        end: when the container ended, in seconds since the epoch; None while it runs.
        node: the node's name.
        original: the container's own exit code, if containerd gets another one.
    """
    ordered = by_weight(faults, math.inf if end is None else end)
    if not ordered:
        return ""
    first, *others = ordered
    what = f"{_HEADS[first.whose]}: {_named(first)}{_place(first, end)}"
    if others:
        what += f", and {len(others)} more"
    verdict = _VERDICTS[first.whose][not first.sure]
    said = f"{what}. {verdict}"
    if first.whose != Whose.APPLICATION and (needs := _needs(first.action, node)):
        said += f" {needs}"
    if original is not None:
        said += f" The exit code was {original}."
    return _cut(said)


def _named(fault: Fault) -> str:
    name = _text(fault.name).removeprefix("the ")
    if fault.kind == _XID:
        return f"Xid {fault.code} ({name})" if name else f"Xid {fault.code}"
    return name or _text(fault.kind)


def _place(fault: Fault, end: float | None) -> str:
    """Return where and when a fault happened; for an application's fault, its meaning."""
    if fault.whose == Whose.APPLICATION:
        by = "this process" if fault.pid else "this container"
        detail = about(fault.code).detail if fault.kind == _XID else ""
        return f" by {by}: {detail}" if detail else f" by {by}"
    by = " by another process" if fault.whose == Whose.NEIGHBOUR else ""
    gpu = _text(fault.mig or fault.gpu)
    short = _UUID.fullmatch(gpu)
    on = f" on {short[1] + '…' if short else gpu}" if gpu else ""
    moment = time.strftime("%H:%M:%S", time.gmtime(fault.at))
    return f"{by}{on} at {moment}{'' if end is None else f', {_distance(end - fault.at)} exit'}"


def _distance(seconds: float) -> str:
    side = "before" if seconds >= 0 else "after"
    seconds = abs(seconds)
    if seconds < _MINUTES:
        return f"{seconds:.1f} s {side}"
    return f"{seconds / 60:.0f} min {side}"


def _needs(action: str, node: str) -> str:
    if not action:
        return ""
    said = _NEEDS.get(action)  # type: ignore[call-overload]  # an action is a str
    if said is None:
        return f"To do: {_text(action)}."
    return str(said).format(node=f"Node {_text(node)}" if node else "The node")


def _text(text: str) -> str:
    return one_line(text)[:_ROOM]


def _cut(text: str) -> str:
    """Cut a text to at most :data:`LONGEST` bytes, without splitting a character."""
    encoded = text.encode(errors="replace")
    if len(encoded) <= LONGEST:
        return encoded.decode()
    return encoded[: LONGEST - len("…".encode())].decode(errors="ignore") + "…"
