"""Wait until a device that is out of service has no holders; with force, stop its containers.

Rules
- Force sends each container SIGTERM once, in the order of their names, and SIGKILL after the grace
  period. SIGKILL is repeated at each check if the shim did not accept it. Signals go through the
  Kill call of the shims, as containerd's do. A container that appears during the wait is treated
  the same way.
- Only containers are stopped. For other holders, the answer says how to stop them.
- The wait includes the node agent only if the mark tells it to release the device.
- A pidfd reports the exit of a process; everything else is checked every half second.

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
    """Return the holders that must release the device before it is free.

    Args:
        lets_go: whether the node agent must release it, too.
    """
    return tuple(each for each in holders if lets_go or each.kind != AGENT)


def not_by_themselves(holders: Iterable[Holder]) -> tuple[Holder, ...]:
    """Return the holders that do not release the device when the node agent does."""
    return tuple(each for each in holders if each.kind not in {AGENT, MPS})


@dataclass
class Force:
    """Stops containers in order."""

    grace: float  # seconds from SIGTERM to SIGKILL
    say: Callable[[str], None]  # gets a line for each signal and each kind of failure, once
    _signalled: dict[str, float] = field(default_factory=dict)
    _killed: set[str] = field(default_factory=set)
    _said: set[tuple[str, str]] = field(default_factory=set)

    def end(self, holders: Iterable[Holder]) -> None:
        """Signal the remaining holders."""
        now = time.monotonic()
        theirs = (each for each in holders if each.kind == CONTAINER and each.container)
        for holder in sorted(theirs, key=lambda each: each.name):
            container = holder.container
            assert container is not None  # noqa: S101 - filtered above
            bundle = container.bundle
            if bundle not in self._signalled:
                self._signalled[bundle] = now
                self._signal(holder, container, signal.SIGTERM)
            elif (
                now - self._signalled[bundle] >= self.grace
                and bundle not in self._killed
                and self._signal(holder, container, signal.SIGKILL)
            ):
                self._killed.add(bundle)

    def due(self) -> float:
        """Return the seconds until a grace period ends; infinite without one."""
        left = (since for bundle, since in self._signalled.items() if bundle not in self._killed)
        return max(0.0, min(left, default=float("inf")) + self.grace - time.monotonic())

    def _signal(self, holder: Holder, container: Container, number: signal.Signals) -> bool:
        """Signal a container; return False if its shim did not accept the request."""
        self._say_once(container, f"{number.name} to {holder.name}")
        try:
            anyio.run(partial(kill, container, number, timeout=_TO_ANSWER))
        except (NvshimError, OSError) as error:
            # It may have exited by itself; otherwise the next look lists it again.
            self._say_once(container, f"{holder.name}: {str(error) or 'no answer'}")
            return False
        return True

    def _say_once(self, container: Container, line: str) -> None:
        if (container.bundle, line) not in self._said:
            self._said.add((container.bundle, line))
            self.say(line)


def wait_until_free(
    look: Callable[[], Sequence[Holder]],
    *,
    seconds: float,
    force: Force | None = None,
    changed: Callable[[Sequence[Holder]], None] = lambda _: None,
) -> Sequence[Holder]:
    """Wait until there are no holders.

    Args:
        look: returns the current holders to wait for.
        seconds: the time limit; it may be infinite.
        force: stops containers; None to leave them.
        changed: called with the holders whenever they change.

    Returns:
        The remaining holders.
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
    """Wait until a process exits, or the time is up.

    Returns:
        The processes that have exited. They still hold their devices until they are reaped.
    """
    poll = select.poll()
    opened: dict[int, int] = {}
    try:
        for pid in pids:
            with suppress(OSError):  # it was reaped, or there are too many open files
                fd = os.pidfd_open(pid)
                opened[fd] = pid
                poll.register(fd, select.POLLIN)
        return {opened[fd] for fd, _ in poll.poll(seconds * 1000)}
    finally:
        for fd in opened:
            os.close(fd)
