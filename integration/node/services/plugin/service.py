"""The device plugin, as a service of the agent.

::

    settings file ──▶ settings ─┐
    inventory ──────▶ node ─────┼─▶ resources ─▶ CDI specs ─▶ a plugin per resource ─▶ kubelet
    health, MPS, claims ────────┘

Rules
- The service serves where a kubelet runs. By default it does not serve next to another device
  plugin, because chance would decide which of the two the kubelet uses. It reports the other plugin
  and checks again later.
- If new settings are invalid, the service reports the error and keeps the previous ones.
- A device that cannot be read is unhealthy, not gone
  (:mod:`integration.node.services.plugin.resources`).
- A device that containers receive by a CDI name is unhealthy while no spec contains the name. Every
  device is unhealthy while a required IMEX channel is missing. Allocate would refuse these devices,
  and a Deployment would create one failing pod after another.
- The service writes CDI specs before it announces new devices. It announces at once that a device
  is gone or unhealthy.
- Claimed devices change with each pod. The service then only sends the kubelet a new list. The
  specs of claims are in the same directory; changes to them do not wake the service.
- To register with a starting kubelet comes first: half a second after its start, the kubelet kills
  running pods whose plugin is not registered.
- Allocate uses the latest state: it waits until published changes are applied, and first writes
  again the specs that someone changed or removed.
- The service imports gRPC only when it starts to serve.
- The service asks the engine whether it applies CDI devices, and asks again before Allocate if the
  engine has restarted or changed. If the engine does not apply them, containers also receive their
  devices in another way, and the service logs that (:mod:`integration.node.delivery`). Registration
  does not wait for the engine.
"""

from __future__ import annotations

import math
import os
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import anyio
import anyio.abc

from api.errors import NvshimError, one_line
from api.proto import deviceplugin_pb2 as pb
from hooks.node.inventory import Inventory
from integration.agent_errors import DeviceUnknown, KubeletUnreachable, OtherPlugin
from integration.detached import run_detached
from integration.kubelet import sockets
from integration.node.delivery import ENABLE, DeliveryMode, delivery_mode
from integration.node.engine_query import EngineQuery
from integration.node.mps.clients import add_client, refuse_unready, unready
from integration.node.options import YES
from integration.node.service import Context
from integration.node.services.plugin.allocation import (
    IMEX_NODES,
    AllocationContext,
    allocate,
    cdi_name,
    refuse_channels,
    refuse_ineffective,
)
from integration.node.services.plugin.cdi import (
    KINDS,
    Specs,
    directory_of,
    keep_specs,
    path_of,
    state_of,
)
from integration.node.services.plugin.claimed import claimed_on, refuse_claimed, without_claimed
from integration.node.services.plugin.preferred import preferred
from integration.node.services.plugin.reloading import keep_settings
from integration.node.services.plugin.resources import (
    resources_of,
    unannounced,
    unhealthy,
    unmatched,
)
from integration.node.services.plugin.serving import Serving
from integration.node.state.topic import Watched, call_on_change, version_of
from integration.node.values.counters import FAILED, OK, REFUSED
from integration.node.values.resources import CDI, MPS, Resource, Settings
from integration.node.values.service_name import ServiceName
from integration.nvml.topology import numa_nodes
from integration.watcher import ANY, Interest, Watcher

_NAME: Final = "plugin"

# Seconds between two checks for other plugins: nothing reports that one of them died.
_LOOK_FOR_OTHERS: Final = 30.0
_MOST_BEHIND: Final = 5.0
_RETRY: Final = 30.0
_FEW: Final = 3
# Seconds without a change that end a burst of changes, and the longest burst.
_SWARM: Final = 0.05
_LONGEST_SWARM: Final = 1.0
# Seconds between two checks of the kubelet's directory, however often it changes.
_PAUSE: Final = 0.01


