"""The device plugin, as a service of the agent.

::

    settings file ──▶ settings ─┐
    inventory ──────▶ node ─────┼─▶ resources ─▶ CDI specs ─▶ a plugin per resource ─▶ kubelet
    health, MPS, claims ────────┘

Rules
- The service runs where a kubelet runs. By default it does not serve next to another device plugin,
  because it would be left to chance which of the two the kubelet uses. It reports the other plugin
  and checks again later.
- If new settings are invalid, the service reports the error and keeps the previous ones.
- A device that cannot be read is unhealthy, not gone
  (:mod:`integration.node.services.plugin.resources`).
- A device that containers receive by a CDI name is unhealthy while no spec contains the name. Every
  device is unhealthy while a required IMEX channel is missing. Otherwise Allocate would refuse
  these devices, and a Deployment would create one failing pod after another.
- The service writes CDI specs before it announces new devices. If a device is gone or unhealthy, it
  announces that at once.
- Claimed devices change with each pod. The service then only sends the kubelet a new list. The
  specs of claims are in the same directory; changes to them do not wake the service.
- Registration with a starting kubelet comes first: half a second after its start, the kubelet kills
  running pods whose plugin is not registered.
- A round publishes one immutable snapshot (:mod:`integration.node.services.plugin.snapshot`). The
  kubelet's calls are answered from it (:mod:`integration.node.services.plugin.answers`). A round
  without new devices publishes at once which ones are gone or unhealthy, and again after it has
  written the specs.
- The directory of the specs may be on a file system that does not answer. A round waits for it only
  for a while, then continues without specs: health and everything else is still announced.
- The service imports gRPC only when it starts to serve.
- The service asks the engine whether it applies CDI devices, and asks again when the engine has
  restarted. If the engine does not apply them, containers also receive their devices in another
  way, and the service logs that (:mod:`integration.node.delivery`). Registration does not wait for
  the engine.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

import anyio
import anyio.abc

from api.errors import NvshimError, one_line
from hooks.config import Config
from hooks.node.inventory import Inventory
from integration.agent_errors import (
    CdiDeviceUnwritten,
    KubeletUnreachable,
    OtherPlugin,
    PluginSpecUnwritten,
)
from integration.detached import SlowCall, run_detached
from integration.kubelet import sockets
from integration.node.delivery import ENABLE, DeliveryMode
from integration.node.mps.clients import unready
from integration.node.options import YES
from integration.node.service import Context
from integration.node.services.plugin.allocation import IMEX_NODES, refuse_ineffective
from integration.node.services.plugin.answers import SnapshotAnswers
from integration.node.services.plugin.cdi import (
    KINDS,
    Specs,
    directory_of,
    feature_directories,
    feature_files,
    files_of,
    keep_specs,
    path_of,
)
from integration.node.services.plugin.claimed import claimed_on, without_claimed
from integration.node.services.plugin.engine_watch import EngineAnswer, watch_engine
from integration.node.services.plugin.reloading import keep_settings
from integration.node.services.plugin.resources import (
    resources_of,
    unannounced,
    unhealthy,
    unmatched,
)
from integration.node.services.plugin.snapshot import Snapshot
from integration.node.state.topic import Signal, Watched, call_on_change, version_of, wait_any
from integration.node.values.resources import MPS, Resource, Settings
from integration.node.values.service_name import ServiceName
from integration.nvml.topology import numa_nodes
from integration.timeouts import PATIENCE
from integration.watcher import ANY, Interest, Watcher, first_of

if TYPE_CHECKING:  # it imports gRPC, which the service needs only when it serves
    from integration.node.services.plugin.serving import Serving

_NAME: Final = "plugin"

# Seconds between two checks for other plugins: nothing reports that one of them died.
_LOOK_FOR_OTHERS: Final = 30.0
# Seconds until specs that could not be written are tried again, and until a call stops waiting.
_RETRY: Final = 30.0
_LONGEST_REPAIR: Final = 5.0
# Seconds after which a round continues without the specs.
_LONGEST_KEEP: Final = 10.0 * PATIENCE
_FEW: Final = 3
# Seconds without a change that end a burst of changes, and the longest burst.
_SWARM: Final = 0.05
_LONGEST_SWARM: Final = 1.0
# Seconds between two looks at the specs while they are not watched.
_UNHEARD: Final = 0.25
# Seconds between two checks of the kubelet's directory, however often it changes.
_PAUSE: Final = 0.01


async def run(context: Context) -> None:
    """Serve the kubelet, until cancelled."""
    context.state.faults.clear(f"{_NAME} ")
    async with anyio.create_task_group() as tasks:
        reconciler = _Reconciler(context, tasks)
        tasks.start_soon(partial(keep_settings, context, reconciler.fault))
        tasks.start_soon(partial(call_on_change, reconciler.wake, *reconciler.inputs, at_once=True))
        tasks.start_soon(call_on_change, reconciler.send_claimed, context.state.claimed_devices)
        tasks.start_soon(reconciler.watch_kubelet)
        tasks.start_soon(reconciler.watch_files)
        tasks.start_soon(reconciler.watch_engine)
        await reconciler.keep_serving()


class _Reconciler:
    """Keeps the snapshot, the CDI specs and the kubelet's lists up to date."""

    def __init__(self, context: Context, tasks: anyio.abc.TaskGroup) -> None:
        self.snapshot = Snapshot()
        self._context = context
        self._state = state = context.state
        self.inputs: tuple[Watched, ...] = (
            state.node, state.health, state.settings, state.mps_daemons,
        )  # fmt: skip
        self._resources = state.resources.publisher(ServiceName.PLUGIN)
        self._delivery = state.delivery.publisher(ServiceName.PLUGIN)
        self._announced = state.announced.publisher(ServiceName.PLUGIN)
        self._options = context.options
        self._tasks = tasks
        self._serving: Serving | None = None
        self._has_served = anyio.Event()
        self._specs_of: tuple[object, ...] | None = None
        self._specs = Specs()
        self._keeping_specs = anyio.Lock()
        self._keeping = SlowCall()
        self._finding = anyio.Lock()
        self._unmatched: tuple[str, ...] = ()
        self._engine: EngineAnswer | None = None
        self._engine_doubted = Signal("the engine may have restarted, ask it again")
        self._mode = DeliveryMode(())
        self._wake = anyio.Event()

    # Events

    async def watch_kubelet(self) -> None:
        """Start a round whenever a socket appears in or disappears from the kubelet's directory."""
        directory = os.path.dirname(self._options.kubelet_socket)
        with Watcher(quiet=0) as watcher:
            while True:
                await watcher.change({directory: ANY})
                if self._serving is not None:
                    self._serving.look()
                self.wake()
                await anyio.sleep(_PAUSE)

    async def watch_files(self) -> None:
        """Start a round whenever a spec, or what an IMEX channel or a feature needs, changes."""
        config, node = self._context.config, self._state.node
        specs = frozenset(os.path.basename(path_of(kind, config)) for kind in KINDS)
        with Watcher(_SWARM, _LONGEST_SWARM) as watcher:
            while True:
                version = version_of(node)
                features = await run_detached(feature_directories, node.value.inventory, config)
                wanted = {**features, directory_of(config): Interest(specs)}
                # A new driver does not cancel this, because a thread may be working on it.
                if not await watcher.follow_detached(wanted):
                    # A new driver may be below another root.
                    new_driver = partial(wait_any, node, since=version)
                    pause = _UNHEARD if watcher.deaf else math.inf
                    await first_of(partial(watcher.wait, pause), new_driver)
                self.wake()

    async def watch_engine(self) -> None:
        """Publish what the engine can do, whenever that may have changed."""
        await self._has_served.wait()  # asking loads gRPC
        await watch_engine(self._options.cri_sockets, self._know_engine, self._engine_doubted)

    def wake(self) -> None:
        """Start the next round."""
        self._wake.set()

    # Rounds

    async def keep_serving(self) -> None:
        """Run a round at every event, and after the pause that the previous round asked for."""
        while True:
            wake = self._wake = anyio.Event()
            pause = await self._round()
            with anyio.move_on_after(pause):
                await wake.wait()

    async def _round(self) -> float:
        """Bring everything up to date, and return the longest pause before the next round."""
        before = self.snapshot
        now = replace(self._look(before), channels=_channels(self._context.config.dev))
        pause, active = self._may_serve()
        if not active:
            self.snapshot = now
            self._resources.publish(())
            self._announced.publish(now.settings is not None)
            if self._serving is not None:
                self._serving.stop()
                self._serving = None
            return pause
        has_new = (
            now.settings != before.settings
            or _adds(before.resources, now.resources)
            or not set(now.channels).issubset(before.channels)
        )
        if self._serving is not None and not has_new:
            self._publish(now)  # no need to wait for the specs
            self._serve(self._serving)
        async with self._keeping_specs:
            specs = await self._keep_specs(now.settings, now.inventory)
            self._publish(replace(now, specs=specs))
        if self._serving is None or now.inventory != before.inventory:
            self.find_topology()
        self._resources.publish(now.resources)
        self._serving = self._serving or self._new_serving()
        self._has_served.set()
        self._serve(self._serving)
        return min(pause, _RETRY) if specs.fault else pause

    def _publish(self, snapshot: Snapshot) -> None:
        """Replace the snapshot, with the latest knowledge of the engine and the topology."""
        topology = snapshot.topology
        if snapshot.inventory is not None:
            topology = self._context.topologies.at_once(snapshot.inventory)
        self.snapshot = replace(snapshot, engine=self._engine, topology=topology)
        if self._engine is not None and snapshot.settings is not None:
            self._report_delivery(snapshot.settings, self.snapshot.mode)

    def _look(self, before: Snapshot) -> Snapshot:
        """Return the snapshot for the current inputs; its specs are those of the one before."""
        version = version_of(*self.inputs)
        settings, inventory = self._state.settings.value, self._state.node.value.inventory
        if version == before.version or settings is None:
            return before
        resources = None
        try:
            if inventory is not None:
                numa = numa_nodes(self._context.config, inventory.gpus)
                resources = resources_of(inventory, settings, self._state.health.value, numa)
        except NvshimError as error:
            self.fault("resources", str(error))
        else:
            self.fault("resources", "")
            self._warn_unmatched(inventory, settings)
        if resources is None:  # the previous devices may come back
            known = _gpus_without_nvml(inventory) if inventory is not None else ()
            resources = unhealthy(before.resources, but=known)
        resources = tuple(map(self._with_ready_mps, resources))
        return replace(
            before, version=version, settings=settings, inventory=inventory, resources=resources
        )

    def _serve(self, serving: Serving) -> None:
        """Offer the resources of the snapshot to the kubelet."""
        self.fault("imex", self.snapshot.channels_fault)
        offered = self._unclaimed()
        serving.serve(offered)
        if not any(each.devices for each in offered):
            self._announced.publish(True)

    def send_claimed(self) -> None:
        """Send the kubelet lists in which the claimed devices are unhealthy."""
        if self._serving is not None:
            self._serving.update(self._unclaimed())

    def _unclaimed(self) -> list[Resource]:
        """Return the offered resources; devices that no pod can have now are unhealthy."""
        claimed = claimed_on(self._state, self._context.config)
        return [without_claimed(each, claimed) for each in self.snapshot.offered]

    def _warn_unmatched(self, inventory: Inventory | None, settings: Settings) -> None:
        """Warn once about each sharing rule without a device, and each GPU without a resource."""
        lines: tuple[str, ...] = ()
        if inventory is not None:
            lines = (*unmatched(inventory, settings), *unannounced(inventory, settings))
        for line in lines:
            if line not in self._unmatched:
                self._context.say("warning", line)
        self._unmatched = lines

    def _with_ready_mps(self, resource: Resource) -> Resource:
        """Return a resource; devices shared by MPS without a ready daemon are unhealthy."""
        if resource.sharing != MPS:
            return resource
        served = {
            device.uuid
            for device in resource.devices
            if not unready(resource.name, (device.uuid,), self._state.mps_daemons.value)
        }
        return unhealthy((resource,), but=served)[0]

    def _may_serve(self) -> tuple[float, bool]:
        """Return the pause before the next check, and whether to serve now."""
        if self._state.settings.value is None:
            return math.inf, False
        kubelet = sockets.socket_identity(self._options.kubelet_socket)
        if self._options.device_plugin == YES:
            missing = KubeletUnreachable(
                f"a kubelet at {self._options.kubelet_socket}",
                found="there is no such socket",
                do="check that the kubelet runs; the agent registers as soon as it does",
            )
            self.fault("kubelet", "" if kubelet is not None else str(missing))
            return math.inf, True
        if kubelet is None and self._serving is None:
            self.fault("kubelet", "")
            return math.inf, False
        directory = os.path.dirname(self._options.kubelet_socket)
        ours = self._serving.identities if self._serving is not None else ()
        others = sockets.others(directory, ours)
        if not others:
            self.fault("kubelet", "")
            return math.inf, True
        named = ", ".join(map(os.path.basename, others[:_FEW]))
        error = OtherPlugin(
            "to serve the kubelet",
            found=f"another device plugin serves {named} in {directory}",
            do="remove that plugin, or set --device-plugin yes to serve anyway, or --device-plugin "
            "no to switch this one off",
        )
        self.fault("kubelet", str(error))
        return _LOOK_FOR_OTHERS, False

    # CDI specs

    async def repair_specs(self) -> None:
        """Write the specs again. See :class:`~.answers.Reconciling`."""
        done = anyio.Event()
        self._tasks.start_soon(self._repair_specs, done)
        with anyio.move_on_after(_LONGEST_REPAIR):
            await done.wait()
        if not done.is_set():
            raise CdiDeviceUnwritten(
                "the device plugin's CDI specs",
                found=f"writing them again takes more than {_LONGEST_REPAIR:g} s",
                do=f"check the disk of {directory_of(self._context.config)}",
            )

    async def _repair_specs(self, done: anyio.Event) -> None:
        async with self._keeping_specs:
            now = self.snapshot
            specs = await self._keep_specs(now.settings, now.inventory)
            self._publish(replace(self.snapshot, specs=specs))
        done.set()

    async def _keep_specs(self, settings: Settings | None, inventory: Inventory | None) -> Specs:
        """Bring the specs up to date, unless they are; one caller at a time."""
        config = self._context.config
        if settings is None:
            return self._specs
        keep = partial(_kept, settings, inventory, config, self._specs_of)
        try:
            of, specs = await self._keeping.run(keep, _LONGEST_KEEP)
        except TimeoutError:
            directory, of = directory_of(config), None
            unanswered = PluginSpecUnwritten(
                f"to keep the device plugin's CDI specs in {directory}",
                found="its file system does not answer",
                do="check the disk, or name another directory in spec-dirs; the agent tries again",
            )
            specs = Specs(fault=str(unanswered))
        if specs is None:
            return self._specs
        self._specs_of, self._specs = of, specs
        for path in specs.written:
            self._context.say("info", "CDI spec of the device plugin is up to date", path=path)
        self.fault("cdi", specs.fault)
        return self._specs

    # The engine

    def doubt_engine(self) -> None:
        """Ask the engine again. See :class:`~.answers.Reconciling`."""
        self._engine_doubted.send()

    def _know_engine(self, answer: EngineAnswer) -> None:
        """Publish what the engine can do."""
        self._engine = answer
        self._publish(self.snapshot)

    def _report_delivery(self, settings: Settings, mode: DeliveryMode) -> None:
        """Report how containers receive their devices, when that has changed."""
        if mode == self._mode:
            return
        why, self._mode = self._mode.why, mode
        if mode.why and mode.why != why:
            by = ", ".join(mode.strategies)
            line = f"{mode.why}: containers receive their devices by {by}"
            self._context.say("warning", line, command=ENABLE)
        elif why and not mode.why:
            self._context.say("info", "the engine applies the CDI devices of containers", over=why)
        try:
            refuse_ineffective(
                replace(settings, device_list_strategies=mode.strategies), self._context.config
            )
        except NvshimError as error:
            self.fault("strategy", str(error))
        else:
            self.fault("strategy", "")
        self._delivery.publish(mode)

    # The topology

    def find_topology(self) -> None:
        """Find the distances between the GPUs. See :class:`~.answers.Reconciling`."""
        self._tasks.start_soon(self._find_topology)

    async def _find_topology(self) -> None:
        """Find the distances between the GPUs; NVML may take long to answer."""
        async with self._finding:
            if self.snapshot.inventory is not None:
                await run_detached(self._context.topologies.find, self.snapshot.inventory)
                self._publish(self.snapshot)

    def _new_serving(self) -> Serving:
        from integration.node.services.plugin.serving import Serving  # noqa: PLC0415 - it loads gRPC

        return Serving(self._context, self._tasks, SnapshotAnswers(self._context, self), self.fault)

    def fault(self, concern: str, line: str) -> None:
        """Report what is wrong with a subject of this service; "" once it is resolved."""
        self._context.fault(f"{_NAME} {concern}", one_line(line), part=_NAME)


