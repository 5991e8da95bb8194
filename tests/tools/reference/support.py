"""Tables of what is tested, from what `make test-matrix` ran (tests/support.json)."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

from tests.matrix import RECORD
from tests.tools.reference.markdown import table

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["runs", "runtimes"]

_NEWEST: Final = "newest"


def _record() -> Mapping[str, Any]:
    with open(RECORD, encoding="utf-8") as file:
        found: Mapping[str, Any] = json.load(file)
    return found


def runtimes() -> str:
    """Which containerd has run with which low-level runtime, and when."""
    seen: dict[str, dict[str, str]] = defaultdict(dict)
    for run in _record().values():
        if not run["failed"]:
            seen[run["containerd"]][run["low_level"]] = run["date"]
    rows = [
        (one, ", ".join(sorted(others, key=_order)), max(others.values()))
        for one, others in sorted(seen.items(), key=lambda item: _order(item[0]))
    ]
    return table(("tested", "with", "last on"), rows).rstrip()


def runs() -> str:
    """Every run, with its figures."""
    rows = [
        (
            f"`{name}`", run["containerd"], run["low_level"], run["date"],
            str(run["passed"]), str(run["failed"]), str(run["skipped"]),
        )
        for name, run in sorted(_record().items(), key=lambda item: (item[0] != _NEWEST, item[0]))
    ]  # fmt: skip
    head = ("run", "containerd", "low-level runtime", "on", "passed", "failed", "skipped")
    return table(head, rows).rstrip()


def _order(program: str) -> tuple[str, list[int]]:
    name, _, version = program.partition(" ")
    return name, [int(part) for part in version.split(".") if part.isdecimal()]
