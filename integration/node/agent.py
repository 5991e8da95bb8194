"""``nvshim node``: one process per node that keeps true what others read about its GPUs.

::

    a change, or the time is up ──▶ refresh ──▶ CDI spec, inventory, nodes and /dev/char links
                                       │
                                       ├──▶ STATE/node.json: what was seen, when, what is wrong
                                       └──▶ the board, which the other parts of the agent go by

Rules
- One agent per node: a lock in its state directory says so (:mod:`.lock`). A second one ends, but
  not in a rolling update with DRA: there it serves the kubelet by the first (:mod:`.dra.serving`),
  and is the agent once that has ended.
- A look runs in a thread, and what it asks of the driver in a child of it: neither a hung driver
  nor a hung file system keeps the agent from ending when it is told to. A look that is under way
  then is given the time that it takes to end its child, and no more.
- What is wrong with the node is said, in the log when it begins and when it ends, and in the
  status file for as long as it lasts; it does not end the agent.
- A hangup (SIGHUP) is a reason to look, and for the settings to be read again.
- An agent that runs from the tree in effect ends when another is put into effect, so that whoever
  started it starts the new one; nothing else would tell it of an upgrade.
- The status file is written when what is in it differs, and its time is that of the last look,
  whatever else was written since: that is what readiness goes by. Where it cannot be written, from
  its first look on, the agent goes on, says so in its log and its metrics, and is not ready.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import threading
import time
from contextlib import aclosing, suppress
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Final, NoReturn

import anyio
import anyio.abc
import anyio.to_thread

from hooks.node.device_nodes import CAPS
from hooks.node.drained import driver_of, read_drains
from hooks.node.inventory import RETRY_AFTER
from integration.agent_errors import AgentStateUnusable
from integration.agent_status import status_path
from integration.detached import aside
from integration.devices.creating import State, Wish, create
from integration.files import read_file, replace_file
from integration.install_places import CURRENT
from integration.node.changes import announced
from integration.node.lock import NodeLock
from integration.node.refresh import Made, keep_spec, look
from integration.node.service import PARTS, Context, first_error, keep
from integration.nvml.children import forking
from integration.nvml.inventory import STOP
from integration.nvml.snapshot import NodeSnapshot
from integration.signal_receiver import open_signal_receiver
from integration.tree import own_tree
from integration.watcher import ANY, Interest, Watcher, first_of
from shim import VERSION

if TYPE_CHECKING:
    from collections.abc import Callable

    from hooks.config import Config
    from integration.node.options import Options

# What of the board is in the status file, besides what a look has seen, and the seconds after
# which it is there: claims change with each pod, and to write all of them takes a while.
_NOTED: Final = ((0.1, ("faults", "resources", "told")), (1.0, ("claims",)))

_STATUS: Final = "status-file"
_POD: Final = "pod"
"""What the faults are called that the agent's own files cannot be written."""

# Seconds after which a swarm of changes is over.
_QUIET: Final = 0.3

# Seconds for a child to be killed.
_TO_END: Final = 2.0


async def serve(
    config: Config, options: Options, say: Callable[..., None], *, once: bool = False
) -> NodeSnapshot:
    """Keep the node's files true until SIGTERM or SIGINT, or until its own tree is replaced.

    Args:
        once: look once, and end.

    Returns:
        What was seen last.

    Raises:
        AgentRunning: another agent has the node.
        AgentStateUnusable: there is no place for its lock, or, once, for what was seen.
    """
    try:
        return await _serve(config, options, say, once=once)
    except ExceptionGroup as raised:  # of the task group
        raise first_error(raised) from None


async def _serve(
    config: Config, options: Options, say: Callable[..., None], *, once: bool
) -> NodeSnapshot:
    seen, in_effect = NodeSnapshot(), _is_in_effect()
    with (
        NodeLock(config) as lock, Watcher(_QUIET) as watcher, announced(watcher) as unannounced,
        forking(),
    ):  # fmt: skip
        if not (is_ours := lock.take()) and (once or not _may_wait(options)):
            raise lock.held()
        context = Context(config, options, say)
        async with aclosing(context.kubelet), anyio.create_task_group() as tasks:
            if not once:
                await tasks.start(_do_as_told, tasks.cancel_scope, context)
                if not is_ours:
                    context = await _wait(tasks, context, lock)
                say("info", "begins", version=VERSION, spec=options.spec or "none")
                _show_pod(context, lock)
            rounds = _Rounds(context, watcher, unannounced)
            seen = await rounds.look(first=True, strict=once)
            if not once:
                tasks.start_soon(_begin_parts, tasks, context)
                for pause, names in _NOTED:
                    tasks.start_soon(rounds.keep_noted, pause, *names)
                while not in_effect or _is_in_effect():
                    await rounds.wait()
                    _show_pod(context, lock)
                    seen = await rounds.look()
                say("info", "ends", reason="another version was put into effect")
            tasks.cancel_scope.cancel()
    return seen


