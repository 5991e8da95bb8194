"""Apply the MIG layout that a label of the Node names, and report the result.

::

    nvidia.com/mig.config ──▶ nvshim mig apply ──▶ nvidia.com/mig.config.state, an event on the Node

======== ===================================================================================
state    meaning
======== ===================================================================================
pending  it is being applied, or waits for devices in use; an event names their holders
success  the GPUs match the layout
failed   it was undone, so the GPUs are as before; an event gives the reason. It is retried
======== ===================================================================================

Rules
- The service runs only with ``--mig-config-file``. It needs a token that may read, watch and label
  the Node.
- A layout is applied when the agent starts, and so after each boot. It is applied again when the
  label, the driver or the list of GPUs changes, when a GPU returns to service (a reset removes its
  MIG devices, for example), or when the agent gets SIGHUP.
- A child process does the work on its own: it takes GPUs out of service, waits, and undoes what
  fails (``integration.mig``). If the label changes in the meantime, or the agent stops, the child
  is interrupted and undoes its changes. If a child was killed, the next one undoes its changes.
- Undoing may take long, so a child may outlive its agent. The next agent waits for it, as for a
  person's reset.
- A Node that was deleted and registered again gets the state again.
- Without the label nothing is changed. If the label is removed while its layout is pending, the
  state is removed, too.

Source: NVIDIA's k8s-mig-manager (the labels and their words).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from functools import partial
from typing import Any, Final, NoReturn
from urllib.parse import quote

import anyio
from anyio.streams.buffered import BufferedByteReceiveStream

from api.errors import NvshimError, one_line
from integration.apiserver.client import ApiServer
from integration.backoff import Backoff
from integration.detached import run_detached
from integration.devices.drain_errors import ResetRunning
from integration.devices.drain_marks import is_resetting
from integration.node.reporter import api_server_of
from integration.node.service import Context
from integration.node.state.topic import Topic, version_of, wait_any
from integration.node.values.service_name import ServiceName
from integration.nvml.snapshot import NodeSnapshot
from integration.tree import own_tree

LABEL: Final = "nvidia.com/mig.config"
STATE: Final = "nvidia.com/mig.config.state"
PENDING, SUCCESS, FAILED = "pending", "success", "failed"

_REASONS: Final = {
    PENDING: "MigLayoutWaits",
    SUCCESS: "MigLayoutApplied",
    FAILED: "MigLayoutFailed",
}
_WAITS: Final = "waits for "  # how `nvshim mig apply` starts its line while it waits
_ERROR: Final = "NVSHIM-"  # how it starts its last line if it fails
_RUNNING: Final = ResetRunning.code
_NODES: Final = "/api/v1/nodes"
_EVENTS: Final = "/api/v1/namespaces/default/events"  # of objects without a namespace
_PAUSE: Final = 1.0  # seconds between checks whether a command has ended
_RETRY_AFTER: Final = 300.0
_UNANSWERED: Final = 60.0
_LONGEST: Final = 1 << 16
_TO_UNDO: Final = 10.0  # seconds that undoing may delay the agent's exit


async def run(context: Context) -> None:
    """Apply layouts until cancelled."""
    label = Topic("", ServiceName.MIG_CONFIG, "the layout that the Node's label names")
    with closing(api_server_of(context.options)) as api:
        reports = _Reports(context, api)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_follow, context, api, label, reports)
            while True:
                await _apply_once(context, label, reports)


async def _follow(
    context: Context, api: ApiServer, label: Topic[str], reports: _Reports
) -> NoReturn:
    """Publish the Node's label, now and whenever it changes, and keep the state on the Node."""
    publisher, node = label.publisher(ServiceName.MIG_CONFIG), context.options.node_name
    path, query = f"{_NODES}/{quote(node, safe='')}", {"fieldSelector": f"metadata.name={node}"}
    backoff = Backoff()
    while True:
        started = time.monotonic()
        try:
            metadata = (await run_detached(partial(api.call, "GET", path))).get("metadata") or {}
            publisher.publish(_label_of(metadata))
            await reports.restore(metadata)
            # Watch from now on, without a version. That of a Node which has not changed for minutes
            # may be too old for a server with many Nodes, which answers 410 each time.
            start = partial(api.watch, _NODES, "", query)
            watch = await run_detached(start, drop=lambda watch: watch.close())
            context.fault("mig-config label", "")
            try:
                while (change := await run_detached(watch.next)) is not None:
                    if change[0] in {"ADDED", "MODIFIED"}:
                        metadata = change[1].get("metadata") or {}
                        publisher.publish(_label_of(metadata))
                        await reports.restore(metadata)
            finally:
                watch.close()
            await anyio.sleep(backoff.pause(time.monotonic() - started))
        except NvshimError as error:
            context.fault("mig-config label", str(error), level="warning")
            await anyio.sleep(_UNANSWERED)


