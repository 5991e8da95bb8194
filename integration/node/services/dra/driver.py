"""The driver at work: what the node has, what claims have of it, and that both stay true.

Rules
- Who has a device is decided for one claim after the other: two calls for two claims that have the
  same device must not miss each other. What takes long is done for several at once.
- What is asked for one claim, by whomever, is done in the order in which it was asked: else what
  the kubelet has given up would be prepared after it was taken back, and nobody would take it back
  any more.
- A claim is read from the API server each time, and its answer is the same each time. If it has
  been allocated anew meanwhile, the new devices count. While that server is away, what is prepared
  is answered as it was.
- A device is given by a claim or by a device plugin, never by both. Before anything is waited for a
  claim publishes its devices in the state, so that our device plugin gives none of them; what a
  plugin has given, the kubelet says (its pod-resources API, or its checkpoint where that does not
  answer). An answer of ours that the kubelet may not have noted yet counts for :data:`_NOTED`
  seconds.
- What is prepared is written down before the CDI spec is, and that before the kubelet is told. So
  an agent that is killed at any step finds all that it may have told of.
- Where the engine says that it reads no CDI names, nothing is prepared: pods would run, ready, and
  without their devices.
- A device that is out of service goes to no new claim, also if the mark is younger than the look.
- While NVML does not answer, what was known of the devices is known still.
- What fails in a way that nobody has thought of leaves a claim what it had before, too.
- What a kubelet has not taken back stays prepared, whatever becomes of the device.
- A device that has yet to be made is the claim's before (:mod:`.on_demand`), by its name.

Source: Kubernetes kubelet pkg/kubelet/cm/dra/manager.go; its Go helper, kubeletplugin.
"""

from __future__ import annotations

import os
import time
from contextlib import asynccontextmanager, closing
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import anyio
import anyio.abc
import anyio.to_thread

from api.errors import NvshimError, one_line
from hooks.node.drained import read_drains
from integration.agent_errors import (
    ApiServerRefused,
    ApiServerSilent,
    ClaimedDeviceMissing,
    DraStateUnwritten,
    EngineReadsNoCdi,
    MpsNotReady,
    ResourceClaimUnusable,
)
from integration.apiserver.status import is_away
from integration.node.delivery import ENABLE
from integration.node.engine_query import EngineAsked
from integration.node.mps.claim_daemons import is_of_claims
from integration.node.reporter import api_server_of
from integration.node.services.dra import cdi
from integration.node.services.dra.claim_reader import ClaimReader, Stale
from integration.node.services.dra.claims import read_claim, refuse_drained, refuse_taken
from integration.node.services.dra.devices import EFFECTS, publishable
from integration.node.services.dra.discovery import Looking
from integration.node.services.dra.dynamic_mig import OnDemand
from integration.node.services.dra.former_driver import FormerSlices
from integration.node.services.dra.mig_create import is_unmade
from integration.node.services.dra.publishing import Publisher
from integration.node.services.dra.recovery import has_daemon, recall
from integration.node.services.dra.server import Serving
from integration.node.services.dra.sharing import refuse_conflicts, refuse_overfull
from integration.node.services.dra.sharing_setup import Applying
from integration.node.state import claims_file as state
from integration.node.state.topic import wait_any
from integration.node.values.claims import Health, Reference
from integration.node.values.service_name import ServiceName
from integration.watcher import Interest, Watcher

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator, Mapping

    from hooks.node.inventory import Inventory
    from integration.apiserver.client import ApiServer
    from integration.node.service import Context
    from integration.node.services.dra.devices import Device
    from integration.node.values.claims import Claim

__all__ = ["Driver", "drive"]

_NAME: Final = "dra"
_LOOK_AGAIN: Final = 30.0
_NOTED: Final = 5.0
# Seconds after which a swarm of changes is over, and how long one may last.
_SWARM: Final = 0.05
_LONGEST_SWARM: Final = 1.0
_MADE_OR_REMOVED: Final = Interest(content=False)


