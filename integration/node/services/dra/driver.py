"""The driver: the node's devices, their health, and the parts that prepare claims.

Rules
- The published devices and the health reported to the kubelet follow every change of the node.
- While NVML does not answer, the devices stay as they were.
- A device that a device plugin gave to a pod is not published.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from functools import partial
from typing import Final, NoReturn

import anyio

from api.errors import one_line
from hooks.node.inventory import Inventory
from integration.agent_errors import FilesSilent
from integration.apiserver.client import ApiServer
from integration.node.engine_query import EngineQuery
from integration.node.reporter import api_server_of
from integration.node.service import Context
from integration.node.services.dra.claim_reader import ClaimReader
from integration.node.services.dra.claim_specs import ClaimSpecs
from integration.node.services.dra.claim_table import ClaimLocks, ClaimTable
from integration.node.services.dra.claims import read_claim
from integration.node.services.dra.devices import EFFECTS, publishable
from integration.node.services.dra.discovery import DeviceDiscovery
from integration.node.services.dra.dynamic_mig import DynamicMig
from integration.node.services.dra.former_driver import FormerSlices
from integration.node.services.dra.plugin_devices import PluginDevices
from integration.node.services.dra.publishing import Publisher
from integration.node.services.dra.recovery import has_daemon, recall
from integration.node.services.dra.server import DriverServer
from integration.node.services.dra.sharing_setup import SharingSetup
from integration.node.services.dra.stale_claims import StaleClaims
from integration.node.services.dra.transaction import ClaimTransactions
from integration.node.state.topic import Signal, wait_any
from integration.node.values.claims import Claim, Health
from integration.node.values.service_name import ServiceName

__all__ = ["Driver", "run_driver"]

_NAME: Final = "dra"
_LOOK_AGAIN: Final = 30.0


class Driver:
    """The driver of this node."""

    def __init__(self, context: Context, api: ApiServer) -> None:
        options = context.options
        self._context = context
        self._name = options.dra_driver
        self._effect = EFFECTS[options.dra_unhealthy]
        self._pool = options.node_name
        where = (context, api, self._name, self._pool)
        self._former = FormerSlices(*where)
        self.publisher = Publisher(*where, self.fault, before=self._former.remove)
        self.reader = ClaimReader(api, self.publisher.version)
        self.discovery = DeviceDiscovery(context, self.fault)
        self._discovering = anyio.Lock()
        self.table = ClaimTable(context, self._name)
        locks = ClaimLocks()
        self.plugins = PluginDevices(context)
        self.sharing = SharingSetup(context, self.fault)
        self.mig = DynamicMig(context, self.table, locks, self._discover, self.fault)
        self.specs = ClaimSpecs(
            context, self.table, locks, self.discovery, self.sharing, self.fault
        )
        self._specs_due = Signal("the files of claims may have to be written again")
        self.transactions = ClaimTransactions(
            context=context,
            table=self.table,
            locks=locks,
            reader=self.reader,
            discovery=self.discovery,
            plugins=self.plugins,
            engine=EngineQuery(options.cri_sockets),
            mig=self.mig,
            sharing=self.sharing,
            specs=self.specs,
        )
        self.stale = StaleClaims(context, self.reader, self.transactions)

    async def start(self) -> None:
        """Take over the claims of an earlier agent."""
        is_recorded = await self.table.load()
        await self.mig.load()
        await self._former.start()
        await self.specs.sweep()
        await self._discover()
        if not is_recorded:
            await self._recall()
        # Publishes the daemons that claims need; the MPS service stops the others.
        self.sharing.load(self.table.claims.values())
        await self.specs.repair()

    async def _recall(self) -> None:
        """Read from the API server how claims share devices, which the kubelet does not record."""

        async def read(claim: Claim) -> Claim:
            document = await self.reader.read(claim.reference)
            devices = self.discovery.devices or {}
            return read_claim(document, claim.reference, self._name, self._pool, devices)

        claims = tuple(self.table.claims.values())
        needing = await self._clients_of_daemons(claims)
        found = await recall(claims, read, lambda each: each.uid in needing, self.fault)
        for claim in found.values():
            self.table.put(claim)

    async def _clients_of_daemons(self, claims: Iterable[Claim]) -> frozenset[str]:
        """Return the UIDs of claims whose containers may be clients of an MPS daemon that exists.

        If their specs cannot be read, all of them may be.
        """
        config = self._context.config

        def look() -> frozenset[str]:
            has = partial(has_daemon, config, self._name)
            return frozenset(each.uid for each in claims if has(each))

        directory = config.cdi_spec_dirs[-1]
        try:
            return await self._context.files.run(directory, f"to read specs in {directory}", look)
        except FilesSilent as error:
            self._context.say("warning", str(error))
            return frozenset(each.uid for each in claims)

    def fault(self, concern: str, line: str) -> None:
        """Report a fault of a part of the driver, or clear it with ""."""
        self._context.fault(f"{_NAME} {concern}", one_line(line), part=_NAME)

    async def follow(self) -> None:
        """Follow the changes of the node, until cancelled."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._keep_specs, self._specs_due.version)
            await self._follow()

    async def _keep_specs(self, version: int) -> NoReturn:
        """Write files again when due, in a task of its own: their directory may hang."""
        while True:
            version = await wait_any(self._specs_due, since=version)
            await self.table.catch_up()
            await self.specs.repair()

    async def _follow(self) -> NoReturn:
        state, version = self._context.state, -1
        inputs = (
            state.node, state.health, state.plugin_allocations, state.ledger, state.mps_daemons,
        )  # fmt: skip
        while True:
            version = await wait_any(*inputs, since=version, timeout=_LOOK_AGAIN)
            is_due = self.specs.has_pending or self.table.is_doubtful
            if await self._discover() or is_due:
                self._specs_due.send()
            # Wakes the health streams, after the devices that they report are known.
            state.dra_health.publisher(ServiceName.DRA).publish(tuple(self.health()))
            given = await self.plugins.allocated()
            devices = self.discovery.devices
            self.publisher.want(
                None
                if devices is None
                else publishable(
                    devices.values(), state.health.value, given, self._name, self._effect
                )
            )

    async def _discover(self, newest: Inventory | None = None) -> bool:
        """Discover the node's devices; return whether they may have changed.

        Args:
            newest: an inventory that is newer than the agent's.
        """
        async with self._discovering:
            inventory = self._context.state.node.value.inventory
            created, switched = self.mig.creator.created, self.mig.modes.switched
            found = await self.discovery.discover(inventory, created, newest, switched)
        if found is None:
            return False
        if await self.mig.settle(found.parts):
            await self._discover()
        return True

    def health(self) -> Iterator[Health]:
        """Yield the health of each device."""
        known = self._context.state.health.value
        for device in (self.discovery.devices or {}).values():
            bad = [
                condition
                for uuid in (device.uuid, device.gpu)
                if (condition := known.get(uuid)) is not None and not condition.state.is_allocatable
            ]
            out = f"it is out of service {device.drained}" if device.drained else ""
            why = [*(condition.reason for condition in bad), out]
            why += ["it does not answer"] if device.lost else []
            message = next(filter(None, why), "")
            yield Health(self._pool, device.name, not bad and device.can_be_given, message)


async def run_driver(context: Context) -> None:
    """Run the driver, until cancelled."""
    context.state.faults.clear("dra ")
    with closing(api_server_of(context.options)) as api:
        async with anyio.create_task_group() as tasks:
            driver = Driver(context, api)
            await driver.start()
            for run in (
                driver.transactions.recover,
                driver.follow,
                driver.specs.watch,
                driver.mig.tidy,
                driver.sharing.keep_slices,
                driver.publisher.run,
                driver.stale.run,
            ):
                tasks.start_soon(run)
            server = context.serving
            if server is None:
                server = DriverServer(context)
                tasks.start_soon(server.run)
            await server.work(driver)
