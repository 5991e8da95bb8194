"""The ledger: which container holds which devices, kept up to date.

It is made of the bundles alone, so an agent that begins has the ledger that its predecessor had. It
is published, and written to ``STATE/ledger.json``, when it differs.

One looks anew when containers come, go, are made or end
(:mod:`integration.containers.bundle_watch`), when the node changed
(the driver may be another), and when what nobody tells of has: what the kubelet says of its pods,
the driver's files, containerds that are known by their shims alone. After some times of that
nothing is believed any more, and all is read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Final

from api.errors import one_line, printable
from hooks.config import Config
from hooks.node.inventory import Inventory
from integration.agent_errors import LedgerUnwritten
from integration.containers.bundle_watch import watched_directories
from integration.containers.bundles import Container, find_containers
from integration.containers.held_devices import LEDGER
from integration.containers.procfs import Procfs
from integration.containers.shims import states_to_watch
from integration.detached import run_detached
from integration.files import read_file, replace_file
from integration.kubelet.values import Allocated
from integration.node.holders.holders import (
    UNKNOWN_POD,
    holdings_of,
    stale_of,
    stopped_of,
    unheld_of,
)
from integration.node.holders.values import Denied, Ledger, as_document
from integration.node.state.topic import version_of, wait_any
from integration.node.values.service_name import ServiceName
from integration.nvml.values import now
from integration.watcher import Watcher, first_of

if TYPE_CHECKING:
    from integration.node.service import Context

FILE: Final = LEDGER
_PROC: Final = "/proc"

# Seconds after which a swarm of changes is over, and how long one may last.
_QUIET: Final = 0.2
_LONGEST_SWARM: Final = 2.0

# So many times in turn it is believed that all that happened was heard.
_TRUSTED: Final = 10


def look(
    states: Iterable[str],
    inventory: Inventory | None,
    allocated: Allocated | None = None,
    proc: str = _PROC,
) -> Ledger:
    """The ledger, of the bundles as they are now.

    Args:
        allocated: what the kubelet says; None if it says nothing.

    Raises:
        StateUnreadable: a directory may not be read: the caller is not root.
    """
    return _ledger_of(tuple(find_containers(states, proc)), inventory, allocated, proc)


def _ledger_of(
    containers: tuple[Container, ...],
    inventory: Inventory | None,
    allocated: Allocated | None,
    proc: str,
) -> Ledger:
    holdings = holdings_of(containers, inventory, Procfs(proc), allocated)
    unread = [c for c in containers if c.record is None and c.has_record]
    return Ledger(
        unknown=tuple(f"the record of {c.title} in {c.bundle} cannot be read" for c in unread),
        when=now(),
        holdings=holdings,
        unheld=()
        if allocated is None
        else unheld_of(allocated, holdings, containers if _tells_nodes(inventory) else ()),
        denied=tuple(_denied(containers)),
        stopped=stopped_of(containers, inventory),
        containers=containers,
    )


def _denied(containers: Iterable[Container]) -> Iterator[Denied]:
    """What containers of pods were not given, by their records."""
    for each in containers:
        judged = (each.record or {}).get("policy")
        if each.pod is None or not isinstance(judged, dict):
            continue
        pod = each.pod
        for why in judged.get("denied") or ():
            yield Denied(pod.namespace, pod.name, pod.uid, each.name, one_line(str(why)))


def _tells_nodes(inventory: Inventory | None) -> bool:
    """Whether it is known what a container has by its nodes: MIG devices are NVML's to tell."""
    return inventory is not None and not inventory.nvml_failure


async def look_and_ask(
    states: Iterable[str],
    inventory: Inventory | None,
    allocated: Allocated | None,
    ask: Callable[[], Awaitable[Allocated | None]],
    proc: str = _PROC,
) -> Ledger:
    """The ledger as of :func:`look`, in which no pod is an orphan because it has just come.

    Args:
        allocated: what the kubelet has said; None if it says nothing.
        ask: asks it once more, if it did not know a pod.

    Raises:
        StateUnreadable: as of :func:`look`.
    """
    ledger = await run_detached(look, states, inventory, allocated, proc)
    if not any(each.orphan == UNKNOWN_POD for each in ledger.holdings):
        return ledger
    later = await ask()
    if later is not None:
        later = {**{pod: {} for pod in allocated or ()}, **later}
    return await run_detached(_ledger_of, ledger.containers, inventory, later, proc)


async def run(context: Context) -> None:
    """Keep the ledger, until cancelled.

    Raises:
        StateUnreadable: containerd's state may not be read.
    """
    state, options = context.state, context.options
    ask = partial(context.kubelet.allocated, options.pod_resources)
    states: tuple[str, ...] = ()
    looked: object = None
    left, late, again = 0, True, False
    deaf = ""
    with Watcher(_QUIET, _LONGEST_SWARM) as watcher:
        while True:
            if late:
                states = await run_detached(states_to_watch, options.states)
            allocated = await ask()
            version = version_of(state.node)
            # All is heard, so bundles are read for nothing; but nobody tells of the driver's files.
            if late and left and looked == (states, allocated) and not deaf:
                left, again = left - 1, await run_detached(_is_overtaken, state.ledger.value)
            else:
                left, looked = _TRUSTED, (states, allocated)
                ledger = await look_and_ask(states, state.node.value.inventory, allocated, ask)
                _tell(context, state.ledger.value, ledger)
                state.ledger.publisher(ServiceName.LEDGER).publish(ledger)
                state.faults.report("ledger", await run_detached(_write, context.config, ledger))
                ended = watcher.follow_processes(await run_detached(_processes, ledger))
                again = watcher.follow(watched_directories(states)) or ended
                if watcher.deaf != deaf:
                    deaf = watcher.deaf
                    context.say("warning", "not all containers are heard", why=deaf or "over")
            late = False
            if not again:
                which, heard = await first_of(
                    partial(watcher.wait, options.poll),
                    partial(wait_any, state.node, since=version),
                )
                late = not which and not heard and version_of(state.node) == version


def _is_overtaken(ledger: Ledger) -> bool:
    """Whether a holding's driver is another by now."""
    return any(stale_of(each.container) != each.stale for each in ledger.holdings)


def _processes(ledger: Ledger) -> set[int]:
    """Whose end matters: that of those who hold something, and of their shims."""
    procfs = Procfs(_PROC)
    pids = {each.container.pid for each in ledger.holdings if each.container.pid}
    known = {each.container.pid for each in ledger.holdings if not each.orphan} & pids
    statuses = [procfs.status(pid) for pid in known]
    return pids | {status.parent for status in statuses if status is not None} - {0, 1}


def _tell(context: Context, before: Ledger, now: Ledger) -> None:
    """Say what has come to be wrong, a line for each container."""
    known = {(each.container.bundle, each.stale, each.orphan) for each in before.holdings}
    for each in now.holdings:
        if (each.container.bundle, each.stale, each.orphan) in known:
            continue
        title, bundle = printable(each.container.title), each.container.bundle
        if each.stale:
            context.say("warning", "to be drained", container=title, why=each.stale, bundle=bundle)
        if each.orphan:
            context.say("warning", "an orphan", container=title, why=each.orphan, bundle=bundle)
    for missing in now.missing:
        if missing not in before.missing:
            context.say(
                "error",
                "a container runs without a device that the kubelet has given it",
                container=printable(missing.title),
                device=printable(missing.device),
                resource=printable(missing.resource),
                pid=missing.pid,
            )
    for line in now.unknown:
        if line not in before.unknown:
            context.say("warning", printable(line))


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
