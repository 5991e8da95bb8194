"""The parts of the agent, and how they are kept going.

A part is a coroutine ``run(context)`` in a module of its own, imported when it is wanted: a node
without a kubelet does not pay for gRPC. It ends when it is cancelled, and not before; whatever else
ends it is said, and it is begun again after a while, so that none takes another down with it.
"""

from __future__ import annotations

import importlib
import time
import traceback
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import anyio

from api.errors import NvshimError, one_line
from integration.cri.engine import CRI_SOCKETS
from integration.node.backoff import Backoff
from integration.node.board import Board

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hooks.config import Config
    from integration.node.plugin.settings import Source

__all__ = ["AUTO", "DRA_DRIVER", "NO", "PARTS", "YES", "Context", "Options", "keep"]

AUTO: Final = "auto"
YES: Final = "yes"
NO: Final = "no"

DRA_DRIVER: Final = "gpu.containerd-shim-nvidia"
"""Not NVIDIA's: a kubelet would take two drivers of one name for the same at its update."""

PARTS: Final[Mapping[str, str]] = {
    "causes": "integration.node.causes.component",
    "dra": "integration.node.dra.component",
    "ledger": "integration.node.ledger.component",
    "health": "integration.node.health.component",
    "memory-guard": "integration.node.causes.guard",
    "metrics": "integration.node.metrics.component",
    "monitor": "integration.node.monitor.component",
    "mps": "integration.node.mps.component",
    "node-condition": "integration.node.health.node_condition",
    "plugin": "integration.node.plugin.component",
    "pod-events": "integration.node.ledger.pod_events",
}
"""The module of each part, by its name."""

# Seconds that it has to go until it is taken to be well; one that fails at once each time is said
# to be at fault all the while.
_WELL: Final = 2.0


@dataclass(frozen=True, slots=True)
class Options:
    """What the agent is to do.

    Attributes:
        spec: the path of the CDI spec that it keeps; "" for none.
        poll: seconds between two looks that nothing gave a reason for.
        device_plugin: whether it serves kubelets: :data:`AUTO` (if there is one here, and no other
            plugin for its resources), :data:`YES`, :data:`NO`.
        kubelet_socket: where a kubelet registers device plugins; theirs are made beside it.
        pod_resources: the socket on which the kubelet tells what it has given to whom.
        settings: where the device plugin's come from; None for what NVIDIA's has by default.
        metrics: "ADDRESS:PORT" where /metrics is served; "" for nowhere.
        cri_sockets: where an engine may serve the kubelet; the first that answers is meant.
        api_server: the address of the cluster's API server; "" for none.
        api_port: likewise.
        service_account: where the agent's token for it is, if it has one.
        dra: whether it is a driver of dynamic resource allocation.
        dra_driver: what that is called.
        dra_mig: whether it makes MIG devices for claims.
        node_condition: whether the Node is told which of its GPUs no pod can have.
        node_name: of the Node that this is in the cluster.
        states: containerd's state directories; none for those that are known.
        ignored_xids: what ``DP_DISABLE_HEALTHCHECKS`` says.
        heeded_xids: what ``DP_ENABLE_HEALTHCHECKS`` says.
        kernel_log: where the kernel's log is read; "" for nowhere.
    """

    spec: str
    poll: float
    device_plugin: str = AUTO
    kubelet_socket: str = "/var/lib/kubelet/device-plugins/kubelet.sock"
    pod_resources: str = "/var/lib/kubelet/pod-resources/kubelet.sock"
    settings: Source | None = None
    metrics: str = ""
    cri_sockets: tuple[str, ...] = CRI_SOCKETS
    api_server: str = ""
    api_port: int = 443
    service_account: str = "/run/containerd-shim-nvidia/service-account"
    dra: bool = False
    dra_driver: str = DRA_DRIVER
    dra_mig: bool = False
    node_condition: bool = False
    node_name: str = ""
    states: tuple[str, ...] = ()
    ignored_xids: str = ""
    heeded_xids: str = ""
    kernel_log: str = "/dev/kmsg"


@dataclass(frozen=True, slots=True)
class Context:
    """What a part is given.

    Attributes:
        config: where the node is.
        options: what the agent is to do.
        say: takes the log's lines: level, event, fields.
        board: what the parts tell each other.
    """

    config: Config
    options: Options
    say: Callable[..., None]
    board: Board = field(default_factory=Board)


async def keep(name: str, context: Context, module: str = "") -> None:
    """Keep a part of :data:`PARTS` going, until cancelled.

    Args:
        module: another one than the table's.
    """
    backoff, line = Backoff(), ""
    async with anyio.create_task_group() as tasks:
        while True:
            begun = time.monotonic()
            forgiving = anyio.CancelScope()
            tasks.start_soon(_forgive, name, line, context, forgiving)
            raised = await _end_of(module or PARTS[name], context)
            forgiving.cancel()
            pause = backoff.pause(time.monotonic() - begun)
            line = _line_of(name, raised)
            if context.board.faults.get(name) != line:
                more = {}
                if raised is not None and not isinstance(raised, NvshimError):
                    more["trace"] = "".join(traceback.format_exception(raised))
                context.say("error", line, part=name, again_in=pause, **more)
            context.board.fault(name, line)
            context.board.counters.restarted(name)
            await anyio.sleep(pause)


async def _end_of(module: str, context: Context) -> Exception | None:
    """Run a part; what it raised, None if it just ended."""
    try:
        await importlib.import_module(module).run(context)
    except Exception as raised:  # noqa: BLE001 - none takes another down with it
        return _first(raised)
    return None


def _line_of(name: str, raised: Exception | None) -> str:
    if raised is None:
        return f"the part {name} of the agent ended"
    if isinstance(raised, NvshimError):
        return one_line(str(raised))
    return one_line(f"{name}: {type(raised).__name__}: {raised}")


async def _forgive(name: str, line: str, context: Context, scope: anyio.CancelScope) -> None:
    """Take back what was said of a part that had ended, once it goes for a while."""
    with scope:
        await anyio.sleep(_WELL)
        if context.board.faults.get(name) == line:
            context.board.fault(name, "")


def _first(error: Exception) -> Exception:
    """What has ended a part; of several, which its task group has put together, the first."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
