"""``nvshim node``: the agent of a node, which keeps its CDI spec, inventory and status current.

::

    a change, or a timer ──▶ refresh ──▶ CDI spec, inventory, device nodes and /dev/char links
                                │
                                ├──▶ STATE/node.json: the node's GPUs, driver and faults
                                └──▶ the state that the agent's services share

Rules
- A lock in the state directory (:mod:`.lock`) admits one agent per node. A second agent exits. In a
  rolling update with DRA the second agent waits instead, and forwards the kubelet's calls to the
  first one (:mod:`integration.node.services.dra.server`) until the first one has exited.
- The agent reads the node in a thread, and queries the driver in a child process. If the driver or
  a file system hangs, the agent can still stop: it waits only until that child is killed.
- The agent logs a fault of the node when it appears and when it is resolved, and lists it in the
  status file meanwhile. A fault does not stop the agent.
- On SIGHUP the agent reads the node and its settings again.
- An agent that runs from the installed tree exits when another tree becomes current, so that its
  supervisor starts the new version. The agent has no other way to notice an upgrade.
- The agent writes the status file when its content changes. The file's modification time is the
  time of the last read of the node, for the readiness check. If the file cannot be written, the
  agent continues, reports that in its log and metrics, and is not ready.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import aclosing, suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Final, NoReturn

import anyio
import anyio.abc

from hooks.config import Config
from hooks.node.device_nodes import CAPS
from hooks.node.drained import driver_of, read_drains
from hooks.node.inventory import RETRY_AFTER
from integration.agent_errors import AgentStateUnusable
from integration.agent_status import status_path
from integration.detached import SlowCall, run_detached
from integration.devices.creating import CreateOptions, StepState, create
from integration.files import read_file, replace_file
from integration.install_layout import CURRENT
from integration.node.changes import announced
from integration.node.lock import NodeLock
from integration.node.options import Options
from integration.node.refresh import SpecText, keep_spec, look
from integration.node.service import SERVICES, Context, first_error, supervise
from integration.node.state.topic import Watched, version_of, wait_any
from integration.node.values.service_name import ServiceName
from integration.nvml.process import Stop, fork_server
from integration.nvml.query import STOP
from integration.nvml.snapshot import NodeSnapshot
from integration.signal_receiver import open_signal_receiver
from integration.timeouts import PATIENCE
from integration.tree import own_tree
from integration.watcher import ANY, Interest, Watcher, first_of
from shim import VERSION

# Seconds to collect changes before writing the status file. Claims change with each pod, and
# writing all of them takes a while.
_WRITE_AFTER: Final = 0.1
_WRITE_CLAIMS_AFTER: Final = 1.0

_STATUS: Final = "status-file"
_POD: Final = "pod"
"""The subjects of faults about a file that the agent cannot write."""

# Seconds that the agent waits at start for the kubelet to get the devices before other work.
_TO_ANNOUNCE: Final = 1.0

# Seconds without a change after which a burst of changes is over.
_QUIET: Final = 0.3

# Seconds to wait for the CDI spec; then the round continues without it.
_LONGEST_KEEP: Final = 10.0 * PATIENCE

# Seconds until the child that queries the driver is killed.
_CHILD_TIMEOUT: Final = 2.0


async def serve(
    config: Config, options: Options, say: Callable[..., None], *, once: bool = False
) -> NodeSnapshot:
    """Run the agent until SIGTERM or SIGINT, or until its own tree is replaced.

    Args:
        once: read the node once, and return.

    Returns:
        The node as it was last read.

    Raises:
        AgentRunning: another agent has the node.
        AgentStateUnusable: the lock or, with ``once``, the status file cannot be written.
    """
    try:
        return await _serve(config, options, say, once=once)
    except ExceptionGroup as raised:  # of the task group
        raise first_error(raised) from None


async def _serve(
    config: Config, options: Options, say: Callable[..., None], *, once: bool
) -> NodeSnapshot:
    node, in_effect = NodeSnapshot(), _is_in_effect()
    with (
        NodeLock(config) as lock, Watcher(_QUIET) as watcher, announced(watcher) as unannounced,
        fork_server(),
    ):  # fmt: skip
        if not (is_ours := lock.take()) and (once or not _may_wait(options)):
            raise lock.held()
        context = Context(config, options, say)
        context.state.check_publishers(SERVICES)
        async with aclosing(context.kubelet), anyio.create_task_group() as tasks:
            if not once:
                await tasks.start(_handle_signals, tasks.cancel_scope, context)
                if not is_ours:
                    context = await _wait(tasks, context, lock)
                say("info", "node agent started", version=VERSION, spec=options.spec or "none")
                _show_pod(context, lock)
                tasks.start_soon(_import_urgent, context)  # while the first read queries NVML
            rounds = _Rounds(context, watcher, unannounced)
            node = await rounds.read(first=True)
            if not once:
                await _start_services(tasks, context, urgent=True)
                await _announce(context)
            node = await rounds.keep(node, first=True, strict=once)
            if not once:
                state = context.state
                tasks.start_soon(partial(_start_services, tasks, context, urgent=False))
                tasks.start_soon(
                    rounds.keep_written,
                    _WRITE_AFTER, state.faults, state.resources, state.delivery,
                )  # fmt: skip
                tasks.start_soon(rounds.keep_written, _WRITE_CLAIMS_AFTER, state.claims)
                while not in_effect or _is_in_effect():
                    await rounds.wait()
                    _show_pod(context, lock)
                    node = await rounds.keep(await rounds.read())
                say("info", "node agent stops", reason="another version was installed")
            tasks.cancel_scope.cancel()
    return node


def _may_wait(options: Options) -> bool:
    """Return whether the agent waits for the lock: with DRA it serves the kubelet meanwhile."""
    return options.dra and bool(options.pod_uid)


def _show_pod(context: Context, lock: NodeLock) -> None:
    """Mark the agent's pod as running, unless it is marked already."""
    line = ""
    try:
        lock.show_pod(context.options.pod_uid)
    except AgentStateUnusable as error:  # the next round tries again
        line = str(error)
    context.fault(_POD, line, level="warning")