def _kept(
    settings: Settings, inventory: Inventory | None, config: Config, before: object
) -> tuple[tuple[object, ...] | None, Specs | None]:
    """Bring the specs up to date, unless they are.

    Args:
        before: the inputs of the existing specs; None if they are uncertain.

    Returns:
        The inputs of the specs now, None if they are uncertain; and the specs, None if they were up
        to date.
    """
    files = files_of(config)
    of = (settings, inventory, feature_files(inventory, config), files)
    if before == of:
        return of, None
    specs = keep_specs(settings, inventory, config)
    # `files` is from before they were read, so a later removal will make a difference. If a file
    # was just written, compare once more in the next round.
    if specs.fault or specs.written:
        return None, specs
    return of, replace(specs, files=files)


def _gpus_without_nvml(inventory: Inventory) -> frozenset[str]:
    """Return the GPUs that procfs lists while NVML does not answer."""
    if not inventory.nvml_failure:
        return frozenset()
    return frozenset(gpu.uuid for gpu in inventory.gpus if not gpu.lost)


def _adds(before: Iterable[Resource], now: Iterable[Resource]) -> bool:
    """Whether there are new devices."""
    previous = {each.name: each.by_id.keys() for each in before}
    return any(each.by_id.keys() - previous.get(each.name, set()) for each in now)


def _channels(dev: str) -> tuple[int, ...]:
    """Return the IMEX channels of the node."""
    try:
        names = os.listdir(dev + IMEX_NODES.removeprefix("/dev"))
    except OSError:
        return ()
    numbers = (name.removeprefix("channel") for name in names if name.startswith("channel"))
    return tuple(sorted(int(each) for each in numbers if each.isascii() and each.isdecimal()))
