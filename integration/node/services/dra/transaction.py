"""The life of a claim: it is prepared and unprepared, each in one transaction.

::

    prepare    read ▸ check ▸ reserve ▸ PREPARING ▸ MIG devices ▸ sharing ▸ metadata ▸ CDI spec ▸
               PREPARED
    unprepare  sharing ▸ MIG devices ▸ CDI spec, metadata ▸ out of the checkpoint

Rules
- A transaction holds its claim (:class:`.claim_table.ClaimLocks`), so calls for one claim run in
  the order in which they arrived: an unprepare that arrives after a prepare also ends after it.
- Prepare reads the claim from the API server each time. If the claim was allocated again, its new
  devices count. If the server does not answer, a known claim is prepared as it was before.
- Checking and reserving is one step without a wait, so two claims cannot both find a device free.
- The checkpoint says PREPARING before anything on the node changes, and PREPARED before the kubelet
  gets an answer. So an agent that is killed at any step leaves nothing behind that the next one
  would miss.
- If a step fails, one rollback undoes the steps before it, and the claim has what it had before.
  MIG devices that were created are deleted afterwards (:meth:`.dynamic_mig.DynamicMig.tidy`), since
  nvidia-smi may take longer than the kubelet waits.
- If a claim is still PREPARING, the next agent completes it with the same steps, and rolls it back
  if that fails. Until then its devices stay reserved. If its MIG devices were not all created, it
  is rolled back as soon as NVML's answer shows this.
- Preparing a prepared claim again changes no state. It repairs what the claim needs: the daemons
  that share its devices, and its CDI spec.
- No claim is prepared if the container engine does not read CDI names: pods would start without
  their devices.
- A device that is out of service goes to no new claim. Claims keep the devices that they have.

Source: Kubernetes kubelet pkg/kubelet/cm/dra/manager.go; its Go helper, kubeletplugin.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import anyio

from api.errors import NvshimError
from hooks.node.drained import read_drains, reasons_by_device
from integration.agent_errors import (
    ApiServerRefused,
    ApiServerSilent,
    EngineReadsNoCdi,
    ResourceClaimUnusable,
)
from integration.apiserver.status import is_away
from integration.node.delivery import ENABLE
from integration.node.engine_query import EngineQuery
from integration.node.service import Context
from integration.node.services.dra.claim_reader import ClaimReader
from integration.node.services.dra.claim_specs import ClaimSpecs
from integration.node.services.dra.claim_table import ClaimLocks, ClaimTable
from integration.node.services.dra.claims import (
    allocated_devices,
    read_claim,
    refuse_drained,
    refuse_taken,
    refuse_unavailable,
)
from integration.node.services.dra.discovery import DeviceDiscovery
from integration.node.services.dra.dynamic_mig import DynamicMig
from integration.node.services.dra.mig_create import is_unmade
from integration.node.services.dra.plugin_devices import PluginDevices
from integration.node.services.dra.sharing_setup import SharingSetup
from integration.node.values.claims import Claim, Reference

__all__ = ["ClaimTransactions"]


@dataclass(eq=False)
class ClaimTransactions:
    """Prepares and unprepares claims, several at a time."""

    context: Context
    table: ClaimTable  # the claims, with their checkpoint
    locks: ClaimLocks
    reader: ClaimReader  # reads a claim from the API server
    discovery: DeviceDiscovery  # the devices of the node
    plugins: PluginDevices  # what the device plugins gave away
    engine: EngineQuery
    mig: DynamicMig
    sharing: SharingSetup
    specs: ClaimSpecs
    # UIDs of the claims that pods needed since the search for stale claims began
    needed: set[str] = field(default_factory=set)

    async def prepare(self, reference: Reference) -> Claim:
        """Make the devices of a claim ready for its pods.

        Raises:
            NvshimError: a step failed; the claim has what it had before.
        """
        self.needed.add(reference.uid)
        async with self.locks.hold(reference.uid):
            document = await self._read(reference)
            if document is None:
                names = tuple(each.device for each in self.table.claims[reference.uid].devices)
            else:
                names = tuple(allocated_devices(document))
            async with self.locks.hold(*self.mig.gpus_for(names)):
                if document is None:
                    claim = self._known(reference)
                else:
                    options, devices = self.context.options, self.discovery.devices
                    where = (options.dra_driver, options.node_name)
                    claim = read_claim(document, reference, *where, devices)
                return await self._carry_out(claim)

    async def unprepare(self, reference: Reference) -> None:
        """Undo what was prepared for a claim; do nothing if nothing was prepared.

        Raises:
            MpsDaemonFailed: its MPS control daemon has not ended.
            MigDeviceNotUndone: its MIG devices cannot be deleted now.
            DraStateUnwritten: the checkpoint or the CDI spec cannot be changed.
            FilesSilent: the file system of one of them does not answer.
        """
        async with self.locks.hold(reference.uid):
            await self._unprepare(reference.uid)

    async def unprepare_stale(self, reference: Reference) -> bool:
        """Do the same for a claim that no pod had; return False if one has needed it since.

        Raises:
            NvshimError: as for :meth:`unprepare`.
        """
        async with self.locks.hold(reference.uid):
            if is_stale := reference.uid not in self.needed:
                await self._unprepare(reference.uid)
        return is_stale

    async def recover(self) -> None:
        """Complete the transactions of an earlier agent, or roll them back."""
        async with anyio.create_task_group() as tasks:
            for claim in self.table.claims.values():
                if not claim.is_prepared:
                    tasks.start_soon(self._recover, claim.uid)

    async def _recover(self, uid: str) -> None:
        await self.discovery.known.wait()
        await self.mig.wait_settled(uid)
        async with self.locks.hold(uid):
            claim = self.table.claims.get(uid)
            if claim is None or claim.is_prepared:
                return  # the kubelet was faster
            async with self.locks.hold(*self.mig.gpus_for(each.device for each in claim.devices)):
                try:
                    await self._carry_out(claim)
                except NvshimError as error:
                    title = f"{claim.namespace}/{claim.name}"
                    self.context.say("warning", str(error), claim=title)

    # The steps

    async def _unprepare(self, uid: str) -> None:
        async with self.locks.hold(*self.mig.gpus_of(uid)):
            await self.sharing.release(uid)  # first: an MPS daemon has its device open
            await self.mig.delete(uid)
            await self.table.remove(uid, partial(self.specs.remove, uid))

    async def _read(self, reference: Reference) -> dict[str, Any] | None:
        """Read a claim; return None if the API server is away and the claim is known."""
        try:
            served = [each.name for each in self.context.state.resources.value]
            is_known = reference.uid in self.table.claims
            return await self.reader.read(reference, served, is_prepared=is_known)
        except (ApiServerRefused, ApiServerSilent) as error:
            if is_away(error) and reference.uid in self.table.claims:
                return None
            raise

    def _known(self, reference: Reference) -> Claim:
        """Return a claim as the table has it, while the API server is away."""
        known = self.table.claims.get(reference.uid)
        if known is None or any(map(is_unmade, known.devices)):
            raise ResourceClaimUnusable(f"the {reference}", found="it was unprepared meanwhile")
        return known

    async def _carry_out(self, claim: Claim) -> Claim:
        """Do all steps from the check on; the caller holds the claim and its GPUs."""
        known = self.table.claims.get(claim.uid)
        is_again = known is not None and known.is_prepared and known == claim
        before = None if known is None else known.before
        if known is not None and is_again:
            if known.pod_claim != claim.pod_claim:  # the kubelet's record does not have it
                self.table.put(replace(claim, has_metadata=known.has_metadata))
            claim = before = self.table.claims[claim.uid]
        try:
            if not is_again:
                refuse_unavailable(
                    claim,
                    self.table.claims.values(),
                    self._drained(),
                    self.plugins.recent(),
                    self.discovery.devices or {},
                )
                self.table.reserve(claim, before)
                refuse_taken(claim, (), await self.plugins.allocated())
                await self.table.write()
                # A program that changes a GPU first marks it, and then looks for claims in the
                # checkpoint.
                refuse_drained(claim, self._drained())
            await self._refuse_engine()
            if not self.mig.is_ready(claim):
                claim = await self.mig.create(claim, self.discovery.devices or {})
                self.table.reserve(claim, before)
            await self.sharing.apply(claim, before)
            has_had = before is not None and before.has_metadata and claim is not before
            if has_had or (self.context.options.dra_metadata and not is_again):
                claim = await self.specs.describe(claim)
            template = self.discovery.template
            write_spec = partial(self.specs.write_once, claim, keep_existing=is_again)
            prepared = await self.table.complete(claim, write_spec)
            if self.discovery.template is not template:  # the node changed meanwhile
                await self.specs.write(prepared, keep_existing=True)
        except Exception:
            await self._roll_back(claim.uid, before)
            raise
        return prepared

    def _drained(self) -> dict[str, str]:
        """Return why devices are out of service now; the inventory may be older than the marks."""
        inventory = self.context.state.node.value.inventory
        gpus, parts = ((), ()) if inventory is None else (inventory.gpus, inventory.mig_devices)
        return reasons_by_device(gpus, parts, read_drains(self.context.config))

    async def _refuse_engine(self) -> None:
        engine = await self.engine.ask()
        if engine is not None and engine.reads_cdi is False:
            raise EngineReadsNoCdi(
                "to give devices by CDI",
                found=f"{engine} does not read CDI names, or is not set to",
                do=f"run `{ENABLE}`",
            )

    async def _roll_back(self, uid: str, before: Claim | None) -> None:
        """Return a claim to its previous state; do nothing if no step has changed it.

        Args:
            before: the previous state; None if the claim had no devices.
        """
        if self.table.claims.get(uid) is before:
            return
        await self.sharing.put_back(uid, before)
        self.table.restore(uid, before)
        try:
            await self.table.write()
            if before is None:
                await self.specs.remove(uid)
                return
            if before.has_metadata:
                await self.specs.describe(before)
            await self.specs.write(before, keep_existing=True)
        except NvshimError as error:  # the error of the step that failed says more
            self.context.say("warning", str(error), claim=uid)
            if before is not None:
                self.specs.doubt(uid, str(error))