async def run(context: Context) -> None:
    """Serve the kubelet, until cancelled."""
    context.state.faults.clear(f"{_NAME} ")
    async with anyio.create_task_group() as tasks:
        plugin = _Plugin(context, tasks)
        tasks.start_soon(partial(keep_settings, context, plugin.fault))
        tasks.start_soon(partial(call_on_change, plugin.wake, *plugin.inputs, at_once=True))
        tasks.start_soon(call_on_change, plugin.send_claimed, context.state.claimed_devices)
        tasks.start_soon(plugin.watch_kubelet)
        tasks.start_soon(plugin.watch_specs)
        await plugin.keep_serving()


@dataclass(frozen=True, slots=True)
class _Known:
    """The state that the plugins serve, and the version of the inputs it comes from."""

    version: int = -1
    settings: Settings | None = None
    inventory: Inventory | None = None
    resources: tuple[Resource, ...] = ()
    specs: Specs = Specs()  # noqa: RUF009 - it is immutable


class _Plugin:
    """The running service."""

    def __init__(self, context: Context, tasks: anyio.abc.TaskGroup) -> None:
        self._context = context
        self._state = state = context.state
        self.inputs: tuple[Watched, ...] = (
            state.node, state.health, state.settings, state.mps_daemons,
        )  # fmt: skip
        self._resources = state.resources.publisher(ServiceName.PLUGIN)
        self._delivery = state.delivery.publisher(ServiceName.PLUGIN)
        self._allocations = state.plugin_allocations.publisher(ServiceName.PLUGIN)
        self._options = context.options
        self._tasks = tasks
        self._known = _Known()
        self._serving: Serving | None = None
        self._offered: tuple[Resource, ...] = ()
        self._lacks_channels = False
        self._specs_of: tuple[Settings | None, Inventory | None, object] | None = None
        self._specs = Specs()
        self._keeping_specs = anyio.Lock()
        self._finding = anyio.Lock()
        self._unmatched: tuple[str, ...] = ()
        self._engine: EngineQuery | None = None
        self._mode = DeliveryMode(())
        self._wake = anyio.Event()
        self._applied = anyio.Event()

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

    async def watch_specs(self) -> None:
        """Start a round whenever someone changes or removes a spec."""
        config = self._context.config
        names = frozenset(os.path.basename(path_of(kind, config)) for kind in KINDS)
        with Watcher(_SWARM, _LONGEST_SWARM) as watcher:
            while True:
                await watcher.change({directory_of(config): Interest(names)})
                self.wake()

    def wake(self) -> None:
        """Start the next round."""
        self._wake.set()

    # Rounds

    async def keep_serving(self) -> None:
        """Run a round at every event, and after the pause that the round before asked for."""
        while True:
            wake = self._wake = anyio.Event()
            pause = await self._round()
            with anyio.move_on_after(pause):
                await wake.wait()

    async def _round(self) -> float:
        """Bring everything up to date, and return the longest pause before the next round."""
        before = self._known
        known = self._look(before)
        pause, active = self._may_serve()
        if not active:
            self._known = known
            self._resources.publish(())
            if self._serving is not None:
                self._serving.stop()
                self._serving = None
            return pause
        if self._serving is not None and not _adds(before.resources, known.resources):
            # Nothing is new, so no need to wait for the specs. Allocate waits for them itself.
            self._serve(self._serving, known.resources)
        known = replace(known, specs=await self._keep_specs(known))
        self._known = known
        is_same = known.inventory is before.inventory or known.inventory == before.inventory
        if self._serving is None or not is_same:
            self._tasks.start_soon(self._find_topology)
        self._applied.set()
        self._applied = anyio.Event()
        self._resources.publish(known.resources)
        self._tasks.start_soon(self._ask_engine)
        if self._serving is None:
            self._serving = self._new_serving()
        self._serve(self._serving, known.resources)
        return min(pause, _RETRY) if known.specs.fault or self._lacks_channels else pause

    def _look(self, before: _Known) -> _Known:
        """Return the state for the current inputs."""
        version = version_of(*self.inputs)
        settings, inventory = self._state.settings.value, self._state.node.value.inventory
        if version == before.version or settings is None:
            return before
        resources = unhealthy(before.resources)
        try:
            if inventory is not None:
                resources = unhealthy(before.resources, but=_gpus_without_nvml(inventory))
                numa = numa_nodes(self._context.config, inventory.gpus)
                resources = resources_of(inventory, settings, self._state.health.value, numa)
        except NvshimError as error:
            self.fault("resources", str(error))
        else:
            self.fault("resources", "")
            self._warn_unmatched(inventory, settings)
        resources = tuple(map(self._with_ready_mps, resources))
        return replace(
            before, version=version, settings=settings, inventory=inventory, resources=resources
        )

    def _serve(self, serving: Serving, resources: tuple[Resource, ...]) -> None:
        """Offer resources to the kubelet."""
        self._offered = resources
        self._check_channels()
        serving.serve(self._unclaimed())

    def _check_channels(self) -> None:
        """Check that the node has the required IMEX channels."""
        settings = self._state.settings.value
        try:
            if settings is not None and settings.imex_required:
                refuse_channels(settings, _channels(self._context.config.dev))
        except NvshimError as error:
            self._lacks_channels = True
            self.fault("imex", str(error))
        else:
            self._lacks_channels = False
            self.fault("imex", "")

    def send_claimed(self) -> None:
        """Send the kubelet lists in which the claimed devices are unhealthy."""
        if self._serving is not None:
            self._serving.update(self._unclaimed())

    def _unclaimed(self) -> list[Resource]:
        """Return the offered resources; devices that no pod can have now are unhealthy."""
        claimed = claimed_on(self._state, self._context.config)
        return [without_claimed(each, claimed) for each in map(self._described, self._offered)]

    def _described(self, resource: Resource) -> Resource:
        """Return a resource; devices that need CDI and are in no spec are unhealthy."""
        if self._lacks_channels:
            return unhealthy((resource,))[0]
        settings, names = self._known.settings, self._known.specs.devices
        if settings is None or CDI.isdisjoint(settings.device_list_strategies):
            return resource
        uuids = {each.uuid: cdi_name(each, settings) for each in resource.devices}
        described = {uuid for uuid, name in uuids.items() if name in names}
        if len(described) == len(uuids):
            return resource
        return unhealthy((resource,), but=described)[0]

    def _warn_unmatched(self, inventory: Inventory | None, settings: Settings) -> None:
        """Warn once of each sharing rule without a device, and each GPU without a resource."""
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

    async def _keep_specs(self, known: _Known) -> Specs:
        config = self._context.config
        async with self._keeping_specs:
            of = (known.settings, known.inventory, state_of(config))
            if known.settings is None or self._specs_of == of:
                return self._specs
            specs = await run_detached(keep_specs, known.settings, known.inventory, config)
            # `of` has the state from before the files were read, so that a later removal differs
            # from it. If a file was just written, compare once more in the next round.
            settled = not specs.fault and not specs.written
            self._specs_of, self._specs = of if settled else None, specs
        for path in specs.written:
            self._context.say("info", "CDI spec of the device plugin is up to date", path=path)
        self.fault("cdi", specs.fault)
        return specs

    async def _repair_specs(self) -> None:
        """Write the specs again if someone changed or removed them."""
        known = self._known
        if known.settings is None or CDI.isdisjoint(known.settings.device_list_strategies):
            return
        specs = await self._keep_specs(known)
        if self._known is known:  # otherwise a round has already applied newer specs
            self._known = replace(known, specs=specs)

    def _new_serving(self) -> Serving:
        from integration.node.services.plugin.serving import Serving  # noqa: PLC0415 - it loads gRPC

        return Serving(self._context, self._tasks, self, self.fault)

    async def _ask_engine(self) -> DeliveryMode:
        """Ask the engine, and return how containers receive their devices."""
        from integration.node.engine_query import EngineQuery  # noqa: PLC0415 - it loads gRPC

        self._engine = self._engine or EngineQuery(self._options.cri_sockets)
        engine = await self._engine.ask()
        settings = self._known.settings
        mode = self._mode if settings is None else delivery_mode(settings, engine)
        if settings is None or mode == self._mode:
            return mode
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
        return mode

    def fault(self, concern: str, line: str) -> None:
        """Report what is wrong with a subject of this service; "" if nothing is any longer."""
        self._context.fault(f"{_NAME} {concern}", one_line(line), part=_NAME)

    # Calls of the kubelet

    async def allocate(self, name: str, ids: Sequence[str]) -> pb.ContainerAllocateResponse:
        result, started = FAILED, time.monotonic()
        try:
            await self._catch_up()
            await self._repair_specs()
            answer = self._answer(name, ids, await self._ask_engine())
            result = OK
        except NvshimError as error:
            result = REFUSED
            self._context.say("warning", str(error), resource=name)
            raise
        finally:
            self._state.counters.allocated(name, time.monotonic() - started, result)
        self._context.say("info", "allocated", resource=name, devices=",".join(ids))
        return answer

    def _answer(
        self, name: str, ids: Sequence[str], mode: DeliveryMode
    ) -> pb.ContainerAllocateResponse:
        known, config = self._known, self._context.config
        resource = self._resource(name)
        settings = known.settings
        assert settings is not None  # noqa: S101 - there is a resource
        chosen = [resource.by_id[each] for each in ids if each in resource.by_id]
        refuse_claimed(chosen, claimed_on(self._state, config))
        if resource.sharing == MPS:
            refuse_unready(
                name, dict.fromkeys(each.uuid for each in chosen), self._state.mps_daemons.value
            )
        unhealthy_uuids = sorted({each.uuid for each in chosen if not each.is_healthy})
        context = AllocationContext(
            replace(settings, device_list_strategies=mode.strategies),
            self._state.node.value.inventory,  # the newest: a device that is gone is refused
            config,
            cdi_devices=known.specs.devices,
            channels=_channels(config.dev) if settings.imex_channels else (),
        )
        answer = allocate(resource, ids, context, token=str(uuid.uuid4()))
        if resource.sharing == MPS:
            add_client(answer, settings, resource)
        # No await since the check of the claimed devices, so no claim can have taken one.
        now = dict.fromkeys((each.uuid for each in chosen), time.monotonic())
        self._allocations.publish({**self._state.plugin_allocations.value, **now})
        if unhealthy_uuids:
            self._context.say(
                "warning", "allocated unhealthy devices", devices=",".join(unhealthy_uuids)
            )
        return answer

    async def prefer(
        self, name: str, available: Sequence[str], required: Sequence[str], size: int
    ) -> Sequence[str]:
        await self._catch_up()
        resource, settings = self._resource(name), self._known.settings
        assert settings is not None  # noqa: S101 - there is a resource
        inventory, topology = self._known.inventory, None
        if inventory is not None:
            topology = self._context.topologies.at_once(inventory)
            if topology.failure:
                self._tasks.start_soon(self._find_topology)
        return preferred(
            resource,
            available,
            required,
            size,
            topology=topology,
            policy=settings.shared_devices_allocation_policy,
        )

    async def _find_topology(self) -> None:
        """Find the distances between the GPUs; NVML may take long to answer."""
        async with self._finding:
            if self._known.inventory is not None:
                await run_detached(self._context.topologies.find, self._known.inventory)

    def _resource(self, name: str) -> Resource:
        for resource in self._known.resources:
            if resource.name == name:
                return resource
        raise DeviceUnknown(
            f"devices of {name}", found="the node has no such resource now", do="see nvshim list"
        )

    async def _catch_up(self) -> None:
        """Wait until a round has applied the current inputs; give up after a while."""
        with anyio.move_on_after(_MOST_BEHIND):
            while self._known.version != version_of(*self.inputs):
                await self._applied.wait()


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
