"""Ask the node's container engine what it can do, and again whenever it restarts.

Rules
- The query goes to the socket on which the engine serves the kubelet. The engine's configuration
  files do not count, since the engine may not have read them yet (:mod:`integration.cri.engine`).
- An engine creates a new socket when it starts, so its answer is valid while the sockets stay the
  same. inotify reports a new socket.
- An engine creates its socket before it can answer, so it is asked again after a pause. If there is
  no socket, no engine is asked. While an engine restarts, its last answer is kept, but is marked as
  no longer valid.

Source: CRI v1 Version, Status.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, NoReturn

from api.values import dataclass
from integration.backoff import Backoff
from integration.cri.engine import Engine
from integration.detached import run_detached
from integration.kubelet.sockets import socket_identity
from integration.node.state.topic import Signal, wait_any
from integration.watcher import Interest, Watcher, first_of

_TIMEOUT: Final = 2.0  # seconds
_FIRST_PAUSE: Final = 0.25  # seconds until an engine that does not answer is asked again
# Once the pause is this long, in seconds, an engine that answered before counts as gone.
_RESTART: Final = 4.0


@dataclass(frozen=True, slots=True)
class EngineAnswer:
    """What the engine can do, and the sockets that existed when it was asked."""

    engine: Engine | None = None  # None if none has answered
    sockets: tuple[tuple[str, object], ...] = ()  # their paths and identities

    @property
    def holds(self) -> bool:
        """Whether those sockets are still the same: no engine has restarted."""
        return all(socket_identity(path) == identity for path, identity in self.sockets)


async def watch_engine(
    sockets: Sequence[str], publish: Callable[[EngineAnswer], None], doubt: Signal
) -> NoReturn:
    """Publish what the engine can do, now and whenever that may have changed.

    Args:
        sockets: the possible sockets of engines; the first that answers counts.
        publish: called with each answer.
        doubt: set to have the sockets checked again.
    """
    places: dict[str, set[str]] = {}
    for path in sockets:
        places.setdefault(os.path.dirname(path), set()).add(os.path.basename(path))
    wanted = {place: Interest(frozenset(names), content=False) for place, names in places.items()}
    answer: EngineAnswer | None = None
    seen, backoff = _identities(sockets), Backoff(_FIRST_PAUSE)
    with Watcher(quiet=0) as watcher:
        while True:
            version = doubt.version
            watcher.follow(wanted)  # before the look, which then misses no change
            found, pause = _identities(sockets), math.inf
            if found != seen:
                seen, backoff = found, Backoff(_FIRST_PAUSE)
            if answer is None or answer.engine is None or found != answer.sockets:
                engine = await run_detached(_ask, [path for path, _ in found])
                pause = backoff.pause() if engine is None else math.inf
                if answer is None or engine is not None or pause >= _RESTART:
                    answer = EngineAnswer(engine, found)
                    publish(answer)
            if answer.engine is None and not found and not watcher.deaf:
                pause = math.inf
            await first_of(partial(watcher.wait, pause), partial(wait_any, doubt, since=version))


def _identities(sockets: Sequence[str]) -> tuple[tuple[str, object], ...]:
    """Return the paths and identities of the sockets that exist."""
    found = ((path, socket_identity(path)) for path in sockets)
    return tuple((path, identity) for path, identity in found if identity is not None)


def _ask(sockets: Sequence[str]) -> Engine | None:
    """Return what the first engine that answers can do; None if none answers."""
    from integration.cri.client import Cri  # noqa: PLC0415 - it loads gRPC
    from integration.cri.errors import CriError  # noqa: PLC0415 - the same

    for path in sockets:
        with Cri(path) as cri, suppress(CriError):
            return cri.engine(timeout=_TIMEOUT)
    return None
