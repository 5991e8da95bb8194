"""Ask the kubelet which devices its containers have (the pod-resources API, on a unix socket).

Rules
- A node need not have a kubelet. If no answer arrives in time, the result is "unknown", not "none".
- The agent keeps one connection, since connecting takes longer than the answer. A kubelet creates a
  new socket when it starts, so a new socket requires a new connection.
- If a connection fails, it is replaced once per question: gRPC would wait before it reconnects, and
  the kubelet may have started in the meantime. A connection that is merely slow is kept.

Source: Kubernetes, staging/src/k8s.io/kubelet/pkg/apis/podresources/v1.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from integration.kubelet.sockets import socket_identity
from integration.kubelet.values import Allocated, Claimed

if TYPE_CHECKING:  # it imports gRPC, which only a query needs
    from integration.kubelet.pod_resources_client import Listed, Lister

__all__ = ["PodResources"]

_TIMEOUT: Final = 2.0  # seconds, for the agent, which asks again
_ATTEMPTS: Final = 2


class PodResources:
    """The client, for use in one event loop."""

    def __init__(self) -> None:
        self._lister: Lister | None = None
        self._connected_to: object = None

    async def allocated(self, path: str, timeout: float = _TIMEOUT) -> Allocated | None:
        """Return the devices that device plugins gave to containers.

        Args:
            path: the path of the socket; "" for none.
            timeout: the time limit in seconds.

        Returns:
            The devices; None if no kubelet answers in time.
        """
        listed = await self._list(path, timeout)
        return None if listed is None else listed.allocated

    async def claims(self, path: str, timeout: float = _TIMEOUT) -> tuple[Claimed, ...] | None:
        """Return the devices of resource claims, as :meth:`allocated` does for device plugins."""
        listed = await self._list(path, timeout)
        return None if listed is None else listed.claims

    async def _list(self, path: str, timeout: float) -> Listed | None:
        until = time.monotonic() + timeout
        for _ in range(_ATTEMPTS):
            which = socket_identity(path) if path else None
            if which is None:
                break
            lister = await self._to(path, which)
            listed = await lister.ask(max(0.0, until - time.monotonic()))
            if not lister.is_lost:
                return listed
        await self.aclose()
        return None

    async def aclose(self) -> None:
        """Close the connection; the next question opens a new one."""
        lister, self._lister = self._lister, None
        if lister is not None:
            await lister.close()

    async def _to(self, path: str, which: object) -> Lister:
        """Return a connection to the present socket."""
        before, connected_to = self._lister, (path, which)
        if before is not None and not before.is_lost and self._connected_to == connected_to:
            return before
        # A node without a kubelet need not import gRPC.
        from integration.kubelet.pod_resources_client import Lister  # noqa: PLC0415

        lister = self._lister = Lister(path)
        self._connected_to = connected_to
        if before is not None:
            await before.close()
        return lister
