"""Typed values that one service publishes and that others read and wait for.

::

    state.health.value                                   the value now
    state.health.publisher(ServiceName.HEALTH).publish(…)   only its owner can publish it
    async for value in state.health.changes(): …         the value now, then each newer one
    version = version_of(state.node, state.health)       wait for one of several topics
    await wait_any(state.node, state.health, since=version)

Rules
- A value is immutable and is replaced whole.
- A value that equals the previous one creates no new version and wakes no reader.
- A slow reader sees the newest value; it may miss those in between.
- Everything here belongs to one event loop, so nothing is locked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final, Generic, NoReturn, Self, TypeVar

import anyio

from integration.node.values.service_name import ServiceName

__all__ = [
    "Changes", "FaultTable", "Publisher", "Signal", "Topic", "Watched", "WrongPublisherError",
    "call_on_change", "version_of", "wait_any",
]  # fmt: skip

T = TypeVar("T")


class WrongPublisherError(TypeError):
    """A service asked to publish a topic that another one owns: an error in the code."""


class Watched:
    """Something that changes, and whose changes other tasks can wait for.

    Args:
        meaning: one line for the documentation.
    """

    def __init__(self, meaning: str) -> None:
        self.meaning: Final = meaning
        self._version = 0
        self._waiting: set[anyio.Event] = set()

    @property
    def version(self) -> int:
        """How often it has changed."""
        return self._version

    def wake(self, waiter: anyio.Event) -> None:
        """Set an event at the next change."""
        self._waiting.add(waiter)

    def forget(self, waiter: anyio.Event) -> None:
        """Stop waiting with that event."""
        self._waiting.discard(waiter)

    def _has_changed(self) -> None:
        self._version += 1
        waiting, self._waiting = self._waiting, set()
        for waiter in waiting:
            waiter.set()


class Topic(Watched, Generic[T]):
    """A value with one publisher.

    Args:
        value: the value until something is published.
        owner: the only service that may publish it.
        meaning: one line for the documentation.
        on_publish: called with each published value, even if it equals the previous one.
    """

    def __init__(
        self,
        value: T,
        owner: ServiceName,
        meaning: str,
        *,
        on_publish: Callable[[T], object] = lambda _: None,
    ) -> None:
        super().__init__(meaning)
        self.owner: Final = owner
        self._value = value
        self._on_publish = on_publish

    @property
    def value(self) -> T:
        """The value now."""
        return self._value

    def publisher(self, service: ServiceName) -> Publisher[T]:
        """Return the topic's publisher to the service that owns the topic.

        Raises:
            WrongPublisherError: another service owns it.
        """
        if service is not self.owner:
            raise WrongPublisherError(f"{self.owner} publishes this topic, {service} does not")
        return Publisher(self._set)

    def changes(self) -> Changes[T]:
        """Iterate over the value now, and each newer one as soon as it is published."""
        return Changes(self)

    def _set(self, value: T) -> None:
        before, self._value = self._value, value
        if before is not value and before != value:
            self._has_changed()
        self._on_publish(value)


class Publisher(Generic[T]):
    """Publishes one topic. Made by :meth:`Topic.publisher`."""

    def __init__(self, publish: Callable[[T], None]) -> None:
        self._publish = publish

    def publish(self, value: T) -> None:
        """Replace the topic's value and wake all waiters, if it differs."""
        self._publish(value)


class Changes(Generic[T]):
    """The values of a topic, from now on. Made by :meth:`Topic.changes`."""

    def __init__(self, topic: Topic[T]) -> None:
        self._topic = topic
        self._version = -1

    def __aiter__(self) -> Self:
        """Return the iterator itself."""
        return self

    async def __anext__(self) -> T:
        """Wait until the topic has a version that was not returned yet."""
        self._version = await wait_any(self._topic, since=self._version)
        return self._topic.value


class FaultTable(Watched):
    """The present faults of the agent, one line for each subject. Every service reports here."""

    def __init__(self, meaning: str) -> None:
        super().__init__(meaning)
        self._lines: Mapping[str, str] = {}

    @property
    def lines(self) -> Mapping[str, str]:
        """The present faults by subject ("plugin", "monitor.events"). Never changed in place."""
        return self._lines

    def report(self, subject: str, line: str) -> None:
        """Report what is wrong with a subject.

        Args:
            line: one line; "" once the fault is resolved.
        """
        if self._lines.get(subject, "") == line:
            return
        others = {name: known for name, known in self._lines.items() if name != subject}
        self._lines = {**others, subject: line} if line else others
        self._has_changed()

    def clear(self, prefix: str) -> None:
        """Remove the faults of all subjects that start with a prefix."""
        for subject in [name for name in self._lines if name.startswith(prefix)]:
            self.report(subject, "")


class Signal(Watched):
    """A request without a value, which every service may send."""

    def send(self) -> None:
        """Wake all waiters."""
        self._has_changed()


def version_of(*watched: Watched) -> int:
    """Return how often any of these has changed, for a later :func:`wait_any`."""
    return sum(each.version for each in watched)


async def wait_any(*watched: Watched, since: int, timeout: float = math.inf) -> int:
    """Wait until one of these has changed.

    Args:
        since: the last result of :func:`version_of` or of this function for them.
        timeout: the time limit in seconds.

    Returns:
        The current version; the same as ``since`` if the time is up.
    """
    if version_of(*watched) == since:
        waiter = anyio.Event()
        for each in watched:
            each.wake(waiter)
        try:
            with anyio.move_on_after(timeout):
                await waiter.wait()
        finally:
            for each in watched:
                each.forget(waiter)
    return version_of(*watched)


async def call_on_change(
    do: Callable[[], object], *watched: Watched, at_once: bool = False
) -> NoReturn:
    """Call a function whenever one of these has changed, until cancelled.

    Args:
        at_once: whether to call it once right away as well.
    """
    version = -1 if at_once else version_of(*watched)
    while True:
        version = await wait_any(*watched, since=version)
        do()