def _may_wait(options: Options) -> bool:
    """Whether the agent may wait for another's end: it has something to do meanwhile."""
    return options.dra and bool(options.pod_uid)


def _show_pod(context: Context, lock: NodeLock) -> None:
    """Show that the agent of its pod is at work, unless it has been shown already."""
    line = ""
    try:
        lock.show_pod(context.options.pod_uid)
    except AgentStateUnusable as error:  # it is tried again at the next look
        line = str(error)
    context.fault(_POD, line, level="warning")


async def _wait(tasks: anyio.abc.TaskGroup, context: Context, lock: NodeLock) -> Context:
    """Be the driver's second instance until the node is ours; returns the context from then on."""
    from integration.node.services.dra.server import stand_by  # noqa: PLC0415 - it loads gRPC

    return await stand_by(tasks, context, lock)


class _Rounds:
    """Looking at the node, again and again.

    Args:
        watcher: hears of the node.
        unannounced: why it does not hear the kernel; "" if it does.
    """

    def __init__(self, context: Context, watcher: Watcher, unannounced: str) -> None:
        self._context = context
        self._watcher, self._unannounced = watcher, unannounced
        self._heard = True
        self._deaf: dict[str, str] = {}
        self._wanted = 0
        self._directories: tuple[str, ...] = ()
        self._looked = 0.0
        self._made = Made()
        self._told = NodeSnapshot()

    async def look(self, *, first: bool = False, strict: bool = False) -> NodeSnapshot:
        """Look, say what is different, and post it.

        Raises:
            AgentStateUnusable: what was seen cannot be written, and that is not to be overlooked.
        """
        config, options, board = self._context.config, self._context.options, self._context.board
        wanted, begun = board.version("wanted"), time.monotonic()
        now = await _aside(partial(_look, config, heard=self._heard, anew=board.doubts_mig))
        if now.inventory != board.seen.inventory:
            # Others need not wait for a spec that is not theirs.
            board.post(seen=replace(now, spec=board.seen.spec))
        keep = partial(keep_spec, config, options.spec, now, heard=self._heard, made=self._made)
        now = await _aside(keep)
        board.counters.looked(time.monotonic() - begun, faults=bool(now.faults))
        self._wanted = wanted
        self._looked = time.time()
        _tell(self._context.say, self._told, now, first=first)
        self._told = now
        board.post(seen=now)
        self.note(strict=strict)
        return now

    async def wait(self) -> None:
        """Wait for a reason to look again, or for the time to be up."""
        config, options, board = self._context.config, self._context.options, self._context.board
        seen, inventory = board.seen, board.seen.inventory
        # Where the driver was it may be again: an update of its files is the end of them first.
        if inventory is not None:
            self._directories = inventory.driver.library_directories or self._directories
        places = dict.fromkeys((*self._directories, config.drained), ANY)
        for nodes in (config.dev, os.path.join(config.dev, *CAPS)):
            places[nodes] = Interest(content=False)  # what is written to a device node is no reason
        self._heard = self._watcher.follow(places)
        why = {"announcements": self._unannounced, "files": self._watcher.deaf}
        deaf = {what: line for what, line in why.items() if line}
        if deaf != self._deaf:
            self._deaf = deaf
            self._context.say("warning", "not all changes are heard, only looked for", **deaf)
        if self._heard:
            return
        # A doubtful answer is asked for again as soon as it is believed no longer.
        pause = min(options.poll, RETRY_AFTER) if seen.faults else options.poll

        which, heard = await first_of(
            partial(self._watcher.wait, pause), partial(board.change, "wanted", since=self._wanted)
        )
        self._heard = bool(which) or heard or board.version("wanted") != self._wanted

    async def keep_noted(self, pause: float, *names: str) -> NoReturn:
        """Have what other parts post be in the status file, too.

        Args:
            pause: seconds after which it is; what is posted meanwhile is written with it.
            names: of the board's table.
        """
        board = self._context.board
        version = board.version(*names)
        while True:
            await board.change(*names, since=version)
            await anyio.sleep(pause)
            version = board.version(*names)
            self.note()

    def note(self, *, strict: bool = False) -> None:
        """Keep the status file true.

        Raises:
            AgentStateUnusable: it cannot be written, and that is not to be overlooked.
        """
        line = ""
        try:
            _note(self._context, self._looked)
        except AgentStateUnusable as error:
            if strict:
                raise
            line = str(error)
        self._context.fault(_STATUS, line, level="warning")


