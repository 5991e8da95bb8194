"""Unprepare claims that no longer have a pod.

If a kubelet has lost its records, or a pod was deleted by force while the agent was down, a claim
stays prepared forever, and no other claim gets its devices.

Rules
- A claim is stale if three sources agree: the API server has no claim of that name, or one with
  another UID; no container has it according to the kubelet's pod-resources API; and the kubelet's
  own record, by which it unprepares the claims of its former pods, does not list it.
- A stale claim is unprepared only after two checks in a row, since a kubelet that has just started
  knows no pods for a moment. SIGHUP starts a check at once.
- A claim that was prepared again since the check began is not stale: a pod may have got it after
  the server's answer.
- A missing answer (a server that is unavailable or refuses, a proxy's page, a damaged record)
  counts as "not stale". With a kubelet's credentials, the node authorizer's answer that no pod of
  the node has the claim is enough, together with the other two sources.

Source: Kubernetes kubelet pkg/kubelet/cm/dra, manager.go; NVIDIA's driver, its cleanup of stale
claims every ten minutes.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Final, Protocol

from api.errors import NvshimError
from hooks.node.kubelet import kubelet_root
from integration.agent_errors import ApiServerSilent, FilesSilent
from integration.kubelet.values import Claimed
from integration.node.service import Context
from integration.node.services.dra.claim_reader import ClaimReader
from integration.node.state import claims_file
from integration.node.state.topic import version_of, wait_any
from integration.node.values.claims import Claim, Reference

__all__ = ["StaleClaims"]

_LOOK_AGAIN: Final = 300.0


class Transactions(Protocol):
    """Unprepares claims (:class:`.transaction.ClaimTransactions`)."""

    needed: set[str]

    async def unprepare_stale(self, reference: Reference) -> bool:
        """Unprepare a claim unless it is in ``needed``; return whether it was not."""


class StaleClaims:
    """Finds and unprepares stale claims."""

    def __init__(self, context: Context, reader: ClaimReader, transactions: Transactions) -> None:
        self._context = context
        self._reader = reader
        self._transactions = transactions
        self._suspected: set[str] = set()

    async def run(self) -> None:
        """Look for stale claims every five minutes and after a hangup, until cancelled."""
        reloads = self._context.state.reloads
        while True:
            version = version_of(reloads)
            await self.look()
            await wait_any(reloads, since=version, timeout=_LOOK_AGAIN)

    async def look(self) -> None:
        """Look once; unprepare those that were stale the last time, too."""
        self._transactions.needed.clear()
        found = await self._found()
        for claim in found:
            if claim.uid in self._suspected:
                await self._unprepare_stale(claim)
        self._suspected = {claim.uid for claim in found}

    async def _found(self) -> list[Claim]:
        """Return the claims that no pod has, by all three sources."""
        context, claims = self._context, self._context.state.claims.value
        if not claims:
            return []
        named = await context.kubelet.claims(context.options.pod_resources)
        if named is None:
            return []
        config, root = context.config, kubelet_root(context.config)
        read, driver = claims_file.recorded, context.options.dra_driver
        recorded = None
        with suppress(FilesSilent):
            recorded = await context.files.run(root, "to read its claims", read, config, driver)
        if recorded is None:
            return []
        found: list[Claim] = []
        for claim in claims:
            if claim.uid in recorded or _is_named(claim, context.options.dra_driver, named):
                continue
            try:
                if await self._reader.is_gone(claim.reference):
                    found.append(claim)
            except ApiServerSilent:
                return []
        return found

    async def _unprepare_stale(self, claim: Claim) -> None:
        try:
            if not await self._transactions.unprepare_stale(claim.reference):
                return
        except NvshimError as error:
            self._context.say("warning", str(error), claim=f"{claim.namespace}/{claim.name}")
            return
        self._context.say(
            "warning", "unprepared a stale claim, which no pod has",
            claim=f"{claim.namespace}/{claim.name}", uid=claim.uid,
            devices=[device.device for device in claim.devices],
        )  # fmt: skip


def _is_named(claim: Claim, driver: str, named: Iterable[Claimed]) -> bool:
    """Return whether a container has a claim; a new claim may have the same name."""
    known = [each for each in named if (each.namespace, each.name) == (claim.namespace, claim.name)]
    names = [name for each in known if each.driver == driver for name in each.cdi_names]
    return any(claim.uid in name for name in names) if names else bool(known)