class Driver:
    """The driver of this node."""

    def __init__(self, context: Context, api: ApiServer) -> None:
        options = context.options
        self._context = context
        self._state = context.state
        self._config = context.config
        self._name = options.dra_driver
        self._effect = EFFECTS[options.dra_unhealthy]
        self._pool = options.node_name
        where = (context, api, self._name, self._pool)
        self._former = FormerSlices(*where)
        self.publisher = Publisher(*where, self.fault, before=self._former.remove)
        self.reader = ClaimReader(api, self.publisher.version)
        self._devices: Mapping[str, Device] | None = None
        self._looking = Looking(context, self.fault)
        self._looks = anyio.Lock()
        self._specs: cdi.Template | None = None
        self._claims: dict[str, Claim] = {}
        self._applying = Applying(context, self.fault)
        self.on_demand = OnDemand(context, lambda: self._claims, self._look, self.fault)
        self._one_at_a_time = anyio.Lock()
        self._turns: dict[str, anyio.Lock] = {}
        # What keeps a spec from being there, by the UID of its claim; it is tried again.
        self._unkept: dict[str, str] = {}
        self._engine = EngineAsked(options.cri_sockets)

    async def begin(self) -> None:
        """Know what was prepared by an agent before this one."""
        load = partial(state.load, self._config, self._name)
        is_written = state.is_written(self._config)
        self._claims = await anyio.to_thread.run_sync(load)
        await self.on_demand.begin()
        await self._former.begin()
        self._tell()
        self.fault("old specs", "")
        try:
            cdi.sweep(self._config, self._name, self._claims)
        except DraStateUnwritten as error:  # it harms nobody: no claim leads to it
            self.fault("old specs", str(error))
        await self._look()
        if not is_written:
            await self._recall()
        self._applying.begin(self._claims.values())  # daemons that no claim asks for end by that
        await self._keep_specs(self._claims.values())

    async def _recall(self) -> None:
        """Know again what the kubelet's record does not say of claims: how they share devices."""

        async def read(claim: Claim) -> Claim:
            found = await self.reader.read(claim.reference)
            return read_claim(found, claim.reference, self._name, self._pool, self._devices or {})

        needs = partial(has_daemon, self._config, self._name)
        self._claims |= await recall(tuple(self._claims.values()), read, needs, self.fault)
        self._tell()

    def fault(self, concern: str, line: str) -> None:
        """Say what is wrong with a concern of ours, and when it is no more."""
        self._context.fault(f"{_NAME} {concern}", one_line(line), part=_NAME)

    # What the node has

    async def keep(self) -> None:
        """Go by what is known of the node, whenever that changes."""
        state, version = self._state, -1
        inputs = (
            state.node, state.health, state.plugin_allocations, state.ledger, state.mps_daemons,
        )  # fmt: skip
        while True:
            version = await wait_any(*inputs, since=version, timeout=_LOOK_AGAIN)
            if await self._look() or self._unkept:
                await self._keep_specs(self._claims.values())
            # Health streams go by this: what is heard of a device is told when it is known here.
            self._state.dra_health.publisher(ServiceName.DRA).publish(tuple(self.health()))
            gave = await self._plugin_gave()
            known = self._devices
            self.publisher.want(
                None
                if known is None
                else publishable(
                    known.values(), self._state.health.value, gave, self._name, self._effect
                )
            )

    async def _look(self, newest: Inventory | None = None) -> bool:
        """Know the node's devices; whether they may be others than before.

        Args:
            newest: what the node has, if the look does not know it yet.
        """
        async with self._looks:
            made, inventory = self.on_demand.making.made, self._state.node.value.inventory
            switched = self.on_demand.modes.switched
            found = await self._looking.look(inventory, made, newest, switched)
            if found is None:
                return False
            self._devices, self._specs = found.devices, found.specs
        if settled := self.on_demand.settle(found.parts):
            await self._settle(settled)
            await self._look()
        return True

    async def _settle(self, settled: Iterable[tuple[Claim, Claim | None]]) -> None:
        """Have claims of an agent before this one be as they are now, or be forgotten."""
        async with self._one_at_a_time:
            for claim, now in settled:
                if self._claims.get(claim.uid) is claim:
                    del self._claims[claim.uid]
                    if now is not None:
                        self._claims[claim.uid] = now
            self._tell()
            try:
                await self._save()
            except DraStateUnwritten as error:  # what is written down is settled likewise again
                self._context.say("warning", str(error))

    def health(self) -> Iterator[Health]:
        """What is thought of each device now."""
        for device in (self._devices or {}).values():
            bad = [
                condition
                for uuid in (device.uuid, device.gpu)
                if (condition := self._state.health.value.get(uuid)) is not None
                and not condition.state.is_given
            ]
            out = f"it is out of service {device.drained}" if device.drained else ""
            why = [*(condition.reason for condition in bad), out]
            why += ["it does not answer"] if device.lost else []
            message = next(filter(None, why), "")
            yield Health(self._pool, device.name, not bad and device.can_be_given, message)

    # Claims

    def cdi_names(self, claim: Claim) -> list[str]:
        """The CDI names of a claim's devices, in their order."""
        return [cdi.name_of(self._name, claim.uid, device) for device in claim.devices]

    @asynccontextmanager
    async def _turn(self, reference: Reference) -> AsyncIterator[None]:
        """Wait until what was asked before for a claim is done."""
        turns = self._turns.setdefault(reference.uid, anyio.Lock())
        try:
            async with turns:
                yield
        finally:
            if not turns.locked():  # it is nobody else's turn
                self._turns.pop(reference.uid, None)

    async def prepare(self, reference: Reference) -> Claim:
        """Have a claim's devices be ready for its pods.

        Raises:
            NvshimError: they cannot be had; what was prepared before still is.
        """
        async with self._turn(reference):
            return await self._prepare(reference)

    async def _prepare(self, reference: Reference) -> Claim:
        found = await self._read(reference)
        if found is None:
            return await self._again(reference)
        async with self.on_demand.alone(self.on_demand.gpus_for(found)):
            async with self._one_at_a_time:
                claim, before = await self._take(found, reference)
            if not self.on_demand.is_ready(claim):
                claim = await self._make(claim, before)
            await self._give(claim, before)
        return claim

    async def _make(self, claim: Claim, before: Claim | None) -> Claim:
        """Have what a claim is to have be made; returns it with what was made."""
        try:
            await self._heed_engine()
            made = await self.on_demand.make(claim, self._devices or {})
            async with self._one_at_a_time:
                self._claims[claim.uid] = made
                self._tell()
                await self._save()
        except Exception:
            await self._put_back(claim, before)
            raise
        return made

    async def _take(
        self, found: dict[str, Any], reference: Reference
    ) -> tuple[Claim, Claim | None]:
        """Have devices be a claim's; returns it, and what it was before."""
        if self._devices is None:
            raise ClaimedDeviceMissing(
                f"the devices of the {reference}",
                found="NVML has not said yet what the node has",
                do="see `nvidia-smi` on the node; it is tried again",
            )
        claim = read_claim(found, reference, self._name, self._pool, self._devices)
        before = self._claims.get(claim.uid)
        if claim != before:
            refuse_drained(claim, read_drains(self._config))
            refuse_taken(claim, self._claims.values(), dict(self._given_just_now()))
            refuse_overfull(claim, self._claims.values(), self._devices)
            refuse_conflicts(claim, self._claims.values())
            self._claims[claim.uid] = claim
            self._tell()
            try:
                refuse_taken(claim, (), await self._plugin_gave())
                await self._save()
            except Exception:
                await self._forget(claim, before)
                raise
        return claim, before

    async def _give(self, claim: Claim, before: Claim | None) -> None:
        """Have what a claim has be ready for its containers.

        It may wait for an MPS control daemon: claims that are not shared so go on meanwhile.
        """
        try:
            await self._heed_engine()
            await self._applying.apply(claim)
            async with self._one_at_a_time:
                await self._keep_spec(claim, leave=claim == before)
        except Exception:
            if claim != before:
                await self._put_back(claim, before)
            raise

    async def _put_back(self, claim: Claim, before: Claim | None) -> None:
        """Have a claim what it had before, since it cannot have what it is to have."""
        await self._applying.put_back(claim.uid, before)
        async with self._one_at_a_time:
            await self._forget(claim, before)

    async def _forget(self, claim: Claim, before: Claim | None) -> None:
        """Have it be written that a claim has what it had before; nobody else may change any."""
        if before is None:
            del self._claims[claim.uid]
        else:
            self._claims[claim.uid] = before
        self._tell()
        await self._save()
        if before is None:  # it may have been written since an inventory was new
            await anyio.to_thread.run_sync(partial(cdi.remove, self._config, self._name, claim.uid))

    async def unprepare(self, reference: Reference) -> None:
        """Take back what was prepared for a claim; nothing if nothing was.

        Raises:
            DraStateUnwritten: it cannot be taken back.
            MpsDaemonFailed: its MPS control daemon has not ended.
            MigDeviceNotUndone: what was made for it cannot be undone now.
        """
        async with (
            self._turn(reference),
            self.on_demand.alone(self.on_demand.making.gpus_of(reference.uid)),
        ):
            await self._applying.release(reference.uid)  # an MPS daemon has its device open
            await self.on_demand.undo(reference.uid)
            await self._take_back(reference)

    async def _take_back(self, reference: Reference) -> None:
        async with self._one_at_a_time:
            remove = partial(cdi.remove, self._config, self._name, reference.uid)
            await anyio.to_thread.run_sync(remove)
            before = self._claims.pop(reference.uid, None)
            if before is None:
                return
            try:
                await self._save()
            except NvshimError:
                self._claims[reference.uid] = before
                raise
            self._tell()

    async def _read(self, reference: Reference) -> dict[str, Any] | None:
        """A claim, as the API server has it; None if that is away and the claim is prepared."""
        try:
            served = [each.name for each in self._state.resources.value]
            is_prepared = reference.uid in self._claims
            return await self.reader.read(reference, served, is_prepared=is_prepared)
        except (ApiServerRefused, ApiServerSilent) as error:
            if is_away(error) and reference.uid in self._claims:
                return None
            raise

    async def _again(self, reference: Reference) -> Claim:
        """What is prepared for a claim, with its spec."""
        async with self.on_demand.alone(self.on_demand.making.gpus_of(reference.uid)):
            claim = self._claims.get(reference.uid)
            if claim is None or any(map(is_unmade, claim.devices)):
                raise ResourceClaimUnusable(f"the {reference}", found="it is taken back")
            await self._give(claim, claim)
            return claim

    async def _save(self) -> None:
        claims = tuple(self._claims.values())
        await anyio.to_thread.run_sync(partial(state.save, self._config, claims))

    def _tell(self) -> None:
        """Tell the device plugin what is not its to give, and people who has what."""
        held = (device for claim in self._claims.values() for device in claim.devices)
        self._state.claimed_devices.publisher(ServiceName.DRA).publish(
            tuple(device for device in held if not device.admin)
        )
        self._state.claims.publisher(ServiceName.DRA).publish(tuple(self._claims.values()))

    async def _heed_engine(self) -> None:
        engine = await self._engine.ask()
        if engine is not None and engine.reads_cdi is False:
            raise EngineReadsNoCdi(
                "to give devices by CDI",
                found=f"{engine} does not read CDI names, or is not set to",
                do=f"run `{ENABLE}`",
            )

    # Their CDI specs

    async def hear_specs(self) -> None:
        """Make anew the specs that somebody removes."""
        directory = self._config.cdi_spec_dirs[-1]
        with Watcher(_SWARM, _LONGEST_SWARM) as watcher:
            while True:
                await watcher.change({directory: _MADE_OR_REMOVED})
                await self._keep_specs(self._missing())

    def _missing(self) -> list[Claim]:
        return [
            claim
            for claim in self._claims.values()
            if not os.path.lexists(cdi.path_of(self._config, self._name, claim.uid))
        ]

    async def _keep_specs(self, claims: Iterable[Claim]) -> None:
        """Have the specs of claims be as the node is now, as far as that can be."""
        for claim in tuple(claims):
            async with self._one_at_a_time:
                self._unkept.pop(claim.uid, None)
                if self._claims.get(claim.uid) is claim and not any(map(is_unmade, claim.devices)):
                    try:
                        # What is there is what its containers were made with.
                        await self._keep_spec(claim, leave=True)
                    except NvshimError as error:
                        self._unkept[claim.uid] = str(error)
        self._unkept = {uid: why for uid, why in self._unkept.items() if uid in self._claims}
        self.fault("specs", next(iter(self._unkept.values()), ""))

    async def _keep_spec(self, claim: Claim, *, leave: bool = False) -> None:
        """Have the spec of a claim be there.

        Args:
            leave: whether one that is there is enough, if its devices cannot be given anew.
        """
        leave = leave and claim not in self._missing()
        root = self._applying.mps_root
        keep = partial(cdi.keep, self._config, self._name, claim, self._specs, root)
        try:
            if await anyio.to_thread.run_sync(keep):
                self._context.say("info", "CDI spec of a claim is up to date", claim=str(claim))
        except (ClaimedDeviceMissing, MpsNotReady):
            if not leave:
                raise

    # What device plugins have given

    def _given_just_now(self) -> Iterator[tuple[str, str]]:
        now = time.monotonic()
        for uuid, when in self._state.plugin_allocations.value.items():
            if now - when < _NOTED:
                yield uuid, "a pod that the device plugin has just answered for"

    def _shared_by_plugin(self) -> dict[str, str]:
        """What only clients of the device plugin's MPS control daemons can open."""
        return {
            uuid: f"the device plugin, which shares {name} by MPS,"
            for name, daemon in self._state.mps_daemons.value.items()
            if not is_of_claims(name)
            for uuid in daemon.devices
        }

    async def _plugin_gave(self) -> dict[str, str]:
        """Who has been given what by a device plugin, by the device's UUID."""
        context = self._context
        allocated = await context.kubelet.allocated(context.options.pod_resources)
        gave = {**self._shared_by_plugin(), **dict(self._given_just_now())}
        if allocated is None:
            return {**await anyio.to_thread.run_sync(state.plugin_gave, self._config), **gave}
        for (namespace, pod), containers in allocated.items():
            for given in containers.values():
                for _, name in given:
                    if name.startswith(state.UUIDS):
                        gave[name.partition("::")[0]] = f"pod {namespace}/{pod}"
        return gave


async def drive(context: Context) -> None:
    """Be the driver, until cancelled."""
    context.state.faults.clear("dra ")
    with closing(api_server_of(context.options)) as api:
        async with anyio.create_task_group() as tasks:
            driver = Driver(context, api)
            await driver.begin()
            tasks.start_soon(driver.keep)
            tasks.start_soon(driver.hear_specs)
            tasks.start_soon(driver.on_demand.tidy)
            tasks.start_soon(driver.publisher.run)
            tasks.start_soon(Stale(context, driver.reader, driver.unprepare).run)
            serving = context.serving
            if serving is None:
                serving = Serving(context)
                tasks.start_soon(serving.run)
            await serving.work(driver)
