"""Ask the node's container engine what it can do, and again whenever it has restarted.

Rules
- The query goes to the socket on which the engine serves the kubelet. The engine's configuration
  files do not count, since the engine may not have read them yet (:mod:`integration.cri.engine`).
- An engine creates a new socket when it starts, so its answer is valid while the sockets stay the
  same. An engine that does not answer is asked again at the next call. Callers that wait at the
  same time share one answer, since each claim waits for it.

Source: CRI v1 Version, Status.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import anyio

from integration.cri.client import Cri
from integration.cri.engine import Engine
from integration.cri.errors import CriError
from integration.detached import run_detached
from integration.kubelet.sockets import socket_identity

_TIMEOUT: Final = 2.0


class EngineQuery:
    """Asks the engine, and caches its answer.

    Args:
        sockets: the possible sockets of engines; the first that answers counts.
    """

    def __init__(self, sockets: Sequence[str]) -> None:
        self._sockets = tuple(sockets)
        self._queried: tuple[object, ...] | None = None
        self._engine: Engine | None = None
        self._answered = -math.inf
        self._lock = anyio.Lock()

    async def ask(self) -> Engine | None:
        """Return what the engine can do; None if no engine answers."""
        called = time.monotonic()
        async with self._lock:
            sockets = tuple(map(socket_identity, self._sockets))
            is_due = self._engine is None and self._answered <= called
            if is_due or sockets != self._queried:
                self._engine, self._queried = None, sockets
                for path, identity in zip(self._sockets, sockets, strict=True):
                    if identity is not None and self._engine is None:
                        self._engine = await run_detached(_ask, path)
                self._answered = time.monotonic()
            return self._engine


def _ask(path: str) -> Engine | None:
    with Cri(path) as cri, suppress(CriError):
        return cri.engine(timeout=_TIMEOUT)
    return None
