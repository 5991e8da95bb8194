"""The ledger: which container holds which devices, kept up to date.

The service builds the ledger from the bundles alone, so a restarted agent finds the same ledger
again. It publishes the ledger and writes ``STATE/ledger.json`` when the ledger changes.

The service reads the bundles

- when containers are created, start, exit or are deleted
  (:mod:`integration.containers.bundle_watch`);
- when the node changes, since the driver may have changed;
- when a poll finds a change that causes no event: in the kubelet's assignments, the driver's files,
  or a containerd that is known only from its shims;
- and after ten polls without a change, in case an event was lost.
"""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable, Iterable, Iterator
from functools import partial
from typing import Final

from api.errors import one_line, printable
from hooks.config import Config
from hooks.node.inventory import Inventory
from integration.agent_errors import LedgerUnwritten
from integration.containers.bundle_watch import watched_directories
from integration.containers.bundles import Container, find_containers
from integration.containers.held_devices import LEDGER
from integration.containers.procfs import Procfs
from integration.containers.records import strings
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
from integration.node.service import Context
from integration.node.state.topic import version_of, wait_any
from integration.node.values.service_name import ServiceName
from integration.nvml.values import now
from integration.watcher import Watcher, first_of

FILE: Final = LEDGER
_PROC: Final = "/proc"

# Seconds without a change that end a burst of changes, and the longest burst.
_QUIET: Final = 0.2
_LONGEST_BURST: Final = 2.0

# After this many polls without a change, read all bundles again.
_TRUSTED_POLLS: Final = 10


def look(
    states: Iterable[str],
    inventory: Inventory | None,
    allocated: Allocated | None = None,
    proc: str = _PROC,
) -> Ledger:
    """Return the ledger of the current bundles.

    Args:
        allocated: the kubelet's assignments; None if it does not answer.

    Raises:
        StateUnreadable: a directory is not readable, since the caller is not root.
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
        else unheld_of(allocated, holdings, containers if _knows_devices(inventory) else ()),
        denied=tuple(_denied(containers)),
        stopped=stopped_of(containers, inventory),
        containers=containers,
    )


def _denied(containers: Iterable[Container]) -> Iterator[Denied]:
    """Yield the denied requests in the records of pods' containers."""
    for each in containers:
        if (pod := each.pod) is None:
            continue
        for why in strings(each.record, "policy", "denied"):
            yield Denied(pod.namespace, pod.name, pod.uid, each.name, one_line(why))


def _knows_devices(inventory: Inventory | None) -> bool:
    """Return whether a container's device nodes identify its devices; MIG devices need NVML."""
    return inventory is not None and not inventory.nvml_failure


async def look_and_ask(
    states: Iterable[str],
    inventory: Inventory | None,
    allocated: Allocated | None,
    ask: Callable[[], Awaitable[Allocated | None]],
    proc: str = _PROC,
) -> Ledger:
    """Return the ledger as :func:`look` does, but do not call a new pod an orphan.

    Args:
        allocated: the kubelet's assignments; None if it does not answer.
        ask: asks the kubelet again; called if the kubelet did not know a pod.

    Raises:
        StateUnreadable: see :func:`look`.
    """
    ledger = await run_detached(look, states, inventory, allocated, proc)
    if not any(each.orphan == UNKNOWN_POD for each in ledger.holdings):
        return ledger
    later = await ask()
    if later is not None:
        later = {**{pod: {} for pod in allocated or ()}, **later}
    return await run_detached(_ledger_of, ledger.containers, inventory, later, proc)


async def run(context: Context) -> None:
    """Keep the ledger up to date until cancelled.

    Raises:
        StateUnreadable: containerd's state directory is not readable.
    """
    state, options = context.state, context.options
    ask = partial(context.kubelet.allocated, options.pod_resources)
    states: tuple[str, ...] = ()
    inputs: object = None
    polls_left, is_poll, again = 0, True, False
    deaf = ""
    with Watcher(_QUIET, _LONGEST_BURST) as watcher:
        while True:
            if is_poll:
                states = await run_detached(states_to_watch, options.states)
            allocated = await ask()
            version = version_of(state.node)
            # The watch reports every change of a bundle, but none of the driver's files.
            if is_poll and polls_left and inputs == (states, allocated) and not deaf:
                polls_left -= 1
                again = await run_detached(_is_outdated, state.ledger.value)
            else:
                polls_left, inputs = _TRUSTED_POLLS, (states, allocated)
                ledger = await look_and_ask(states, state.node.value.inventory, allocated, ask)
                _log_faults(context, state.ledger.value, ledger)
                state.ledger.publisher(ServiceName.LEDGER).publish(ledger)
                state.faults.report("ledger", await run_detached(_write, context.config, ledger))
                ended = watcher.follow_processes(await run_detached(_processes, ledger))
                again = watcher.follow(watched_directories(states)) or ended
                if watcher.deaf != deaf:
                    deaf = watcher.deaf
                    context.say("warning", "cannot watch all bundles", why=deaf or "resolved")
            is_poll = False
            if not again:
                which, changed = await first_of(
                    partial(watcher.wait, options.poll),
                    partial(wait_any, state.node, since=version),
                )
                is_poll = not which and not changed and version_of(state.node) == version


def _is_outdated(ledger: Ledger) -> bool:
    """Return whether the driver of a holding has changed since the ledger was built."""
    return any(stale_of(each.container) != each.stale for each in ledger.holdings)


def _processes(ledger: Ledger) -> set[int]:
    """Return the processes whose exit changes the ledger: the holders' and their shims'."""
    procfs = Procfs(_PROC)
    pids = {each.container.pid for each in ledger.holdings if each.container.pid}
    known = {each.container.pid for each in ledger.holdings if not each.orphan} & pids
    statuses = [procfs.status(pid) for pid in known]
    return pids | {status.parent for status in statuses if status is not None} - {0, 1}


def _log_faults(context: Context, before: Ledger, now: Ledger) -> None:
    """Log what is newly wrong, a line for each container."""
    known = {(each.container.bundle, each.stale, each.orphan) for each in before.holdings}
    for each in now.holdings:
        if (each.container.bundle, each.stale, each.orphan) in known:
            continue
        title, bundle = printable(each.container.title), each.container.bundle
        if each.stale:
            context.say(
                "warning", "container is stale: drain its pod",
                container=title, why=each.stale, bundle=bundle,
            )  # fmt: skip
        if each.orphan:
            context.say(
                "warning", "container is an orphan",
                container=title, why=each.orphan, bundle=bundle,
            )  # fmt: skip
    for missing in now.missing:
        if missing not in before.missing:
            context.say(
                "error",
                "a container runs without a device that the kubelet allocated to it",
                container=printable(missing.title),
                device=printable(missing.device),
                resource=printable(missing.resource),
                pid=missing.pid,
            )
    for line in now.unknown:
        if line not in before.unknown:
            context.say("warning", printable(line))


def _write(config: Config, ledger: Ledger) -> str:
    """Write the ledger's file if it changed; return the error, or ""."""
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
