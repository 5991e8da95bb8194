"""Write, repair and remove the CDI specs and the metadata of claims as the node changes.

Rules
- A claim's transaction writes its spec (:mod:`.transaction`). Specs of prepared claims are
  rewritten when the node's devices change, or when a file has been removed.
- A spec that exists is kept if it cannot be generated now: running containers were started with it.
- A claim in a transaction is skipped. Its transaction writes the spec, and writes it again if the
  node has changed in the meantime.
- A spec that cannot be written is a fault, and is retried in the next round.
- A claim that was prepared with metadata (:mod:`.metadata`) keeps it, even if the option is off.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import anyio.to_thread

from api.errors import NvshimError
from integration.agent_errors import ClaimedDeviceMissing, DraStateUnwritten, MpsNotReady
from integration.detached import run_detached
from integration.node.service import Context
from integration.node.services.dra import cdi, metadata
from integration.node.services.dra.claim_table import ClaimLocks, ClaimTable
from integration.node.services.dra.discovery import DeviceDiscovery
from integration.node.services.dra.mig_create import is_unmade
from integration.node.services.dra.sharing_setup import SharingSetup
from integration.node.values.claims import Claim
from integration.watcher import Interest, Watcher

__all__ = ["ClaimSpecs"]

# Seconds without a change after which a burst of changes is over, and the longest burst.
_QUIET: Final = 0.05
_LONGEST_BURST: Final = 1.0
_MADE_OR_REMOVED: Final = Interest(content=False)
_BUSY: Final = ""


@dataclass(eq=False)
class ClaimSpecs:
    """The CDI specs of all claims."""

    context: Context
    table: ClaimTable
    locks: ClaimLocks
    discovery: DeviceDiscovery
    sharing: SharingSetup
    fault: Callable[[str, str], None]  # reports a fault of a part of the driver, or clears it
    # Why a spec is not as it should be, by the UID of its claim.
    _pending: dict[str, str] = field(default_factory=dict)

    @property
    def _driver(self) -> str:
        return self.context.options.dra_driver

    @property
    def has_pending(self) -> bool:
        """Whether a spec has to be tried again."""
        return bool(self._pending)

    async def sweep(self) -> None:
        """Remove the specs of claims that are not in the table."""
        claims, line = frozenset(self.table.claims), ""
        try:
            await run_detached(cdi.sweep, self.context.config, self._driver, claims)
            await run_detached(metadata.sweep, self.context.config, self._driver, claims)
        except DraStateUnwritten as error:  # harmless: no claim refers to them
            line = str(error)
        self.fault("old specs", line)

    async def write(self, claim: Claim, *, keep_existing: bool = False) -> None:
        """Write the spec of a claim, as :meth:`keep` does, for the node as it is in the end."""
        while True:
            template = self.discovery.template
            await anyio.to_thread.run_sync(partial(self.keep, claim, keep_existing=keep_existing))
            if self.discovery.template is template:
                return

    def keep(self, claim: Claim, *, keep_existing: bool = False) -> None:
        """Write the spec of a claim, unless its file is up to date. Blocks, so call it in a thread.

        Args:
            keep_existing: accept the existing file if none can be generated now.

        Raises:
            ClaimedDeviceMissing: the driver does not have one of the devices at present.
            MpsNotReady: the directory of the MPS daemons is unknown.
            DraStateUnwritten: the file cannot be read.
            CdiSpecUnwritten: the file cannot be written.
        """
        keep_existing = keep_existing and self._has_spec(claim)
        template, root = self.discovery.template, self.sharing.mps_root
        try:
            if cdi.keep(self.context.config, self._driver, claim, template, root):
                self.context.say("info", "CDI spec of a claim is up to date", claim=str(claim))
        except (ClaimedDeviceMissing, MpsNotReady):
            if not keep_existing:
                raise
        # What the devices are is known then.
        if template is not None and metadata.is_due(self.context.config, self._driver, claim):
            self._write_metadata(claim)

    async def describe(self, claim: Claim) -> Claim:
        """Write the metadata of a claim, and return the claim with what it has then."""
        try:
            await anyio.to_thread.run_sync(self._write_metadata, claim)
        except NvshimError as error:
            self.context.say("warning", str(error), claim=str(claim), left_out="its metadata")
            return replace(claim, has_metadata=False)
        return replace(claim, has_metadata=True)

    def _write_metadata(self, claim: Claim) -> None:
        devices = self.discovery.devices or {}
        metadata.write_all(self.context.config, self._driver, claim, devices)

    def remove(self, uid: str) -> None:
        """Remove the spec and the metadata of a claim, if any. Blocks, so call it in a thread.

        Raises:
            DraStateUnwritten: a file cannot be removed.
        """
        cdi.remove(self.context.config, self._driver, uid)
        metadata.remove(self.context.config, self._driver, uid)

    async def repair(self, claims: Iterable[Claim] | None = None) -> None:
        """Write the specs of prepared claims again; of all if ``claims`` is None."""
        for claim in tuple(self.table.claims.values() if claims is None else claims):
            self._pending.pop(claim.uid, None)
            if not claim.is_prepared or any(map(is_unmade, claim.devices)):
                continue
            if self.locks.is_held(claim.uid):
                self._pending[claim.uid] = _BUSY
                continue
            async with self.locks.hold(claim.uid):
                if self.table.claims.get(claim.uid) is claim:
                    try:
                        await self.write(claim, keep_existing=True)
                    except NvshimError as error:
                        self._pending[claim.uid] = str(error)
        for uid in self._pending.keys() - self.table.claims.keys():
            del self._pending[uid]
        self.fault("specs", next(filter(None, self._pending.values()), ""))

    async def watch(self) -> None:
        """Restore removed specs, until cancelled."""
        directory = self.context.config.cdi_spec_dirs[-1]
        with Watcher(_QUIET, _LONGEST_BURST) as watcher:
            while True:
                await watcher.change({directory: _MADE_OR_REMOVED}, may_hang=True)
                claims = tuple(self.table.claims.values())
                await self.repair(await run_detached(self._missing, claims))

    def _has_spec(self, claim: Claim) -> bool:
        return os.path.lexists(cdi.path_of(self.context.config, self._driver, claim.uid))

    def _missing(self, claims: Iterable[Claim]) -> list[Claim]:
        return list(filter(self._is_missing, claims))

    def _is_missing(self, claim: Claim) -> bool:
        is_due = metadata.is_due(self.context.config, self._driver, claim)
        return is_due or not self._has_spec(claim)
