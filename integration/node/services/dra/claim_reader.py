"""Read claims from the API server, which may be unavailable for minutes.

Rules
- Claims do not wait for a silent server one after the other: all claims that wait at the same time
  get the same error. The kubelet gives up a call after 45 seconds, and the pod's event should give
  the reason. So reading a claim takes at most twice the time limit of a call.
- A claim that is already known does not need the server, since its UID identifies it. It waits only
  for a moment, and not at all if the server has just failed to answer.
- Only a few threads wait for the server, and they are separate from those for unpreparing and for
  the checkpoint. A call that takes too long continues in its thread, but its result is dropped.
- If a busy server (429) says when to retry, it is called again, provided that this is soon.
- A claim that the scheduler made for an extended resource is refused if this agent's device plugin
  serves that resource. A kubelet's credentials do not allow reading DeviceClasses, so with them the
  driver cannot tell.

Source: Kubernetes kubelet pkg/kubelet/cm/dra (45 s); API concepts, "429".
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import partial
from typing import Any, Final

import anyio

from integration.agent_errors import (
    ApiServerRefused,
    ApiServerSilent,
    ExtendedResourceClash,
    ResourceClaimUnusable,
)
from integration.apiserver.client import ApiServer
from integration.apiserver.status import is_away
from integration.detached import run_detached
from integration.json_documents import NestedTooDeeply
from integration.node.services.dra.publishing import claim_path, class_path
from integration.node.values.claims import Reference

__all__ = ["ClaimReader"]

_EXTENDED: Final = "resource.kubernetes.io/extended-resource-claim"
_NOT_FOUND: Final = 404
_FORBIDDEN: Final = 403
_UNRELATED: Final = "no relationship found between node "
"""The node authorizer's words if no pod of the kubelet's node uses an object."""
_BUSY: Final = 429
_AT_ONCE: Final = 4
_ATTEMPTS: Final = 3
_SOON: Final = 5.0
# The time limit for reading a claim, as a multiple of a call's time limit.
_FOR_A_CLAIM: Final = 2
# Seconds to wait for a claim that is already known.
_A_MOMENT: Final = 1.0
_JUST_NOW: Final = 10.0


class ClaimReader:
    """Reads claims.

    Args:
        version: returns the API version to use.
    """

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
        """Read a ResourceClaim.

        Args:
            served: the resources that this agent's device plugin serves.
            is_prepared: whether the claim is already known, so that the server is not needed.

        Raises:
            ApiServerSilent: the server does not answer.
            ApiServerRefused: the server refuses.
            ResourceClaimUnusable: there is no such claim.
            ExtendedResourceClash: the claim is for a resource that the device plugin serves.
        """
        asked = f"to read the {reference}"
        limit = self._api.timeout * _FOR_A_CLAIM
        if is_prepared:
            limit = min(limit, _A_MOMENT)
            silent_at = max(self._silent_at, self._slow_at)
            if time.monotonic() - silent_at < _JUST_NOW:
                raise ApiServerSilent(asked, found="it has just failed to answer")
        with anyio.move_on_after(limit):
            version = await self._api_version()
            try:
                found = await self._get(claim_path(version, reference.namespace, reference.name))
            except ApiServerRefused as error:
                if error.http != _NOT_FOUND:
                    raise
                raise ResourceClaimUnusable(f"the {reference}", found="does not exist") from error
            if served and _is_for_extended_resource(found):
                await self._refuse_clash(found, served, version)
            return found
        self._slow_at = time.monotonic()
        raise ApiServerSilent(asked, found=f"no answer within {limit:g} seconds")

    async def is_gone(self, reference: Reference) -> bool:
        """Return whether no pod of this node can have a claim; False if that is not certain.

        Raises:
            ApiServerSilent: the server does not answer.
        """
        try:
            found = await self.read(reference)
        except ResourceClaimUnusable as error:
            # A 404 with other words may come from a proxy, or from a server without DRA.
            return f'"{reference.name}" not found' in str(getattr(error.__cause__, "found", ""))
        except ApiServerRefused as error:
            return error.http == _FORBIDDEN and _UNRELATED in error.found
        metadata = found.get("metadata")
        uid = metadata.get("uid") if isinstance(metadata, dict) else None
        return uid is not None and str(uid) != reference.uid

    async def _refuse_clash(
        self, found: Mapping[str, Any], served: Collection[str], version: str
    ) -> None:
        """Refuse a claim for an extended resource that the device plugin serves."""
        metadata = found.get("metadata") or {}
        requests = ((found.get("spec") or {}).get("devices") or {}).get("requests") or ()
        classes = {(each.get("exactly") or each).get("deviceClassName") for each in requests}
        for name in sorted(filter(None, classes)):
            try:
                spec = (await self._get(class_path(version, name))).get("spec") or {}
            except ApiServerRefused as error:
                if is_away(error):
                    raise
                continue  # the class is gone, or the agent may not read it
            if (resource := spec.get("extendedResourceName")) in served:
                raise ExtendedResourceClash(
                    f"the claim {metadata.get('namespace')}/{metadata.get('name')}",
                    found=f"the DeviceClass {name} and the device plugin both serve {resource}",
                )

    async def _api_version(self) -> str:
        asked = time.monotonic()
        async with self._finding:
            self._refuse(asked)
            try:
                return await self._version()
            except ApiServerSilent as error:
                self._note(error)
                raise

    async def _get(self, path: str) -> dict[str, Any]:
        """Read an object."""
        asked = time.monotonic()
        for attempt in range(_ATTEMPTS):
            try:
                async with self._waiting:
                    return await run_detached(partial(self._get_in_thread, path, asked))
            except ApiServerRefused as error:
                is_last = attempt + 1 == _ATTEMPTS
                if error.http != _BUSY or is_last or not 0 < error.retry_after <= _SOON:
                    raise
                await anyio.sleep(error.retry_after)
        raise AssertionError  # the last attempt returns or raises

    def _get_in_thread(self, path: str, asked: float) -> dict[str, Any]:
        self._refuse(asked)
        if not self._threads.acquire(blocking=False):
            raise ApiServerSilent(f"to GET {path}", found="earlier calls have no answer, either")
        try:
            return self._api.call("GET", path)
        except ApiServerSilent as error:
            if isinstance(error.__cause__, NestedTooDeeply):  # not the server's fault
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


def _is_for_extended_resource(found: Mapping[str, Any]) -> bool:
    annotations = (found.get("metadata") or {}).get("annotations") or {}
    return annotations.get(_EXTENDED) == "true"
