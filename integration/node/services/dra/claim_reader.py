"""Reading claims from the API server, which may be away for minutes, and finding stale ones.

Rules of reading
- A server that is silent is not waited for by one claim after the other: who waited in the same
  moment hears the same. The kubelet gives up a call after 45 seconds, and the pod's event is to
  say why: a claim is waited for in twice the time that a call may take.
- A claim that is prepared does not need the server: its UID is that of what was prepared. So it is
  waited for a moment only, and not at all if the server has just been silent.
- Threads that wait for the server are few, and nobody else's: taking a claim back, and writing down
  what is prepared, need threads too. What one waits for after its time, it waits for unheard.
- A server that is busy (429) and says when to ask again is asked again, if that is soon.
- A claim that the scheduler has made for an extended resource is refused where our device plugin
  serves that resource on this node. Who may not read DeviceClasses (a kubelet) cannot tell.

Rules of stale claims. A kubelet that has lost its records, or a pod that was removed by force while
nobody was there to hear of it, leaves a claim prepared for ever: nobody else gets its devices.
- A claim is taken back if all say so: the API server has none of that name, or one with another
  UID; no container has it, by the kubelet's pod-resources API; and the kubelet's own record, by
  which it takes back what its pods have left, does not name it either.
- It is taken back at the second look that finds it so: a kubelet that has just begun knows of no
  pods yet, for a moment. A hangup is a reason to look at once.
- An answer that is none (a server that is away, one that may not be asked, a proxy's page) says
  nothing. To a kubelet's own credentials the server's node authorizer says that no pod of the node
  has the claim: that is enough, with the other two.

Source: Kubernetes kubelet pkg/kubelet/cm/dra (45 s; manager.go); API concepts, "429"; NVIDIA's
driver, its clean-up of stale claims every ten minutes.
"""

from __future__ import annotations

import math
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import anyio
import anyio.to_thread

from api.errors import NvshimError
from integration.agent_errors import (
    ApiServerRefused,
    ApiServerSilent,
    ExtendedResourceClash,
    ResourceClaimUnusable,
)
from integration.apiserver.status import is_away
from integration.detached import run_detached
from integration.json_documents import NestedTooDeeply
from integration.node.services.dra.publishing import claim_path, class_path
from integration.node.state import claims_file as state
from integration.node.state.topic import version_of, wait_any
from integration.node.values.claims import Reference

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping

    from integration.apiserver.client import ApiServer
    from integration.kubelet.values import Claimed
    from integration.node.service import Context
    from integration.node.values.claims import Claim

__all__ = ["ClaimReader", "Stale"]

_EXTENDED: Final = "resource.kubernetes.io/extended-resource-claim"
_NOT_FOUND: Final = 404
_FORBIDDEN: Final = 403
_NOBODYS: Final = "no relationship found between node "
"""What the node authorizer says of what no pod of a kubelet's node has to do with."""
_BUSY: Final = 429
_AT_ONCE: Final = 4
_ATTEMPTS: Final = 3
_SOON: Final = 5.0
# How often the time that a call may take.
_FOR_A_CLAIM: Final = 2
# Seconds, for a claim that is prepared.
_A_MOMENT: Final = 1.0
_JUST_NOW: Final = 10.0