async def _begin_parts(tasks: anyio.abc.TaskGroup, context: Context) -> None:
    """Begin with a node that was looked at.

    Modules take a while: each part begins when it has its own, and does not wait for the others'.
    """
    for name, part in PARTS.items():
        if part.is_wanted(context.options):
            with suppress(ImportError):  # the part itself says so
                await aside(importlib.import_module, part.module)
            tasks.start_soon(keep, name, context)


async def _aside(look: Callable[[], NodeSnapshot]) -> NodeSnapshot:
    """Look in a thread for which nobody has to wait.

    Args:
        look: what it does. Once this is cancelled it asks NVML no more.
    """
    stop, done = threading.Event(), threading.Event()

    def run() -> NodeSnapshot:
        STOP.set(stop)
        try:
            return look()
        finally:
            done.set()

    try:
        return await aside(run)
    except BaseException:
        stop.set()
        done.wait(_TO_END)
        raise


def _is_in_effect() -> bool:
    """Whether this program is of the tree that the link beside it leads to."""
    tree = own_tree()
    try:
        return bool(tree) and os.path.samefile(tree, os.path.join(os.path.dirname(tree), CURRENT))
    except OSError:
        return False


def _look(config: Config, *, heard: bool, anew: bool) -> NodeSnapshot:
    """One look, with the nodes and links that the configuration wants made before it."""
    if driver_of(read_drains(config)):
        return look(config)
    steps = create(config, Wish(nodes=config.make_nodes, links=config.char_links))
    faults = [f"{step.path}: {step.reason}" for step in steps if step.state == State.FAILED]
    seen = look(config, heard=heard, anew=anew)
    return replace(seen, faults=(*seen.faults, *faults))


async def _do_as_told(
    scope: anyio.CancelScope,
    context: Context,
    *,
    task_status: anyio.abc.TaskStatus[None],
) -> None:
    """End by SIGTERM or SIGINT; look again, and have what was read be read again, by SIGHUP."""
    told = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    with open_signal_receiver(*told) as signals:
        task_status.started()
        async for number in signals:
            if number == signal.SIGHUP:
                context.board.post(hangups=context.board.hangups + 1)
                context.board.want_look()
                continue
            context.say("info", "ends", signal=signal.Signals(number).name)
            scope.cancel()
            return


def _tell(
    say: Callable[..., None], before: NodeSnapshot, now: NodeSnapshot, *, first: bool
) -> None:
    if first or (before.driver, before.gpus, before.mig_devices) != (
        now.driver,
        now.gpus,
        now.mig_devices,
    ):
        say(
            "info",
            "the node has",
            driver=now.driver or "none",
            gpus=len(now.gpus),
            mig_devices=len(now.mig_devices),
        )
    if now.written:
        say("info", "CDI spec written" if now.spec else "CDI spec removed", path=now.spec)
    for fault in now.faults:
        if fault not in before.faults:
            say("warning", fault)
    for fault in before.faults:
        if fault not in now.faults:
            say("info", "over", fault=fault)


# -- state ------------------------------------------------------------------------------------


def _note(context: Context, looked: float) -> None:
    """Write the status file; its time is that of the last look.

    Args:
        looked: seconds since the epoch.

    Raises:
        AgentStateUnusable: it cannot be written.
    """
    board = context.board
    seen = replace(board.seen, faults=(*board.seen.faults, *board.faults.values()))
    resources = {
        each.name: {
            "devices": len(each.devices),
            "healthy": sum(device.is_healthy for device in each.devices),
        }
        for each in board.resources
    }
    document = {"pid": os.getpid(), "poll": context.options.poll, **seen.as_document()}
    document["resources"] = resources
    if context.options.dra:
        document["claims"] = [
            {"claim": f"{claim.namespace}/{claim.name}", "uid": claim.uid, **asdict(device)}
            for claim in board.claims
            for device in claim.devices
        ]
    if board.told is not None:
        document["device_list_strategies"] = list(board.told.strategies)
        document["device_list_why"] = board.told.why
    content = (json.dumps(document, indent=2) + "\n").encode()
    path = status_path(context.config)
    try:
        if read_file(path) != content:
            replace_file(path, content, durable=False)  # it is true of an agent that runs
        with suppress(FileNotFoundError):  # somebody removed it; the next look writes it anew
            os.utime(path, (looked, looked))
    except OSError as error:
        raise AgentStateUnusable(
            f"to write {path}", found=str(error.strerror), do="make it writable, or free some space"
        ) from error
