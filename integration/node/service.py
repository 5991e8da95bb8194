"""The parts of the agent, and how they are kept going.

A part is a coroutine ``run(context)`` in a module of its own, imported if it is wanted: a node that
serves no metrics does not pay for them. It ends when it is cancelled, and not before; whatever else
ends it is said, and it is begun again after a while, so that none takes another down with it.
"""

from __future__ import annotations

import importlib
import os
import time
import traceback
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import anyio

from api.errors import NvshimError, one_line
from integration.backoff import Backoff
from integration.kubelet.pod_resources import PodResources
from integration.node.options import NO
from integration.node.state.store import Board
from integration.node.values.resources import Settings
from integration.nvml.topology import Topologies

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hooks.config import Config
    from integration.node.options import Options

# Seconds that it has to go until it is taken to be well; one that fails at once each time is said
# to be at fault all the while.
_WELL: Final = 2.0


class Serves(Protocol):
    """What serves the kubelet as a driver (:mod:`integration.node.services.dra.server`)."""

    async def work(self, answers: Any) -> None:
        """Have the answers be ours from now on, until cancelled."""


@dataclass(frozen=True, slots=True)
class Context:
    """What a part is given."""

    config: Config  # where the node is
    options: Options  # what the agent is to do
    say: Callable[..., None]  # takes the log's lines: level, event, fields
    board: Board = field(default_factory=Board)  # what the parts tell each other
    # what has served the kubelet since before the node was ours, if it was not at first
    serving: Serves | None = None
    kubelet: PodResources = field(default_factory=PodResources)  # says what it has given to whom
    topologies: Topologies = field(init=False, repr=False)  # how near GPUs are to each other

    def __post_init__(self) -> None:
        """Make what is of the node."""
        object.__setattr__(self, "topologies", Topologies(self.config))

    def fault(self, name: str, line: str, /, *, level: str = "error", **fields: Any) -> None:
        """Post what is wrong with a part, and say it once.

        Args:
            name: the part ("plugin").
            line: what; "" if nothing is any more.
            fields: more for the log's line.
        """
        if line and self.board.faults.get(name) != line:
            self.say(level, line, **fields)
        self.board.fault(name, line)


class Part(NamedTuple):
    """A part of the agent."""

    module: str  # that it is
    is_wanted: Callable[[Options], object] = lambda _: True  # whether the options want it


def _tells_cluster(options: Options) -> bool:
    """Whether there is an API server to tell, and what to be let in by."""
    return bool(options.kubeconfig) or (
        bool(options.api_server) and os.path.isdir(options.service_account)
    )


PARTS: Final[Mapping[str, Part]] = {
    "plugin": Part(
        "integration.node.services.plugin.service", lambda options: options.device_plugin != NO
    ),
    "dra": Part("integration.node.services.dra.service", lambda options: options.dra),
    "causes": Part("integration.node.services.causes.service"),
    "ledger": Part("integration.node.services.ledger.service"),
    "health": Part("integration.node.services.health.service"),
    "memory-guard": Part("integration.node.services.memory_guard"),
    "metrics": Part("integration.node.services.metrics.service", lambda options: options.metrics),
    "monitor": Part("integration.node.services.monitor.service"),
    "mps": Part("integration.node.services.mps.service"),
    "node-condition": Part(
        "integration.node.services.node_condition",
        lambda options: options.node_condition and _tells_cluster(options),
    ),
    "pod-events": Part("integration.node.services.pod_events", _tells_cluster),
}
"""Each part by its name, in the order in which they begin: a kubelet waits for the first two."""


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
            raised = await _end_of(module or PARTS[name].module, context)
            forgiving.cancel()
            pause = backoff.pause(time.monotonic() - begun)
            line = _line_of(name, raised)
            more = {}
            if raised is not None and not isinstance(raised, NvshimError):
                more["trace"] = "".join(traceback.format_exception(raised))
            context.fault(name, line, part=name, again_in=pause, **more)
            context.board.counters.restarted(name)
            await anyio.sleep(pause)


async def _end_of(module: str, context: Context) -> Exception | None:
    """Run a part; what it raised, None if it just ended."""
    try:
        await importlib.import_module(module).run(context)
    except Exception as raised:  # noqa: BLE001 - none takes another down with it
        return first_error(raised)
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


def first_error(error: Exception) -> Exception:
    """Return what has ended a part; of several that a task group has put together, the first."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


def settings_of(context: Context) -> Settings | None:
    """The device plugin's settings, which say where MPS has its files; None if not known yet.

    An agent that is no device plugin reads them here, if it has claims.

    Raises:
        SettingsError: something of them is wrong.
    """
    options = context.options
    if context.board.settings is not None or options.device_plugin != NO or not options.dra:
        return context.board.settings
    return Settings() if options.settings is None else options.settings.load()
