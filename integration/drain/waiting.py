"""Waiting until nobody holds what is out of service any more; by force, if it has to be.

Rules
- By force, containers are told to end by SIGTERM, by their names, each once; one that has not ended
  after the grace period is killed. It is done by the Kill of their shims, as containerd does it.
  One that appears meanwhile, because it was being made, is treated alike.
- Whatever is no container is never ended by us: a person is told how.
- The node agent is waited for only if it is to let go.
- The end of a process is heard (pidfd); whatever else changes is looked for every half second.

Source: containerd docs/runtime-v2.md (Kill); pidfd_open(2).
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import anyio

from api.errors import NvshimError
from integration.containers.bundles import Container
from integration.containers.shim_client import kill
from integration.drain.holders import AGENT, CONTAINER, MPS, Holder
from integration.timeouts import PATIENCE

_LOOK: Final = 0.5
_TO_ANSWER: Final = 5.0 * PATIENCE


def blocking(holders: Iterable[Holder], *, lets_go: bool) -> tuple[Holder, ...]:
    """Those who have to let go before it is free.

    Args:
        lets_go: whether the node agent is to.
    """
    return tuple(each for each in holders if lets_go or each.kind != AGENT)


def not_by_themselves(holders: Iterable[Holder]) -> tuple[Holder, ...]:
    """Those who do not let go by themselves when the node agent does."""
    return tuple(each for each in holders if each.kind not in {AGENT, MPS})


@dataclass
class Force:
    """Ends containers in order."""

    grace: float  # seconds from SIGTERM to SIGKILL
    say: Callable[[str], None]  # told in one line what is done
    _told: dict[str, float] = field(default_factory=dict)
    _killed: set[str] = field(default_factory=set)

    def end(self, holders: Iterable[Holder]) -> None:
        """Go on with those who still hold something."""
        now = time.monotonic()
        theirs = (each for each in holders if each.kind == CONTAINER and each.container)
        for holder in sorted(theirs, key=lambda each: each.name):
            container = holder.container
            assert container is not None  # noqa: S101 - they are containers
            bundle = container.bundle
            if bundle not in self._told:
                self._told[bundle] = now
                self._signal(holder, container, signal.SIGTERM)
            elif now - self._told[bundle] >= self.grace and bundle not in self._killed:
                self._killed.add(bundle)
                self._signal(holder, container, signal.SIGKILL)

    def due(self) -> float:
        """Seconds until somebody's grace is over; infinite if nobody's is."""
        left = (since for bundle, since in self._told.items() if bundle not in self._killed)
        return max(0.0, min(left, default=float("inf")) + self.grace - time.monotonic())

    def _signal(self, holder: Holder, container: Container, number: signal.Signals) -> None:
        self.say(f"{number.name} to {holder.name}")
        try:
            anyio.run(partial(kill, container, number, timeout=_TO_ANSWER))
        except (NvshimError, OSError) as error:
            # It may have ended by itself; if not, it is listed again.
            self.say(f"{holder.name}: {str(error) or 'no answer'}")


def wait_until_free(
    look: Callable[[], Sequence[Holder]],
    *,
    seconds: float,
    force: Force | None = None,
    changed: Callable[[Sequence[Holder]], None] = lambda _: None,
) -> Sequence[Holder]:
    """Wait until nobody holds it.

    Args:
        look: says who does now, of those who are waited for.
        seconds: to wait at most; infinite for as long as it takes.
        force: ends containers; None to leave them.
        changed: told of the holders whenever they are others than before.

    Returns:
        Who holds it still; nobody if it is free.
    """
    deadline = time.monotonic() + seconds
    before: Sequence[Holder] | None = None
    ended: set[int] = set()
    while holders := look():
        if holders != before:
            changed(holders)
            before = holders
        if force is not None:
            force.end(holders)
        left = deadline - time.monotonic()
        if left <= 0:
            break
        pause = min(_LOOK, left, _LOOK if force is None else force.due() or _LOOK)
        ended |= _wait_for_end({each.pid for each in holders} - ended - {0}, pause)
    return holders


def _wait_for_end(pids: Iterable[int], seconds: float) -> set[int]:
    """Wait until one of some processes ends, or the time is up.

    Returns:
        Those that have ended. They hold what they hold until they are reaped.
    """
    poll = select.poll()
    opened: dict[int, int] = {}
    try:
        for pid in pids:
            with suppress(OSError):  # it has ended, or there are too many open files
                fd = os.pidfd_open(pid)
                opened[fd] = pid
                poll.register(fd, select.POLLIN)
        return {opened[fd] for fd, _ in poll.poll(seconds * 1000)}
    finally:
        for fd in opened:
            os.close(fd)
