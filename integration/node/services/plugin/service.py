"""The device plugin, as a service of the agent.

::

    settings' file ─▶ settings ─┐
    the look ───────▶ node ─────┼─▶ resources ─▶ CDI specs ─▶ a plugin per resource ─▶ kubelet
    health, MPS, claims ────────┘

Rules
- It serves where a kubelet is. By default, where somebody else's device plugin serves too, it does
  not: which of the two a kubelet listens to would be chance. It says so, and looks again.
- Settings that cannot be used leave those before in force, and it is said what is wrong with them.
- What cannot be looked at is unhealthy, and not gone
  (:mod:`integration.node.services.plugin.resources`).
- A device that is handed over by a CDI name is unhealthy as long as no spec has the name, and every
  device while a required IMEX channel is missing: Allocate would refuse it, and a Deployment would
  make one pod after the other.
- CDI specs are written before the kubelet is told of what is new in them. That something is gone
  or unhealthy it is told at once.
- What claims have changes with each pod, and nothing of the rest: the kubelet is told of it, and no
  more is done. Their specs are in the same directory, and wake nobody here.
- A kubelet that begins is registered with before anything else: it kills pods that run and whose
  plugin it does not know half a second later.
- An answer goes by what is known when it is given: it waits until what was posted is worked in, and
  specs that somebody has changed or removed are made anew before.
- gRPC is loaded where it is needed, and not before.
- The engine is asked whether it heeds what containers are given, before an answer if it is another
  than the last time; where it does not, they are told in another way as well, and that is said
  (:mod:`integration.node.delivery`). To register with a kubelet nobody waits for it.
"""

from __future__ import annotations

import math
import os
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

import anyio
import anyio.abc

