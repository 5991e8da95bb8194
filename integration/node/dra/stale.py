"""Taking back what was prepared for claims that are no more, and that no kubelet will take back.

A kubelet that has lost its records, or a pod that was removed by force while nobody was there to
hear of it, leaves a claim prepared for ever: nobody else would get its devices.

Rules
- A claim is taken back if all say so: the API server has none of that name, or one with another
  UID; no container has it, by the kubelet's pod-resources API; and the kubelet's own record, by
  which it takes back what its pods have left, does not name it either.
- It is taken back at the second look that finds it so: a kubelet that has just begun knows of no
  pods yet, for a moment.
- An answer that is none (a server that is away, one that may not be asked, a proxy's page) says
  nothing. To a kubelet's own credentials the server's node authorizer says that no pod of the node
  has the claim: that is enough, with the other two.
- A hangup is a reason to look at once.

Source: NVIDIA's driver, its clean-up of stale claims every ten minutes; Kubernetes kubelet
pkg/kubelet/cm/dra/manager.go.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

import anyio.to_thread

from api.errors import NvshimError
from integration.node.dra import state
from integration.node.dra.claims import Reference
from integration.node.errors import ApiServerSilent

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from integration.node.components import Context
    from integration.node.dra.reading import ClaimReader
    from integration.node.dra.values import Claim
    from integration.node.ledger.values import Claimed

__all__ = ["Stale"]

_LOOK_AGAIN: Final = 300.0


class Stale:
    """Looks for such claims.

    Args:
        take_back: has nothing be prepared for a claim any more.
    """

    def __init__(
        self,
        context: Context,
        reader: ClaimReader,
        take_back: Callable[[Reference], Awaitable[None]],
    ) -> None:
        self._context = context
        self._reader = reader
        self._take_back = take_back
        self._suspected: set[str] = set()

    async def run(self) -> None:
        """Look now and then, until cancelled."""
        board = self._context.board
        while True:
            version = board.version("hangups")
            await self.look()
            await board.change("hangups", since=version, timeout=_LOOK_AGAIN)

    async def look(self) -> None:
        """Look once."""
        found = await self._found()
        for claim in found:
            if claim.uid in self._suspected:
                await self._end(claim)
        self._suspected = {claim.uid for claim in found}

    async def _found(self) -> list[Claim]:
        """The claims that nobody has, by all who know."""
        context, claims = self._context, self._context.board.claims
        if not claims:
            return []
        named = await context.kubelet.claims(context.options.pod_resources)
        if named is None:
            return []
        recorded = await anyio.to_thread.run_sync(
            partial(state.recorded, context.config, context.options.dra_driver)
        )
        found: list[Claim] = []
        for claim in claims:
            if claim.uid in recorded or _is_named(claim, context.options.dra_driver, named):
                continue
            try:
                if await self._reader.is_gone(Reference(claim.namespace, claim.uid, claim.name)):
                    found.append(claim)
            except ApiServerSilent:
                return []
        return found

    async def _end(self, claim: Claim) -> None:
        try:
            await self._take_back(Reference(claim.namespace, claim.uid, claim.name))
        except NvshimError as error:
            self._context.say("warning", str(error), claim=f"{claim.namespace}/{claim.name}")
            return
        self._context.say(
            "warning", "took back a claim that is no more, and that no kubelet has taken back",
            claim=f"{claim.namespace}/{claim.name}", uid=claim.uid,
            devices=[device.device for device in claim.devices],
        )  # fmt: skip


def _is_named(claim: Claim, driver: str, named: Iterable[Claimed]) -> bool:
    """Whether a container has a claim; one of its name may have been made anew."""
    known = [each for each in named if (each.namespace, each.name) == (claim.namespace, claim.name)]
    names = [name for each in known if each.driver == driver for name in each.cdi_names]
    return any(claim.uid in name for name in names) if names else bool(known)