def _label_of(metadata: dict[str, Any]) -> str:
    return str((metadata.get("labels") or {}).get(LABEL, ""))


async def _apply_once(context: Context, label: Topic[str], reports: _Reports) -> None:
    """Apply the layout of the label, until that ends and something has changed."""
    node, reloads = context.state.node, context.state.reloads

    def asked() -> tuple[Any, ...]:
        return label.value, reloads.value

    def there() -> tuple[Any, ...]:
        return node.value.driver, node.value.gpus

    before, is_applying = (asked(), there()), bool(label.value and node.value.gpus)

    def is_settled() -> bool:
        # A GPU that is reset may be away for a moment: that must not interrupt its reset.
        return asked() == before[0] and (is_applying or there() == before[1])

    async with anyio.create_task_group() as tasks:

        async def apply() -> None:
            nonlocal is_applying
            state = await _apply(context, label.value, reports)
            is_applying = False
            tasks.start_soon(reports.catch_up)
            if state == FAILED:
                await anyio.sleep(_RETRY_AFTER)
            elif is_settled():
                await _until_gpu_returns(node)
            tasks.cancel_scope.cancel()

        if is_applying:
            tasks.start_soon(apply)
        else:
            await reports.withdraw()
            tasks.start_soon(reports.catch_up)
        while is_settled():
            version = version_of(label, reloads, node)
            if is_settled():
                await wait_any(label, reloads, node, since=version)
        tasks.cancel_scope.cancel()


async def _until_gpu_returns(node: Topic[NodeSnapshot]) -> None:
    """Wait until a GPU or MIG device returns to service."""
    drained: frozenset[str] = frozenset()
    async for each in node.changes():
        if drained - each.drained.keys():
            return
        drained = frozenset(each.drained)


async def _apply(context: Context, name: str, reports: _Reports) -> str:
    """Apply a layout, report that, and return the state."""
    state, last = FAILED, _RUNNING
    while last.startswith(_RUNNING):
        while is_resetting(context.config):
            waits = f"the layout {name} waits for another reset or layout to end"
            await reports.write(PENDING, waits)
            await anyio.sleep(_PAUSE)
        state, last = await _try(context, name, reports)  # another may have been faster
    await reports.write(state, last if state == FAILED else f"the GPUs are as {name} says")
    return state


