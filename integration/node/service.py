"""The table of the agent's services, and their supervision.

A service is a coroutine ``run(context)`` in its own module. The module is imported only if the
options enable the service, so that a node without metrics does not pay for them. A service runs
until it is cancelled. If it returns or raises, the agent logs that and restarts it after a pause;
the other services keep running.
"""

from __future__ import annotations

import importlib
import os
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

import anyio

from api.errors import NvshimError, one_line
from hooks.config import Config
from integration.backoff import Backoff
from integration.kubelet.pod_resources import PodResources
from integration.node.file_calls import FileCalls
from integration.node.options import FILE, NO, NONE, Options
from integration.node.state.store import State
from integration.node.values.resources import Settings
from integration.node.values.service_name import ServiceName
from integration.nvml.topology import Topologies

# Seconds that a restarted service must run before its fault is cleared. The fault of a service that
# fails at each start is never cleared.
_RUNS_WELL_AFTER: Final = 2.0


class Serves(Protocol):
    """A DRA server for the kubelet (:mod:`integration.node.services.dra.server`)."""

    async def work(self, answers: Any) -> None:
        """Answer the kubelet with ``answers`` from now on, until cancelled."""


@dataclass(frozen=True, slots=True)
class Context:
    """The arguments of each service."""

    config: Config  # where the node's files are
    options: Options
    say: Callable[..., None]  # writes a line of the log: level, event, fields
    state: State = field(default_factory=State)  # shared by the services
    # the DRA server of an agent that had to wait for the node lock; None if it got the lock at once
    serving: Serves | None = None
    kubelet: PodResources = field(default_factory=PodResources)  # which pod has which devices
    files: FileCalls = field(default_factory=FileCalls, repr=False)  # reads and writes files
    topologies: Topologies = field(init=False, repr=False)  # how close GPUs are to each other

    def __post_init__(self) -> None:
        """Set the attributes that depend on the configuration."""
        object.__setattr__(self, "topologies", Topologies(self.config))

    def fault(self, name: str, line: str, /, *, level: str = "error", **fields: Any) -> None:
        """Report a fault in the state, and log it when it is new.

        Args:
            name: the subject: a service ("plugin") or one of its tasks ("plugin specs").
            line: the fault; "" once it is resolved.
            fields: more fields of the log's line.
        """
        if line and self.state.faults.lines.get(name) != line:
            self.say(level, line, **fields)
        self.state.faults.report(name, line)


class Service(NamedTuple):
    """A service of the agent."""

    module: str  # the module that has ``run(context)``
    is_wanted: Callable[[Options], object] = lambda _: True  # whether the options ask for it
    is_urgent: bool = False  # whether a kubelet waits for it, so that it starts first


def _has_api_server(options: Options) -> bool:
    """Whether the agent can reach an API server and has credentials for it."""
    return bool(options.kubeconfig) or (
        bool(options.api_server) and os.path.isdir(options.service_account)
    )


SERVICES: Final[Mapping[ServiceName, Service]] = {
    # The first list that the kubelet gets must already say which devices are unhealthy.
    ServiceName.HEALTH: Service("integration.node.services.health.service", is_urgent=True),
    ServiceName.PLUGIN: Service(
        "integration.node.services.plugin.service",
        lambda options: options.device_plugin != NO,
        is_urgent=True,
    ),
    ServiceName.DRA: Service(
        "integration.node.services.dra.service", lambda options: options.dra, is_urgent=True
    ),
    ServiceName.NRI: Service("integration.node.services.nri.service", lambda options: options.nri),
    ServiceName.CAUSES: Service("integration.node.services.causes.service"),
    ServiceName.LABELS: Service(
        "integration.node.services.labels.service",
        lambda options: (
            options.node_labels == FILE
            or (options.node_labels != NONE and _has_api_server(options))
        ),
    ),
    ServiceName.LEDGER: Service("integration.node.services.ledger.service"),
    ServiceName.MEMORY_GUARD: Service("integration.node.services.memory_guard"),
    ServiceName.METRICS: Service(
        "integration.node.services.metrics.service", lambda options: options.metrics
    ),
    ServiceName.MIG_CONFIG: Service(
        "integration.node.services.mig_config",
        lambda options: options.mig_config_file and _has_api_server(options),
    ),
    ServiceName.MONITOR: Service("integration.node.services.monitor.service"),
    ServiceName.MPS: Service("integration.node.services.mps.service"),
    ServiceName.NODE_CONDITION: Service(
        "integration.node.services.node_condition",
        lambda options: options.node_condition and _has_api_server(options),
    ),
    ServiceName.NVSENTINEL: Service(
        "integration.node.services.nvsentinel", lambda options: options.nvsentinel
    ),
    ServiceName.POD_EVENTS: Service("integration.node.services.pod_events", _has_api_server),
}
"""The services in the order in which they start."""


async def supervise(name: str, context: Context, module: str) -> None:
    """Run a service and restart it whenever it ends, until cancelled.

    Args:
        name: the subject of its fault, and its name in the log and the metrics.
        module: has ``run(context)``.
    """
    backoff, line = Backoff(), ""
    async with anyio.create_task_group() as tasks:
        while True:
            started = time.monotonic()
            clearing = anyio.CancelScope()
            tasks.start_soon(_clear_fault, name, line, context, clearing)
            raised = await _run(module, context)
            clearing.cancel()
            pause = backoff.pause(time.monotonic() - started)
            line = _line_of(name, raised)
            more = {}
            if raised is not None and not isinstance(raised, NvshimError):
                more["trace"] = "".join(traceback.format_exception(raised))
            context.fault(name, line, part=name, again_in=pause, **more)
            context.state.counters.restarted(name)
            await anyio.sleep(pause)


async def _run(module: str, context: Context) -> Exception | None:
    """Run a service until it ends; return its exception, None if it returned."""
    try:
        await importlib.import_module(module).run(context)
    except Exception as raised:  # noqa: BLE001 - one service must not end the others
        return first_error(raised)
    return None


def _line_of(name: str, raised: Exception | None) -> str:
    if raised is None:
        return f"the service {name} of the agent ended"
    if isinstance(raised, NvshimError):
        return one_line(str(raised))
    return one_line(f"{name}: {type(raised).__name__}: {raised}")


async def _clear_fault(name: str, line: str, context: Context, scope: anyio.CancelScope) -> None:
    """Clear the fault of a service that was restarted, once it has run for a while."""
    with scope:
        await anyio.sleep(_RUNS_WELL_AFTER)
        if context.state.faults.lines.get(name) == line:
            context.state.faults.report(name, "")


def first_error(error: Exception) -> Exception:
    """Return the first error of a task group's exception group, or the error itself."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


def settings_of(context: Context) -> Settings | None:
    """Return the device plugin's settings; None if not known yet.

    An agent without the device plugin does not publish them. It needs them only for claims (they
    name MPS's directory) and for labels, so it reads them here.

    Raises:
        SettingsError: a setting is wrong.
    """
    options, settings = context.options, context.state.settings.value
    is_needed = options.dra or options.node_labels != NONE
    if settings is not None or options.device_plugin != NO or not is_needed:
        return settings
    return Settings() if options.settings is None else options.settings.load()
