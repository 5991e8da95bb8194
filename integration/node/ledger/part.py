"""The part of the agent that keeps the ledger: who holds what, as it comes and goes.

It is made of the bundles alone, so an agent that begins has the ledger that its predecessor had. It
is posted on the board, and written to ``STATE/ledger.json``, when it differs.

One looks anew when containers come, go, are made or end (:mod:`integration.node.ledger.watching`),
when the node changed (the driver may be another), and every now and then: the kubelet does not tell
of its pods, and containerds that are started elsewhere are found by their shims.
"""

from __future__ import annotations

import json
import os
import time
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

import anyio
import anyio.to_thread

from integration.files import read_file, replace_file
from integration.inspection.bundles import KNOWN_STATES, find_containers, state_directories
from integration.inspection.processes import find_processes, states_of
from integration.inspection.procfs import Procfs
from integration.node.ledger.document import as_document
from integration.node.ledger.errors import LedgerUnwritten
from integration.node.ledger.holdings import holdings_of, unheld_of
from integration.node.ledger.kubelet import allocated_by
from integration.node.ledger.values import Ledger
from integration.node.ledger.watching import Watching

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hooks.config import Config
    from hooks.node.inventory import Inventory
    from integration.node.ledger.holdings import Allocated
    from integration.node.parts import Context

__all__ = ["FILE", "known_states", "look", "run"]

R = TypeVar("R")

FILE: Final = "ledger.json"
_PROC: Final = "/proc"


def look(
    states: Iterable[str],
    inventory: Inventory | None,
    allocated: tuple[Allocated, ...] | None = None,
    proc: str = _PROC,
) -> Ledger:
    """The ledger, of the bundles as they are now.

    Args:
        states: containerd's state directories.
        inventory: what the node has; None if that is not known.
        allocated: what the kubelet says; None if it says nothing.
        proc: where processes are shown.

    Raises:
        StateUnreadable: a directory may not be read: the caller is not root.
    """
    containers = tuple(find_containers(states, proc))
    holdings = holdings_of(containers, inventory, Procfs(proc), allocated)
    return Ledger(
        when=time.clock_gettime(time.CLOCK_BOOTTIME),
        holdings=holdings,
        unheld=() if allocated is None else unheld_of(allocated, holdings),
        containers=containers,
    )


def known_states(asked: Iterable[str], proc: str = _PROC) -> tuple[str, ...]:
    """The state directories to look at, whether they are there or not.

    Args:
        asked: those that somebody named; if none, those that are known, and those of shims.
        proc: where processes are shown.
    """
    named = tuple(asked)
    if named:
        return state_directories(named)
    return tuple(dict.fromkeys((*KNOWN_STATES, *states_of(find_processes(proc)))))


async def run(context: Context) -> None:
    """Keep the ledger, until cancelled.

    Args:
        context: the agent's.

    Raises:
        StateUnreadable: containerd's state may not be read.
    """
    board, options = context.board, context.options
    states: tuple[str, ...] = ()
    deaf, unwritten, late = "", "", True
    with Watching() as watching:
        while True:
            if late:
                states = await _aside(known_states, options.states)
            allocated = await allocated_by(options.pod_resources)
            version = board.version("seen")
            ledger = await _aside(look, states, board.seen.inventory, allocated)
            board.post(ledger=ledger)
            line = await _aside(_write, context.config, ledger)
            if line != unwritten:
                unwritten = line
                board.fault("ledger", line)
            running = [each.container.pid for each in ledger.holdings if each.container.pid]
            again = watching.follow(states, running)
            if watching.deaf != deaf:
                deaf = watching.deaf
                context.say("warning", "not all containers are heard, only looked for", why=deaf)
            late = not (again or await _changes(context, watching, version))


async def _changes(context: Context, watching: Watching, version: int) -> bool:
    """Wait until there is a reason to look; False when it is time to, and nothing was heard."""
    heard = False
    async with anyio.create_task_group() as tasks:

        async def node() -> None:
            nonlocal heard
            await context.board.change("seen", since=version)
            heard = True
            tasks.cancel_scope.cancel()

        tasks.start_soon(node)
        heard = await watching.wait(context.options.poll) or heard
        tasks.cancel_scope.cancel()
    return heard


async def _aside(function: Callable[..., R], *args: object) -> R:
    """Call in a thread that nobody has to wait for."""
    call = partial(function, *args)
    return await anyio.to_thread.run_sync(call, abandon_on_cancel=True)


def _write(config: Config, ledger: Ledger) -> str:
    """Write it down, if it differs; why that cannot be done."""
    path = os.path.join(config.state, FILE)
    content = (json.dumps(as_document(ledger), indent=2) + "\n").encode()
    try:
        if read_file(path) != content:
            replace_file(path, content, mode=0o600)
    except OSError as error:
        return str(
            LedgerUnwritten(
                f"to write {path}",
                found=str(error.strerror),
                do="make it writable, or free some space",
            )
        )
    return ""
