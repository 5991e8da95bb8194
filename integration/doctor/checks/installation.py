"""Our installation and its processes: D090 to D096."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from integration.doctor.facts import seen
from integration.doctor.findings import Check, Severity, Trouble, listed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from integration.doctor.facts import Installation, Node

__all__ = ["INSTALLATION"]

_ERROR, _WARNING, _NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE

_MUCH_MEMORY: Final = 64 << 20


def _dangling(node: Node) -> Iterator[Trouble]:
    for link in seen(node.installation).dangling:
        yield Trouble(link)


def _interpreter(node: Node) -> Iterator[Trouble]:
    fault = seen(node.installation).interpreter_fault
    if fault:
        yield Trouble(fault)


def _several(node: Node) -> Iterator[Trouble]:
    programs = seen(node.installation).programs
    if len(programs) > 1:
        yield Trouble(listed(f"{path} (leads to {real})" for path, real in programs))


def _current(installation: Installation) -> str:
    return f"{installation.prefix.rstrip('/')}/{installation.current}"


def _old_shims(node: Node) -> Iterator[Trouble]:
    installation = seen(node.installation)
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


def _gone(node: Node) -> Iterator[Trouble]:
    gone = [shim for shim in seen(node.installation).shims if shim.gone]
    if gone:
        pids = listed(shim.pid for shim in gone)
        yield Trouble(f"{gone[0].tree} is gone, and {len(gone)} shims run of it: {pids}")


def _memory(node: Node) -> Iterator[Trouble]:
    for shim in seen(node.installation).shims:
        if (shim.memory or 0) > _MUCH_MEMORY:
            mebibytes = (shim.memory or 0) >> 20
            yield Trouble(f"process {shim.pid} in {shim.namespace} has {mebibytes} MiB of its own")


def _servers(node: Node) -> Iterator[Trouble]:
    installation = seen(node.installation)
    for server in installation.servers:
        if not server.answers:
            yield Trouble(f"process {server.pid} of {server.address} accepts nobody")
        elif installation.current and server.tree not in {"", _current(installation)}:
            yield Trouble(f"process {server.pid} of {server.address} is of {server.tree}")


_NEEDS: Final = ("installation",)

INSTALLATION: Final = (
    Check(
        code="NVSHIM-D090",
        severity=_ERROR,
        title="a link of ours leads nowhere",
        why="containerd finds no shim, and makes no container of ours.",
        remedy="install again",
        command="nvshim install",
        needs=_NEEDS,
        look=_dangling,
    ),
    Check(
        code="NVSHIM-D091",
        severity=_ERROR,
        title="the shim's interpreter is gone",
        why="A shim is started by the fork server as long as there is one; the first that is "
        "not, fails.",
        remedy="install again, with its own interpreter",
        command="nvshim install",
        needs=_NEEDS,
        look=_interpreter,
    ),
    Check(
        code="NVSHIM-D092",
        severity=_WARNING,
        title="several programs containerd-shim-nvidia-v1 are on the search path",
        why="Which one containerd takes depends on its PATH; an update changes only one.",
        remedy="remove all but one",
        needs=_NEEDS,
        look=_several,
    ),
    Check(
        code="NVSHIM-D093",
        severity=_NOTE,
        title="there is more than the current version of ours",
        why="Shims go on with the version that they were started with, until their pod ends. What "
        "nothing uses any more takes room.",
        remedy="nothing; what is unused goes with the next installation",
        needs=_NEEDS,
        look=_old_shims,
    ),
    Check(
        code="NVSHIM-D094",
        severity=_ERROR,
        title="shims run of a version that was removed",
        why="What a shim has not imported yet, it cannot import any more: an exec, a checkpoint or "
        "a new container of the pod may fail.",
        remedy="recreate the pods of these shims",
        needs=_NEEDS,
        look=_gone,
    ),
    Check(
        code="NVSHIM-D095",
        severity=_WARNING,
        title="a shim has much memory of its own",
        why="A shim needs about 4 MiB; more grows with the containers of its pod, or is a leak.",
        remedy="send it SIGUSR1, which writes to containerd's log what it does, and report that",
        needs=_NEEDS,
        look=_memory,
    ),
    Check(
        code="NVSHIM-D096",
        severity=_WARNING,
        title="a fork server does not do its work",
        why="Shims are started without it, in ten times the time.",
        remedy="end it; the next container leaves a new one behind",
        needs=_NEEDS,
        look=_servers,
    ),
)
