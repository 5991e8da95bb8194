"""Write, repair and remove the CDI specs and the metadata of claims as the node changes.

Rules
- A claim's transaction writes its spec (:mod:`.transaction`). Specs of prepared claims are
  rewritten when the node's devices change, or when a file has been removed.
- A spec that exists is kept if it cannot be generated now: running containers were started with it.
- A claim in a transaction is skipped. Its transaction writes the spec, and writes it again if the
  node has changed in the meantime.
- A spec that cannot be written is a fault, and is retried in the next round.
- If a directory does not answer, a write that was given up may put a spec there later
  (:mod:`integration.node.file_calls`), but always before anything that is written or removed
  afterwards. So a claim that is prepared has the spec that was written last. A spec of a claim that
  was rolled back may appear. No container refers to it; it is replaced when the claim is prepared
  again, and the next agent removes it.
- The files of metadata do not share their calls with the specs: while the kubelet's directory does
  not answer, claims without metadata continue.
- A claim that was prepared with metadata (:mod:`.metadata`) keeps it, even if the option is off.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, TypeVar

from api.errors import NvshimError
from integration.agent_errors import (
    ClaimedDeviceMissing,
    DraStateUnwritten,
    FilesSilent,
    MpsNotReady,
)
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

T = TypeVar("T")

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
    # Why a spec is missing or out of date, by the UID of its claim.
    _pending: dict[str, str] = field(default_factory=dict)
    # The UIDs of claims for which this agent began to write metadata.
    _described: set[str] = field(default_factory=set)

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
        asked, what = (
            "to remove files of earlier claims",
            (self.context.config, self._driver, claims),
        )
        try:
            await self._of_specs(asked, cdi.sweep, *what)
            await self._of_metadata(asked, metadata.sweep, *what)
        except (DraStateUnwritten, FilesSilent) as error:  # harmless: no claim refers to them
            line = str(error)
        self.fault("old specs", line)

    async def write(self, claim: Claim, *, keep_existing: bool = False) -> None:
        """Write a claim's files with :meth:`write_once`, again if the node changed meanwhile."""
        while True:
            template = self.discovery.template
            await self.write_once(claim, keep_existing=keep_existing)
            if self.discovery.template is template:
                return

    async def write_once(self, claim: Claim, *, keep_existing: bool = False) -> None:
        """Write the spec and the metadata of a claim, unless they are up to date.

        Raises:
            NvshimError: as for :meth:`keep`.
            FilesSilent: a file system does not answer.
        """
        template = self.discovery.template
        asked = f"to write {cdi.path_of(self.context.config, self._driver, claim.uid)} for {claim}"
        await self._of_specs(asked, partial(self.keep, claim, keep_existing=keep_existing))
        if template is not None and claim.has_metadata:  # what the devices are is known then
            asked = f"to write the metadata of {claim}"
            await self._of_metadata(asked, self._keep_metadata, claim)

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

    async def describe(self, claim: Claim) -> Claim:
        """Write the metadata of a claim, and return the claim with ``has_metadata`` updated."""
        self._described.add(claim.uid)
        try:
            asked = f"to write the metadata of {claim}"
            await self._of_metadata(asked, self._write_metadata, claim)
        except NvshimError as error:
            self.context.say("warning", str(error), claim=str(claim), left_out="its metadata")
            return replace(claim, has_metadata=False)
        return replace(claim, has_metadata=True)

    def _keep_metadata(self, claim: Claim) -> None:
        if metadata.is_due(self.context.config, self._driver, claim):
            self._write_metadata(claim)

    def _write_metadata(self, claim: Claim) -> None:
        devices = self.discovery.devices or {}
        metadata.write_all(self.context.config, self._driver, claim, devices)

    async def remove(self, uid: str) -> None:
        """Remove the spec and the metadata of a claim, if any.

        Raises:
            DraStateUnwritten: a file cannot be removed.
            FilesSilent: a file system does not answer.
        """
        config, driver, claim = self.context.config, self._driver, self.table.claims.get(uid)
        asked = f"to remove {cdi.path_of(config, driver, uid)}"
        await self._of_specs(asked, cdi.remove, config, driver, uid)
        has_metadata = claim is not None and claim.has_metadata
        is_certain = claim is not None and claim.is_prepared and uid not in self._described
        if is_certain and not has_metadata:
            return  # a look into its directories takes longer than all the rest
        try:
            asked = f"to remove the metadata of the claim {uid}"
            await self._of_metadata(asked, metadata.remove, config, driver, uid)
        except FilesSilent:
            if has_metadata:
                raise
            # What an attempt to write it may have left, the next agent removes.
        self._described.discard(uid)

    def doubt(self, uid: str, line: str) -> None:
        """Write the files of a claim again in the next round.

        Args:
            line: why they may not be as they should.
        """
        self._pending[uid] = line

    async def _of_specs(self, asked: str, do: Callable[..., T], *arguments: object) -> T:
        """Call a function about the CDI specs of claims, as :meth:`.FileCalls.run` does."""
        directory = self.context.config.cdi_spec_dirs[-1]
        return await self.context.files.run(directory, asked, do, *arguments)

    async def _of_metadata(self, asked: str, do: Callable[..., T], *arguments: object) -> T:
        """Call a function about metadata, which has files in two directories."""
        directories = " or ".join(metadata.directories(self.context.config, self._driver))
        return await self.context.files.run(directories, asked, do, *arguments)

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