class ClaimReader:
    """Reads claims."""

    def __init__(self, api: ApiServer, version: Callable[[], Awaitable[str]]) -> None:
        self._api = api
        self._version = version
        self._finding = anyio.Lock()
        self._waiting = anyio.CapacityLimiter(_AT_ONCE)
        self._threads = threading.BoundedSemaphore(2 * _AT_ONCE)
        self._silent_at = self._slow_at = -math.inf
        self._silent: ApiServerSilent | None = None

    async def read(
        self, reference: Reference, served: Collection[str] = (), *, is_prepared: bool = False
    ) -> dict[str, Any]:
        """A claim, as the API server has it.

        Args:
            served: the resources that our device plugin serves here.
            is_prepared: whether one can do without the server.

        Raises:
            ApiServerSilent: the server does not answer.
            ApiServerRefused: it says no.
            ResourceClaimUnusable: it has no such claim.
            ExtendedResourceClash: it is for a resource that a device plugin serves.
        """
        asked = f"to read the {reference}"
        limit = self._api.timeout * _FOR_A_CLAIM
        if is_prepared:
            limit = min(limit, _A_MOMENT)
            silent_at = max(self._silent_at, self._slow_at)
            if time.monotonic() - silent_at < _JUST_NOW:
                raise ApiServerSilent(asked, found="it has just been silent")
        with anyio.move_on_after(limit):
            found = await self._read(reference)
            await self._refuse_clash(found, served)
            return found
        self._slow_at = time.monotonic()
        raise ApiServerSilent(asked, found=f"no answer within {limit:g} seconds")

    async def is_gone(self, reference: Reference) -> bool:
        """Whether the server says that no pod here can have a claim; no if it says nothing of it.

        Raises:
            ApiServerSilent: the server does not answer.
        """
        try:
            found = await self.read(reference)
        except ResourceClaimUnusable as error:
            # What is not the server's own word may be that of a proxy, or of a server without DRA.
            return f'"{reference.name}" not found' in str(getattr(error.__cause__, "found", ""))
        except ApiServerRefused as error:
            return error.http == _FORBIDDEN and _NOBODYS in error.found
        metadata = found.get("metadata")
        uid = metadata.get("uid") if isinstance(metadata, dict) else None
        return uid is not None and str(uid) != reference.uid

    async def _read(self, reference: Reference) -> dict[str, Any]:
        version = await self._spoken()
        path = claim_path(version, reference.namespace, reference.name)
        try:
            return await self._asked(path)
        except ApiServerRefused as error:
            if error.http != _NOT_FOUND:
                raise
            raise ResourceClaimUnusable(f"the {reference}", found="does not exist") from error

    async def _refuse_clash(self, found: Mapping[str, Any], served: Collection[str]) -> None:
        """See that a claim is not for a resource that a device plugin serves.

        Args:
            found: the claim, as the API server has it.
            served: the resources that our device plugin serves here.
        """
        metadata = found.get("metadata") or {}
        if not served or (metadata.get("annotations") or {}).get(_EXTENDED) != "true":
            return
        version = await self._spoken()
        requests = ((found.get("spec") or {}).get("devices") or {}).get("requests") or ()
        classes = {(each.get("exactly") or each).get("deviceClassName") for each in requests}
        for name in sorted(filter(None, classes)):
            try:
                spec = (await self._asked(class_path(version, name))).get("spec") or {}
            except ApiServerRefused as error:
                if is_away(error):
                    raise
                continue  # it is gone, or not ours to read
            if (resource := spec.get("extendedResourceName")) in served:
                raise ExtendedResourceClash(
                    f"the claim {metadata.get('namespace')}/{metadata.get('name')}",
                    found=f"the DeviceClass {name} and the device plugin both serve {resource}",
                )

    async def _spoken(self) -> str:
        asked = time.monotonic()
        async with self._finding:
            self._refuse(asked)
            try:
                return await self._version()
            except ApiServerSilent as error:
                self._note(error)
                raise

    async def _asked(self, path: str) -> dict[str, Any]:
        """What the server has at a path."""
        asked = time.monotonic()
        for attempt in range(_ATTEMPTS):
            try:
                async with self._waiting:
                    return await run_detached(partial(self._get, path, asked))
            except ApiServerRefused as error:
                is_last = attempt + 1 == _ATTEMPTS
                if error.http != _BUSY or is_last or not 0 < error.retry_after <= _SOON:
                    raise
                await anyio.sleep(error.retry_after)
        raise AssertionError  # the last attempt returns or raises

    def _get(self, path: str, asked: float) -> dict[str, Any]:
        """In a thread."""
        self._refuse(asked)
        if not self._threads.acquire(blocking=False):
            raise ApiServerSilent(f"to GET {path}", found="nor are calls before it answered")
        try:
            return self._api.call("GET", path)
        except ApiServerSilent as error:
            if isinstance(error.__cause__, NestedTooDeeply):  # which says nothing of the server
                raise ResourceClaimUnusable(f"to GET {path}", found=str(error.__cause__)) from error
            self._note(error)
            raise
        finally:
            self._threads.release()

    def _note(self, error: ApiServerSilent) -> None:
        self._silent_at, self._silent = time.monotonic(), error

    def _refuse(self, asked: float) -> None:
        if self._silent is not None and self._silent_at >= asked:
            raise ApiServerSilent(self._silent.asked, found=self._silent.found, do=self._silent.do)


_LOOK_AGAIN: Final = 300.0


class Stale:
    """Looks for such claims."""

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
        reloads = self._context.state.reloads
        while True:
            version = version_of(reloads)
            await self.look()
            await wait_any(reloads, since=version, timeout=_LOOK_AGAIN)

    async def look(self) -> None:
        """Look once."""
        found = await self._found()
        for claim in found:
            if claim.uid in self._suspected:
                await self._end(claim)
        self._suspected = {claim.uid for claim in found}

    async def _found(self) -> list[Claim]:
        """The claims that nobody has, by all who know."""
        context, claims = self._context, self._context.state.claims.value
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
                if await self._reader.is_gone(claim.reference):
                    found.append(claim)
            except ApiServerSilent:
                return []
        return found

    async def _end(self, claim: Claim) -> None:
        try:
            await self._take_back(claim.reference)
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
