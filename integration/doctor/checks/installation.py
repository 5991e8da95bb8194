"""Our installation and its processes: D090 to D096."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from integration.doctor.findings import ERROR, NOTE, WARNING, Trouble, check, listed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from integration.doctor.facts import Installation

_MUCH_MEMORY: Final = 64 << 20


@check(
    "NVSHIM-D090",
    ERROR,
    "a link of ours leads nowhere",
    why="containerd finds no shim, and makes no container of ours.",
    remedy="install again",
    command="nvshim install",
)
def _dangling(installation: Installation) -> Iterator[Trouble]:
    for link in installation.dangling:
        yield Trouble(link)


@check(
    "NVSHIM-D091",
    ERROR,
    "the shim's interpreter is gone",
    why=(
        "A shim is started by the fork server as long as there is one; the first that is "
        "not, fails."
    ),
    remedy="install again, with its own interpreter",
    command="nvshim install",
)
def _interpreter(installation: Installation) -> Iterator[Trouble]:
    fault = installation.interpreter_fault
    if fault:
        yield Trouble(fault)


@check(
    "NVSHIM-D092",
    WARNING,
    "several programs containerd-shim-nvidia-v1 are on the search path",
    why="Which one containerd takes depends on its PATH; an update changes only one.",
    remedy="remove all but one",
)
def _several(installation: Installation) -> Iterator[Trouble]:
    programs = installation.programs
    if len(programs) > 1:
        yield Trouble(listed(f"{path} (leads to {real})" for path, real in programs))


def _current(installation: Installation) -> str:
    return f"{installation.prefix.rstrip('/')}/{installation.current}"


@check(
    "NVSHIM-D093",
    NOTE,
    "there is more than the current version of ours",
    why=(
        "Shims go on with the version that they were started with, until their pod ends. What "
        "nothing uses any more takes room."
    ),
    remedy="nothing; what is unused goes with the next installation",
)
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


@check(
    "NVSHIM-D094",
    ERROR,
    "shims run of a version that was removed",
    why=(
        "What a shim has not imported yet, it cannot import any more: an exec, a checkpoint or "
        "a new container of the pod may fail."
    ),
    remedy="recreate the pods of these shims",
)
def _gone(installation: Installation) -> Iterator[Trouble]:
    gone = [shim for shim in installation.shims if shim.gone]
    if gone:
        pids = listed(shim.pid for shim in gone)
        yield Trouble(f"{gone[0].tree} is gone, and {len(gone)} shims run of it: {pids}")


@check(
    "NVSHIM-D095",
    WARNING,
    "a shim has much memory of its own",
    why="A shim needs about 4 MiB; more grows with the containers of its pod, or is a leak.",
    remedy="send it SIGUSR1, which writes to containerd's log what it does, and report that",
)
def _memory(installation: Installation) -> Iterator[Trouble]:
    for shim in installation.shims:
        if (shim.memory or 0) > _MUCH_MEMORY:
            mebibytes = (shim.memory or 0) >> 20
            yield Trouble(f"process {shim.pid} in {shim.namespace} has {mebibytes} MiB of its own")


@check(
    "NVSHIM-D096",
    WARNING,
    "a fork server does not do its work",
    why="Shims are started without it, in ten times the time.",
    remedy="end it; the next container leaves a new one behind",
)
def _servers(installation: Installation) -> Iterator[Trouble]:
    for server in installation.servers:
        if not server.works:
            yield Trouble(f"process {server.pid} of {server.address} accepts nobody")
        elif installation.current and server.tree not in {"", _current(installation)}:
            yield Trouble(f"process {server.pid} of {server.address} is of {server.tree}")
