"""What strace wrote about a package, and how it differs from the table."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Final

from hooks.node.capabilities import ControlNode, Socket
from integration.inspection.driver_files import capabilities_of, rows_named
from integration.inspection.driver_packages import Package, normalized

__all__ = ["WITHOUT", "Observed", "Outcome", "differences", "is_chosen", "outcome", "shown_by"]

WITHOUT: Final = {
    "compute": "utility,graphics",
    "utility": "compute,video,graphics",
    "video": "compute,utility,graphics",
    "graphics": "compute,utility,video",
}
"""What to grant in order to leave out a capability: ``video`` has the libraries of ``compute``."""

# strace -f -o has the file, LD_DEBUG=libs the name that led to it, often by the loader's cache.
_OPENED: Final = re.compile(r'open(?:at2?)?\([^"]*"([^"]+)".*\) += (-?\d+)')
_UNFINISHED: Final = "<unfinished ...>"
_SEARCHED: Final = re.compile(r"^ *\d+:\tfind library=(\S+) \[", re.MULTILINE)
_VERSIONED: Final = re.compile(r"(?:\.so\.|-)\d+\.\d+")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a program ended in a container."""

    text: str  # what it wrote, and its exit code
    found: frozenset[str]  # the rows of the driver's table whose files it has opened
    sought: tuple[str, ...] = ()  # the driver's files that it looked for, in order


@dataclass(frozen=True, slots=True)
class Observed:
    """What a package did in containers."""

    with_all: Outcome  # with all capabilities
    with_needs: Outcome  # with those that the table says it needs
    without: Mapping[str, Outcome]  # without one of those, by the capability


def outcome(text: str, searched: str, opened: str) -> Outcome:
    """Return how a program ended.

    What it looked for are libraries in order, then other files. Device nodes are left out, and
    files with the driver's version in their names: the driver's own libraries open those.

    Args:
        text: what it wrote, and its exit code.
        searched: the output of the dynamic loader with ``LD_DEBUG=libs``.
        opened: that of ``strace -f -o``.
    """
    calls = filter(None, map(_OPENED.match, _calls(opened)))
    opens = [(call[1], int(call[2]) >= 0, _rows(call[1])) for call in calls]
    paths = [path for path, _, rows in opens if rows and ".so" not in posixpath.basename(path)]
    libraries = [name for name in _SEARCHED.findall(searched) if _rows(name)]
    names = [posixpath.basename(path) for path in (*libraries, *paths)]
    sought = dict.fromkeys(name for name in names if not _VERSIONED.search(name))
    return Outcome(text, frozenset(n for _, ok, rows in opens if ok for n in rows), tuple(sought))


def _calls(trace: str) -> Iterator[str]:
    """Yield system calls; strace has one in two lines if another process comes between."""
    started: dict[str, str] = {}
    for line in trace.splitlines():
        pid, _, call = line.partition(" ")
        call = call.lstrip()
        if call.endswith(_UNFINISHED):
            started[pid] = call.removesuffix(_UNFINISHED)
        elif call.startswith("<... ") and pid in started:
            yield started.pop(pid) + call.partition(" resumed>")[2]
        else:
            yield call


@cache
def _rows(path: str) -> tuple[str, ...]:
    return tuple(row.name for row in rows_named(path) if not isinstance(row, ControlNode | Socket))


def differences(package: Package, seen: Observed) -> Iterator[str]:
    """Yield what the table does not say, one line each; nothing if it is still right."""
    opens, all_of_it = seen.with_all.sought, seen.with_all.text
    # Of a package that was not traced, it is news that it opens one of them.
    known = {*package.opens, *(package.mentions if "traced" in package.how else ())}
    expected = [name for name in package.opens if not name.startswith("/dev/")]
    if gone := [name for name in expected if name not in opens]:
        yield f"does not open {', '.join(gone)}"
    if new := [name for name in opens if name not in known]:
        yield f"opens {', '.join(new)}, too"
    if not gone and [name for name in opens if name in expected] != expected:
        yield "opens them in another order"
    if seen.with_needs.text != all_of_it:
        needs = ",".join(package.needs)
        yield f"with {needs}: {_short(seen.with_needs.text)}; with all: {_short(all_of_it)}"
    for capability, result in seen.without.items():
        if (result.text, result.found) == (all_of_it, seen.with_all.found):
            yield f"does not need {capability}: without it {_short(result.text)}, too"


def _short(text: str) -> str:
    return repr(" ".join(text.split())[:200])


def shown_by(package: Package) -> list[str]:
    """Return the needed capabilities whose files a package opens, and does not only mention."""
    opened = {c for name in package.opens for c in capabilities_of(rows_named(name))}
    return [each for each in package.needs if each in opened]


def is_chosen(package: Package, only: Iterable[str]) -> bool:
    """Whether a package is among some names; every one is if there are none."""
    wanted = {normalized(name) for name in only}
    return not wanted or not wanted.isdisjoint(package.names)