async def _wait(tasks: anyio.abc.TaskGroup, context: Context, lock: NodeLock) -> Context:
    """Stand by as the second instance of the DRA driver until this agent has the lock.

    Returns:
        The context for the rest of the run.
    """
    from integration.node.services.dra.server import stand_by  # noqa: PLC0415 - it loads gRPC

    return await stand_by(tasks, context, lock)


class _Rounds:
    """Reads the node on each change and at intervals, and writes the status file.

    Args:
        watcher: waits for changes of the node.
        unannounced: why the watcher gets no uevents; "" if it gets them.
    """

    def __init__(self, context: Context, watcher: Watcher, unannounced: str) -> None:
        self._context = context
        self._watcher, self._unannounced = watcher, unannounced
        self._node = context.state.node.publisher(ServiceName.AGENT)
        self._changed = True
        self._unwatched: dict[str, str] = {}
        self._requests = 0
        self._directories: tuple[str, ...] = ()
        self._looked = self._to_read = 0.0
        self._spec_text = SpecText()
        self._keeping = SlowCall()
        self._logged = NodeSnapshot()

    async def read(self, *, first: bool = False) -> NodeSnapshot:
        """Read the node, and publish it if it has changed: services need not wait for the CDI spec.

        Args:
            first: publish it even if it has not changed.
        """
        config, state = self._context.config, self._context.state
        self._requests, started = state.look_requested.version, time.monotonic()
        known = state.node.value
        look_once = partial(_look, config, changed=self._changed, ask_nvml=state.mig_modes_differ)
        node = await _detached(look_once)
        if first or node.inventory != known.inventory:
            self._node.publish(replace(node, spec=known.spec))
        self._to_read = time.monotonic() - started
        return node

    async def keep(
        self, node: NodeSnapshot, *, first: bool = False, strict: bool = False
    ) -> NodeSnapshot:
        """Bring the CDI spec and the status file up to date, log the differences, and publish.

        Args:
            node: the node as it was read.
            first: log the inventory even if it is empty.
            strict: raise if the status file cannot be written.

        Returns:
            The node with its spec, and the faults of both.

        Raises:
            AgentStateUnusable: the status file cannot be written, and ``strict`` is set.
        """
        config, options, state = self._context.config, self._context.options, self._context.state
        started = time.monotonic()
        keep = partial(
            keep_spec, config, options.spec, node, changed=self._changed, text=self._spec_text
        )
        try:
            node = await self._keeping.run(keep, _LONGEST_KEEP)
        except TimeoutError:
            line = f"{options.spec}: its file system does not answer"
            node = replace(node, faults=(line, *node.faults))
        took = self._to_read + time.monotonic() - started
        state.counters.checked(took, faults=bool(node.faults))
        self._looked = time.time()
        _log(self._context.say, self._logged, node, first=first)
        self._logged = node
        self._node.publish(node)
        self.write_status(strict=strict)
        return node

    async def wait(self) -> None:
        """Wait for a change of the node, a request, or the next poll."""
        config, options, state = self._context.config, self._context.options, self._context.state
        node = state.node.value
        # An update of the driver first removes its files: keep watching where they were.
        if node.inventory is not None:
            self._directories = node.inventory.driver.library_directories or self._directories
        places = dict.fromkeys((*self._directories, config.drained), ANY)
        for nodes in (config.dev, os.path.join(config.dev, *CAPS)):
            places[nodes] = Interest(content=False)  # writing to a device node changes nothing
        if tree := own_tree():
            places[os.path.dirname(tree)] = Interest(frozenset({CURRENT}), content=False)
        self._changed = await self._watcher.follow_detached(places)
        why = {"announcements": self._unannounced, "files": self._watcher.deaf}
        unwatched = {what: line for what, line in why.items() if line}
        if unwatched != self._unwatched:
            self._unwatched = unwatched
            self._context.say("warning", "cannot watch for all changes; polling", **unwatched)
        if self._changed:
            return
        # Read again when a doubtful answer of NVML expires.
        pause = min(options.poll, RETRY_AFTER) if node.faults else options.poll
        which, changed = await first_of(
            partial(self._watcher.wait, pause),
            partial(wait_any, state.look_requested, since=self._requests),
        )
        is_requested = state.look_requested.version != self._requests
        self._changed = bool(which) or changed or is_requested

    async def keep_written(self, pause: float, *topics: Watched) -> NoReturn:
        """Write the status file now and whenever one of these topics changes, until cancelled.

        Args:
            pause: seconds to wait for more changes before writing.
        """
        version = -1  # they may have changed since the last write
        while True:
            await wait_any(*topics, since=version)
            await anyio.sleep(pause)
            version = version_of(*topics)
            self.write_status()

    def write_status(self, *, strict: bool = False) -> None:
        """Write the status file if its content differs; report a fault if it cannot be written.

        Raises:
            AgentStateUnusable: the file cannot be written, and ``strict`` is set.
        """
        line = ""
        try:
            _write_status(self._context, self._looked)
        except AgentStateUnusable as error:
            if strict:
                raise
            line = str(error)
        self._context.fault(_STATUS, line, level="warning")


