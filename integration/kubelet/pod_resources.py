"""What the kubelet says that it has given to whom: its pod-resources API, on a unix socket.

Rules
- It is asked, and not believed to be there: a node need not have one. Without an answer in time
  nothing is concluded from it.
- The whole agent has one connection, and keeps it: to make one takes longer than the answer does.
  A kubelet that begins makes its socket anew, so by that it is known to be another.
- A connection that has failed is made anew, once for each question: gRPC would wait before it tries
  again, and the kubelet may have begun meanwhile. One that is slow is kept.

Source: Kubernetes, staging/src/k8s.io/kubelet/pkg/apis/podresources/v1.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from integration.kubelet.sockets import socket_identity

if TYPE_CHECKING:
    from integration.kubelet.pod_resources_client import Listed, Lister
    from integration.kubelet.values import Allocated, Claimed

__all__ = ["PodResources"]

_TIMEOUT: Final = 2.0  # seconds, for the agent, which asks again
_ATTEMPTS: Final = 2


class PodResources:
    """Who asks. For one event loop."""

    def __init__(self) -> None:
        self._lister: Lister | None = None
        self._leads_to: object = None

    async def allocated(self, path: str, timeout: float = _TIMEOUT) -> Allocated | None:
        """What the kubelet has given to the containers that it knows.

        Args:
            path: of its socket; "" for none.
            timeout: seconds that it may take.

        Returns:
            It; None if there is no kubelet that answers in time.
        """
        listed = await self._list(path, timeout)
        return None if listed is None else listed.allocated

    async def claims(self, path: str, timeout: float = _TIMEOUT) -> tuple[Claimed, ...] | None:
        """What containers have by resource claims; the rest as :meth:`allocated` has it."""
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
        """Close the connection; the next question has a new one."""
        lister, self._lister = self._lister, None
        if lister is not None:
            await lister.close()

    async def _to(self, path: str, which: object) -> Lister:
        """The connection to the socket that is there now."""
        before, leads_to = self._lister, (path, which)
        if before is not None and not before.is_lost and self._leads_to == leads_to:
            return before
        # gRPC: a node without a kubelet does not pay for it.
        from integration.kubelet.pod_resources_client import Lister  # noqa: PLC0415

        lister = self._lister = Lister(path)
        self._leads_to = leads_to
        if before is not None:
            await before.close()
        return lister