async def _try(context: Context, name: str, reports: _Reports) -> tuple[str, str]:
    """Apply a layout unless another command is at work; return the state, and why it failed."""
    last = ""
    process = await anyio.open_process(
        list(_command(context, name)), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    try:
        assert process.stderr is not None  # noqa: S101 - a pipe
        lines = BufferedByteReceiveStream(process.stderr)
        with suppress(anyio.IncompleteRead, anyio.DelimiterNotFound):
            while True:
                line = await lines.receive_until(b"\n", _LONGEST)
                last = one_line(line.decode(errors="replace"))
                if not last.startswith(_ERROR):
                    waits = f"the layout {name} {last}" if last.startswith(_WAITS) else ""
                    await reports.write(PENDING, waits)
        state = FAILED if await process.wait() else SUCCESS
        if state == FAILED and not last.startswith(_ERROR):
            # It was killed, or has a bug: its last line is that of a step, or of a traceback.
            last = f"`nvshim mig apply` exited with {process.returncode}: {last or 'no message'}"
    finally:
        with anyio.CancelScope(shield=True), anyio.move_on_after(_TO_UNDO):
            while process.returncode is None:
                process.send_signal(signal.SIGINT)  # Python may lose one
                with anyio.move_on_after(_PAUSE):
                    await process.wait()
    return state, last


def _command(context: Context, name: str) -> Iterator[str]:
    tree, options = own_tree(), context.options
    yield from [f"{tree}/bin/nvshim"] if tree else [sys.executable, "-m", "integration.cli"]
    yield from ("mig", "apply", "--wait=ever", "--reason", f"the label {LABEL} is {name}")
    yield from ("--ends-with", str(os.getpid()))  # it must not outlive this agent
    if context.config.source:
        yield from ("--config", context.config.source)
    for state in options.states:
        yield from ("--containerd-state", state)
    yield from ("--", options.mig_config_file, name)


class _Reports:
    """Writes the state to the Node, and events. What is already there is not written again."""

    def __init__(self, context: Context, api: ApiServer) -> None:
        self._context, self._api = context, api
        self._written: tuple[str, str] | None = None
        # What the server has not stored, or only in part: a label without its event.
        self._owed: tuple[str, str] | None = None
        self._latest: tuple[str, str] | None = None
        self._one_writes = threading.Lock()  # an abandoned write continues

    async def write(self, state: str, message: str) -> None:
        """Report a state. An event contains the message, unless that is empty.

        If the server refuses or is silent, that is logged; the layout is applied all the same.
        """
        self._owed, self._latest = None, (state, message)
        if self._written == (state, message):
            return
        self._written, self._owed = None, (state, message)
        try:
            await run_detached(self._write, state, message)
            self._written, self._owed = (state, message), None
            self._context.fault("mig-config state", "")
        except NvshimError as error:
            self._context.fault("mig-config state", str(error), level="warning")

    async def withdraw(self) -> None:
        """Remove the state of a layout that no longer applies, even one of an earlier agent."""
        last = self._owed or self._written
        if last is None or last[0] == PENDING:
            await self.write("", "")

    async def restore(self, metadata: dict[str, Any]) -> None:
        """Write the last state again if a Node has the layout's label but no state.

        Args:
            metadata: the Node's, perhaps from before the last state was written.
        """
        state = self._written[0] if self._written else ""
        if state and _label_of(metadata) and STATE not in metadata["labels"]:
            try:
                await run_detached(self._restore, state)
                self._context.fault("mig-config state", "")
            except NvshimError as error:  # the next change, or the next watch, tries again
                self._context.fault("mig-config state", str(error), level="warning")

    async def catch_up(self) -> None:
        """Report the last state again until the server takes it."""
        while self._owed is not None:
            await anyio.sleep(_UNANSWERED)
            await self.write(*self._owed)

    def _restore(self, state: str) -> None:
        with self._one_writes:
            path, labels = self._node()
            if STATE not in labels:  # a later state may have been written meanwhile
                self._api.call("PATCH", path, {"metadata": {"labels": {STATE: state}}})

    def _node(self) -> tuple[str, dict[str, Any]]:
        """Return the path of the Node, and its labels."""
        path = f"{_NODES}/{quote(self._context.options.node_name, safe='')}"
        return path, (self._api.call("GET", path).get("metadata") or {}).get("labels") or {}

    def _write(self, state: str, message: str) -> None:
        node = self._context.options.node_name
        with self._one_writes:
            if self._latest != (state, message):
                return  # an abandoned write that starts after a later one was requested
            path, labels = self._node()
            if labels.get(STATE) == state == SUCCESS:
                return  # an earlier agent reported the same
            if not state and labels.get(STATE) != PENDING:
                return  # the last report still holds
            if labels.get(STATE) != state:
                self._api.call("PATCH", path, {"metadata": {"labels": {STATE: state or None}}})
            if message:
                self._api.call("POST", _EVENTS, _event(node, state, message))


def _event(node: str, state: str, message: str) -> dict[str, Any]:
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": f"{node}.", "namespace": "default"},
        "involvedObject": {"apiVersion": "v1", "kind": "Node", "name": node, "uid": node},
        "reason": _REASONS[state],
        "message": message,
        "type": "Warning" if state == FAILED else "Normal",
        "count": 1,
        "firstTimestamp": now,
        "lastTimestamp": now,
        "source": {"component": "nvshim-node", "host": os.uname().nodename},
    }