from api.errors import NvshimError, one_line
from api.proto import deviceplugin_pb2 as pb
from hooks.node.inventory import Inventory
from integration.agent_errors import DeviceUnknown, KubeletUnreachable, OtherPlugin
from integration.detached import run_detached
from integration.kubelet import sockets
from integration.node.delivery import ENABLE, DeliveryMode, delivery_mode
from integration.node.mps.clients import add_client, refuse_unready, unready
from integration.node.options import YES
from integration.node.service import Context
from integration.node.services.plugin.allocation import (
    IMEX_NODES,
    Ground,
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
from integration.node.state.topic import Watched, call_on_change, version_of
from integration.node.values.counters import FAILED, OK, REFUSED
from integration.node.values.resources import CDI, MPS, Resource, Settings
from integration.node.values.service_name import ServiceName
from integration.nvml.topology import numa_nodes
from integration.watcher import ANY, Interest, Watcher

if TYPE_CHECKING:
    from integration.node.engine_query import EngineQuery
    from integration.node.services.plugin.serving import Serving

_NAME: Final = "plugin"

# Another plugin that dies says nothing.
_LOOK_FOR_OTHERS: Final = 30.0
_MOST_BEHIND: Final = 5.0
_RETRY: Final = 30.0
_FEW: Final = 3
# Seconds after which a swarm of changes is over, and how long one may last.
_SWARM: Final = 0.05
_LONGEST_SWARM: Final = 1.0
# Seconds between two looks at the kubelet's directory, however much happens there.
_PAUSE: Final = 0.01


async def run(context: Context) -> None:
    """Serve the kubelet, until cancelled."""
    context.state.faults.clear(f"{_NAME} ")
    async with anyio.create_task_group() as tasks:
        plugin = _Plugin(context, tasks)
        tasks.start_soon(partial(keep_settings, context, plugin.fault))
        tasks.start_soon(partial(call_on_change, plugin.wake, *plugin.inputs, at_once=True))
        tasks.start_soon(call_on_change, plugin.tell_claimed, context.state.claimed_devices)
        tasks.start_soon(plugin.hear_kubelet)
        tasks.start_soon(plugin.hear_specs)
        await plugin.keep_serving()


@dataclass(frozen=True, slots=True)
class _Known:
    """What the plugins go by: as of which version of its inputs, and what was made of it."""

    version: int = -1
    settings: Settings | None = None
    inventory: Inventory | None = None
    resources: tuple[Resource, ...] = ()
    specs: Specs = Specs()  # noqa: RUF009 - it is immutable


class _Plugin:
    """The part at work."""

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
        self._worked_in = anyio.Event()

    # What is heard

    async def hear_kubelet(self) -> None:
        """Hear of sockets that come and go, at once."""
        directory = os.path.dirname(self._options.kubelet_socket)
        with Watcher(quiet=0) as watcher:
            while True:
                await watcher.change({directory: ANY})
                if self._serving is not None:
                    self._serving.look()
                self.wake()
                await anyio.sleep(_PAUSE)

    async def hear_specs(self) -> None:
        """Hear of specs that somebody changes or removes."""
        config = self._context.config
        names = frozenset(os.path.basename(path_of(kind, config)) for kind in KINDS)
        with Watcher(_SWARM, _LONGEST_SWARM) as watcher:
            while True:
                await watcher.change({directory_of(config): Interest(names)})
                self.wake()

    def wake(self) -> None:
        """Have the next round begin."""
        self._wake.set()

    # What is done

    async def keep_serving(self) -> None:
        """Go round, whenever there is a reason to."""
        while True:
            wake = self._wake = anyio.Event()
            pause = await self._round()
            with anyio.move_on_after(pause):
                await wake.wait()

    async def _round(self) -> float:
        """Bring everything up to date; the seconds after which to look again anyway."""
        before = self._known
        known = self._look(before)
        pause, active = self._may_serve()
        if not active:
            self._known = known
            self._resources.publish(())
            if self._serving is not None:
                self._serving.end()
                self._serving = None
            return pause
        if self._serving is not None and not _adds(before.resources, known.resources):
            # What is asked for meanwhile is answered when the specs are there.
            self._serve(self._serving, known.resources)
        known = replace(known, specs=await self._keep_specs(known))
        self._known = known
        is_same = known.inventory is before.inventory or known.inventory == before.inventory
        if self._serving is None or not is_same:
            self._tasks.start_soon(self._find_topology)
        self._worked_in.set()
        self._worked_in = anyio.Event()
        self._resources.publish(known.resources)
        self._tasks.start_soon(self._hear_engine)
        if self._serving is None:
            self._serving = self._new_serving()
        self._serve(self._serving, known.resources)
        return min(pause, _RETRY) if known.specs.fault or self._lacks_channels else pause

    def _look(self, before: _Known) -> _Known:
        """What is known now."""
        version = version_of(*self.inputs)
        settings, inventory = self._state.settings.value, self._state.node.value.inventory
        if version == before.version or settings is None:
            return before
        resources = unhealthy(before.resources)
        try:
            if inventory is not None:
                resources = unhealthy(before.resources, but=_seen_without_nvml(inventory))
                numa = numa_nodes(self._context.config, inventory.gpus)
                resources = resources_of(inventory, settings, self._state.health.value, numa)
        except NvshimError as error:
            self.fault("resources", str(error))
        else:
            self.fault("resources", "")
            self._tell_unmatched(inventory, settings)
        resources = tuple(map(self._as_mps_has_it, resources))
        return replace(
            before, version=version, settings=settings, inventory=inventory, resources=resources
        )

    def _serve(self, serving: Serving, resources: tuple[Resource, ...]) -> None:
        """Offer resources to the kubelet."""
        self._offered = resources
        self._see_channels()
        serving.serve(self._unclaimed())

    def _see_channels(self) -> None:
        """See whether containers can have the IMEX channels that they have to get."""
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

    def tell_claimed(self) -> None:
        """Tell the kubelet what claims have by now."""
        if self._serving is not None:
            self._serving.tell(self._unclaimed())

    def _unclaimed(self) -> list[Resource]:
        """What is offered, as the kubelet is told of it: what no pod can have is unhealthy."""
        claimed = claimed_on(self._state, self._context.config)
        return [without_claimed(each, claimed) for each in map(self._described, self._offered)]

    def _described(self, resource: Resource) -> Resource:
        """A resource, without what is to be handed over by CDI and no spec has."""
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

    def _tell_unmatched(self, inventory: Inventory | None, settings: Settings) -> None:
        """Warn once of each sharing rule without a device, and each GPU without a resource."""
        lines: tuple[str, ...] = ()
        if inventory is not None:
            lines = (*unmatched(inventory, settings), *unannounced(inventory, settings))
        for line in lines:
            if line not in self._unmatched:
                self._context.say("warning", line)
        self._unmatched = lines

    def _as_mps_has_it(self, resource: Resource) -> Resource:
        """A resource that is shared by MPS, without what no daemon serves yet."""
        if resource.sharing != MPS:
            return resource
        served = {
            device.uuid
            for device in resource.devices
            if not unready(resource.name, (device.uuid,), self._state.mps_daemons.value)
        }
        return unhealthy((resource,), but=served)[0]

    def _may_serve(self) -> tuple[float, bool]:
        """When to look again, and whether to serve now."""
        if self._state.settings.value is None:
            return math.inf, False
        kubelet = sockets.socket_identity(self._options.kubelet_socket)
        if self._options.device_plugin == YES:
            missing = KubeletUnreachable(
                f"a kubelet at {self._options.kubelet_socket}",
                found="there is no such socket",
                do="see whether the kubelet runs; it is heard when it comes",
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
            do="remove that plugin, or have this one serve anyway by --device-plugin yes, or not "
            "at all by --device-plugin no",
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
            # The state from before they were read: a file that is removed after that differs from
            # it. What was just written is compared once more the next time.
            settled = not specs.fault and not specs.written
            self._specs_of, self._specs = of if settled else None, specs
        for path in specs.written:
            self._context.say("info", "CDI spec of the device plugin is up to date", path=path)
        self.fault("cdi", specs.fault)
        return specs

    async def _see_specs(self) -> None:
        """See that the specs are as they were written."""
        known = self._known
        if known.settings is None or CDI.isdisjoint(known.settings.device_list_strategies):
            return
        specs = await self._keep_specs(known)
        if self._known is known:  # otherwise it was worked in meanwhile
            self._known = replace(known, specs=specs)

    def _new_serving(self) -> Serving:
        from integration.node.services.plugin.serving import Serving  # noqa: PLC0415 - it loads gRPC

        return Serving(self._context, self._tasks, self, self.fault)

    async def _hear_engine(self) -> DeliveryMode:
        """Ask the engine, and return how containers learn of their devices."""
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
            line = f"{mode.why}: containers are told of their devices by {by}"
            self._context.say("warning", line, command=ENABLE)
        elif why and not mode.why:
            self._context.say("info", "the engine heeds what containers are given by CDI", over=why)
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
        """Say what is wrong with a concern of ours, and when it is no more."""
        self._context.fault(f"{_NAME} {concern}", one_line(line), part=_NAME)

    # What kubelets ask

    async def allocate(self, name: str, ids: Sequence[str]) -> pb.ContainerAllocateResponse:
        result, begun = FAILED, time.monotonic()
        try:
            await self._catch_up()
            await self._see_specs()
            answer = self._answer(name, ids, await self._hear_engine())
            result = OK
        except NvshimError as error:
            result = REFUSED
            self._context.say("warning", str(error), resource=name)
            raise
        finally:
            self._state.counters.allocated(name, time.monotonic() - begun, result)
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
        sick = sorted({each.uuid for each in chosen if not each.is_healthy})
        ground = Ground(
            replace(settings, device_list_strategies=mode.strategies),
            self._state.node.value.inventory,  # the newest: a device that is gone is not given
            config,
            cdi_devices=known.specs.devices,
            channels=_channels(config.dev) if settings.imex_channels else (),
        )
        answer = allocate(resource, ids, ground, token=str(uuid.uuid4()))
        if resource.sharing == MPS:
            add_client(answer, settings, resource)
        # Without a wait since it was looked at what claims have.
        now = dict.fromkeys((each.uuid for each in chosen), time.monotonic())
        self._allocations.publish({**self._state.plugin_allocations.value, **now})
        if sick:
            self._context.say("warning", "given, though unhealthy", devices=",".join(sick))
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
        """Find how near the GPUs are to each other, which NVML may take long to say."""
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
        """Wait until what the others have posted is worked in; not for ever."""
        with anyio.move_on_after(_MOST_BEHIND):
            while self._known.version != version_of(*self.inputs):
                await self._worked_in.wait()


def _seen_without_nvml(inventory: Inventory) -> frozenset[str]:
    """The devices that are known to be there if NVML does not answer."""
    if not inventory.nvml_failure:
        return frozenset()
    return frozenset(gpu.uuid for gpu in inventory.gpus if not gpu.lost)


def _adds(before: Iterable[Resource], now: Iterable[Resource]) -> bool:
    """Whether there are devices that were not there before."""
    told = {each.name: each.by_id.keys() for each in before}
    return any(each.by_id.keys() - told.get(each.name, set()) for each in now)


def _channels(dev: str) -> tuple[int, ...]:
    """The IMEX channels that the node has."""
    try:
        names = os.listdir(dev + IMEX_NODES.removeprefix("/dev"))
    except OSError:
        return ()
    numbers = (name.removeprefix("channel") for name in names if name.startswith("channel"))
    return tuple(sorted(int(each) for each in numbers if each.isascii() and each.isdecimal()))
