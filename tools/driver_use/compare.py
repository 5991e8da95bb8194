"""Parse strace's output about a package, and compare it with the table."""

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
    """The outcome of a program in a container."""

    text: str  # its output and exit code
    found: frozenset[str]  # the rows of the driver's table whose files it has opened
    sought: tuple[str, ...] = ()  # the driver's files that it looked for, in order


@dataclass(frozen=True, slots=True)
class Observed:
    """What a package did in containers."""

    with_all: Outcome  # with all capabilities
    with_needs: Outcome  # with those that it needs by the table
    without: Mapping[str, Outcome]  # without one of those, by the capability


def outcome(text: str, searched: str, opened: str) -> Outcome:
    """Return the outcome of a program.

    ``sought`` has libraries in order, then other files. Device nodes are left out, and
    files with the driver's version in their names: the driver's own libraries open those.

    Args:
        text: its output and exit code.
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
    """Yield system calls; strace splits one if another process interrupts it."""
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
    """Yield differences from the table, one line each."""
    opens, all_of_it = seen.with_all.sought, seen.with_all.text
    # If a package was not traced before, any file that it opens is a difference.
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
    """Return the needed capabilities whose files a package really opens."""
    opened = {c for name in package.opens for c in capabilities_of(rows_named(name))}
    return [each for each in package.needs if each in opened]


def is_chosen(package: Package, only: Iterable[str]) -> bool:
    """Whether a package is in a list of names; an empty list means all."""
    wanted = {normalized(name) for name in only}
    return not wanted or not wanted.isdisjoint(package.names)
