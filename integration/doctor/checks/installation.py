"""The shim's installation and processes: D090 to D096."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from integration.doctor.facts import Installation
from integration.doctor.findings import check, listed

_MUCH_MEMORY: Final = 64 << 20


@check("D090")
def _dangling(installation: Installation) -> Iterable[str]:
    return installation.dangling


@check("D091")
def _interpreter(installation: Installation) -> Iterable[str]:
    return filter(None, [installation.interpreter_fault])


@check("D092")
def _several(installation: Installation) -> Iterable[str]:
    programs = [f"{path} (leads to {real})" for path, real in installation.programs]
    return [listed(programs)] if len(programs) > 1 else ()


def _current(installation: Installation) -> str:
    return f"{installation.prefix.rstrip('/')}/{installation.current}"


@check("D093")
def _old_shims(installation: Installation) -> Iterator[str]:
    if not installation.current:
        return
    old: dict[str, int] = {}
    for shim in installation.shims:
        if shim.tree and not shim.gone and shim.tree != _current(installation):
            old[shim.tree] = old.get(shim.tree, 0) + 1
    for tree, count in old.items():
        shims = "shim runs" if count == 1 else "shims run"
        yield f"{count} {shims} from {tree}; {installation.current} is current"
    used = {shim.tree for shim in installation.shims} | {s.tree for s in installation.servers}
    unused = [
        name
        for name in installation.trees
        if name != installation.current and f"{installation.prefix.rstrip('/')}/{name}" not in used
    ]
    if unused:
        yield f"unused below {installation.prefix}: {listed(unused)}"


@check("D094")
def _gone(installation: Installation) -> Iterator[str]:
    gone = [shim for shim in installation.shims if shim.gone]
    if gone:
        pids = listed(shim.pid for shim in gone)
        yield f"{gone[0].tree} was removed, but {len(gone)} shims run from it (process {pids})"


@check("D095")
def _memory(installation: Installation) -> Iterator[str]:
    for shim in installation.shims:
        if (shim.memory or 0) > _MUCH_MEMORY:
            mebibytes = (shim.memory or 0) >> 20
            yield f"process {shim.pid} in {shim.namespace} uses {mebibytes} MiB of private memory"


@check("D096")
def _servers(installation: Installation) -> Iterator[str]:
    for server in installation.servers:
        if not server.works:
            yield f"process {server.pid} for {server.address} accepts no connections"
        elif installation.current and server.tree not in {"", _current(installation)}:
            yield f"process {server.pid} for {server.address} runs from the old {server.tree}"