async def _start_services(tasks: anyio.abc.TaskGroup, context: Context, *, urgent: bool) -> None:
    """Start the services that the options request, each as soon as its module is imported.

    Imports take a while, and no service should wait for the imports of later ones.

    Args:
        urgent: True starts the services that a kubelet waits for, False the others.
    """
    for name, service in SERVICES.items():
        if service.is_urgent == urgent and service.is_wanted(context.options):
            with suppress(ImportError):  # the service imports it again and logs the error
                await run_detached(importlib.import_module, service.module)
            tasks.start_soon(supervise, name, context, service.module)


async def _import_urgent(context: Context) -> None:
    """Import the services that a kubelet waits for."""
    for service in SERVICES.values():
        if service.is_urgent and service.is_wanted(context.options):
            with suppress(ImportError):  # as above
                await run_detached(importlib.import_module, service.module)


async def _announce(context: Context) -> None:
    """Wait until the kubelet has the devices, but for at most a second."""
    if SERVICES[ServiceName.PLUGIN].is_wanted(context.options):
        await wait_any(context.state.announced, since=0, timeout=_TO_ANNOUNCE)


async def _detached(look: Callable[[], NodeSnapshot]) -> NodeSnapshot:
    """Read the node in a separate thread. Cancelling this also stops its queries of NVML."""
    stop, done = Stop(), threading.Event()

    def run() -> NodeSnapshot:
        STOP.set(stop)
        try:
            return look()
        finally:
            done.set()

    try:
        return await run_detached(run)
    except BaseException:
        stop.set()
        done.wait(_CHILD_TIMEOUT)
        raise


