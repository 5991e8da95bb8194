"""Wait for events in other processes, with a timeout and a description for the failure."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

import anyio

from integration.timeouts import PATIENCE

# Between two looks: a tenth of the time that has been waited. Looks can cost much, and others work
# for what is awaited.
_FIRST: Final = 0.01
_LONGEST: Final = 0.1

S = TypeVar("S")
T = TypeVar("T")


def eventually(look: Callable[[], T], what: str, *, timeout: float = 60.0) -> T:
    """Poll until a function returns something true.

    Args:
        look: returns something true once the event has happened.
        what: the expected event, for the failure's message.
        timeout: seconds to wait at most, on a machine that is not slow.

    Returns:
        What ``look`` returned.

    Raises:
        AssertionError: it did not happen in time.
    """
    timeout *= PATIENCE
    began = time.monotonic()
    while not (seen := look()):
        if time.monotonic() > began + timeout:
            raise AssertionError(f"{what}: not within {timeout:g} s; last seen: {seen!r}")
        time.sleep(_pause(began))
    return seen


async def until(look: Callable[[], T], what: str = "it", *, timeout: float = 60.0) -> T:
    """As :func:`eventually`, but asynchronous."""
    began = time.monotonic()
    with anyio.move_on_after(timeout * PATIENCE):
        while not (seen := look()):  # noqa: ASYNC110 - what others do is looked at from outside
            await anyio.sleep(_pause(began))
        return seen
    raise AssertionError(f"{what}: not within {timeout * PATIENCE:g} s; last seen: {look()!r}")


def at_once(do: Callable[[S], T], of: Iterable[S]) -> list[T]:
    """Call a function with all values in parallel; return the results in the order of those."""
    each = list(of)
    with ThreadPoolExecutor(len(each)) as executor:
        return list(executor.map(do, each))


def settled(look: Callable[[], T], expected: object, *, timeout: float = 60.0) -> T:
    """Poll until a function returns the expected value or time is up; return the last value.

    For an assertion, which shows the difference.

    Args:
        look: returns the current value.
        expected: the expected value.
        timeout: seconds to wait at most, on a machine that is not slow.
    """
    began = time.monotonic()
    while (seen := look()) != expected and time.monotonic() < began + timeout * PATIENCE:
        time.sleep(_pause(began))
    return seen


def _pause(began: float) -> float:
    return min(max(_FIRST, (time.monotonic() - began) / 10), _LONGEST)
