"""The engine of this node, as it says of itself: asked when it is another than the last time.

Rules
- It is asked on the socket on which it serves the kubelet, and not looked up in files, which it may
  not have read yet (:mod:`integration.cri.engine`).
- An engine that is started makes its socket anew, so what it has said holds as long as the sockets
  are the same ones. One that does not answer is asked again each time somebody needs to know.

Source: CRI v1 Version, Status.
"""

from __future__ import annotations

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


class EngineAsked:
    """What the engine has said.

    Args:
        sockets: where one may serve the kubelet; the first that answers is meant.
    """

    def __init__(self, sockets: Sequence[str]) -> None:
        self._sockets = tuple(sockets)
        self._asked_of: tuple[object, ...] | None = None
        self._engine: Engine | None = None
        self._asking = anyio.Lock()

    async def ask(self) -> Engine | None:
        """What it says now; None if none answers."""
        async with self._asking:
            sockets = tuple(map(socket_identity, self._sockets))
            if self._engine is None or sockets != self._asked_of:
                self._engine, self._asked_of = None, sockets
                for path, there in zip(self._sockets, sockets, strict=True):
                    if there is not None and self._engine is None:
                        self._engine = await run_detached(_ask, path)
            return self._engine


def _ask(path: str) -> Engine | None:
    with Cri(path) as cri, suppress(CriError):
        return cri.engine(timeout=_TIMEOUT)
    return None