def _is_in_effect() -> bool:
    """Return whether this program runs from the installed tree that ``current`` links to."""
    tree = own_tree()
    try:
        return bool(tree) and os.path.samefile(tree, os.path.join(os.path.dirname(tree), CURRENT))
    except OSError:
        return False


def _look(config: Config, *, changed: bool, ask_nvml: bool) -> NodeSnapshot:
    """Create the device nodes and links that the configuration asks for, then read the node."""
    if driver_of(read_drains(config)):
        return look(config)
    steps = create(config, CreateOptions(nodes=config.make_nodes, links=config.char_links))
    faults = [f"{step.path}: {step.reason}" for step in steps if step.state == StepState.FAILED]
    node = look(config, changed=changed, ask_nvml=ask_nvml)
    return replace(node, faults=(*node.faults, *faults))


async def _handle_signals(
    scope: anyio.CancelScope,
    context: Context,
    *,
    task_status: anyio.abc.TaskStatus[None],
) -> None:
    """Stop the agent on SIGTERM or SIGINT; on SIGHUP read the node and the settings again."""
    reloads = context.state.reloads.publisher(ServiceName.AGENT)
    with open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
        task_status.started()
        async for number in signals:
            if number == signal.SIGHUP:
                reloads.publish(context.state.reloads.value + 1)
                context.state.look_requested.send()
                continue
            context.say("info", "node agent stops", signal=signal.Signals(number).name)
            scope.cancel()
            return


def _log(say: Callable[..., None], before: NodeSnapshot, now: NodeSnapshot, *, first: bool) -> None:
    if first or (before.driver, before.gpus, before.mig_devices) != (
        now.driver,
        now.gpus,
        now.mig_devices,
    ):
        say(
            "info",
            "node inventory",
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
            say("info", "fault resolved", fault=fault)


# -- the status file --------------------------------------------------------------------------


def _write_status(context: Context, looked: float) -> None:
    """Write the status file, and set its modification time to that of the last read.

    Args:
        looked: the time of the last read, in seconds since the epoch.

    Raises:
        AgentStateUnusable: it cannot be written.
    """
    state = context.state
    node = state.node.value
    node = replace(node, faults=(*node.faults, *state.faults.lines.values()))
    resources = {
        each.name: {
            "devices": len(each.devices),
            "healthy": sum(device.is_healthy for device in each.devices),
        }
        for each in state.resources.value
    }
    document = {"pid": os.getpid(), "poll": context.options.poll, **node.as_document()}
    document["resources"] = resources
    if context.options.dra:
        document["claims"] = [
            {"claim": f"{claim.namespace}/{claim.name}", "uid": claim.uid, **asdict(device)}
            for claim in state.claims.value
            for device in claim.devices
        ]
    if (delivery := state.delivery.value) is not None:
        document["device_list_strategies"] = list(delivery.strategies)
        document["device_list_why"] = delivery.why
    content = (json.dumps(document, indent=2) + "\n").encode()
    path = status_path(context.config)
    try:
        if read_file(path) != content:
            replace_file(path, content, durable=False)  # the file is useless after a crash
        with suppress(FileNotFoundError):  # the file was removed; the next round writes it again
            os.utime(path, (looked, looked))
    except OSError as error:
        raise AgentStateUnusable(
            f"to write {path}", found=str(error.strerror), do="make it writable, or free some space"
        ) from error
