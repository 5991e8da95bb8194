"""Our installation and its processes: D090 to D096."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from integration.doctor.findings import Trouble, check, listed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from integration.doctor.facts import Installation

_MUCH_MEMORY: Final = 64 << 20


@check("D090")
def _dangling(installation: Installation) -> Iterator[Trouble]:
    for link in installation.dangling:
        yield Trouble(link)


@check("D091")
def _interpreter(installation: Installation) -> Iterator[Trouble]:
    fault = installation.interpreter_fault
    if fault:
        yield Trouble(fault)


@check("D092")
def _several(installation: Installation) -> Iterator[Trouble]:
    programs = installation.programs
    if len(programs) > 1:
        yield Trouble(listed(f"{path} (leads to {real})" for path, real in programs))


def _current(installation: Installation) -> str:
    return f"{installation.prefix.rstrip('/')}/{installation.current}"


@check("D093")
def _old_shims(installation: Installation) -> Iterator[Trouble]:
    if not installation.current:
        return
    old: dict[str, int] = {}
    for shim in installation.shims:
        if shim.tree and not shim.gone and shim.tree != _current(installation):
            old[shim.tree] = old.get(shim.tree, 0) + 1
    for tree, count in old.items():
        yield Trouble(f"{count} of {tree}, {installation.current} is current")
    used = {shim.tree for shim in installation.shims} | {s.tree for s in installation.servers}
    unused = [
        name
        for name in installation.trees
        if name != installation.current and f"{installation.prefix.rstrip('/')}/{name}" not in used
    ]
    if unused:
        yield Trouble(f"nothing runs of {listed(unused)}, below {installation.prefix}")


@check("D094")
def _gone(installation: Installation) -> Iterator[Trouble]:
    gone = [shim for shim in installation.shims if shim.gone]
    if gone:
        pids = listed(shim.pid for shim in gone)
        yield Trouble(f"{gone[0].tree} is gone, and {len(gone)} shims run of it: {pids}")


@check("D095")
def _memory(installation: Installation) -> Iterator[Trouble]:
    for shim in installation.shims:
        if (shim.memory or 0) > _MUCH_MEMORY:
            mebibytes = (shim.memory or 0) >> 20
            yield Trouble(f"process {shim.pid} in {shim.namespace} has {mebibytes} MiB of its own")


@check("D096")
def _servers(installation: Installation) -> Iterator[Trouble]:
    for server in installation.servers:
        if not server.works:
            yield Trouble(f"process {server.pid} of {server.address} accepts nobody")
        elif installation.current and server.tree not in {"", _current(installation)}:
            yield Trouble(f"process {server.pid} of {server.address} is of {server.tree}")
