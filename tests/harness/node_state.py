"""Publishing to the node agent's state in place of its services."""

from __future__ import annotations

from copy import copy
from typing import Any, TypeVar

from integration.node.state.store import State
from integration.node.state.topic import Topic

T = TypeVar("T")


def publish(topic: Topic[T], value: T) -> None:
    """Publish a topic as the service that owns it."""
    topic.publisher(topic.owner).publish(value)


def with_values(state: State, **values: Any) -> State:
    """Return a copy of a state in which some topics have other values, by attribute."""
    copied = copy(state)
    for name, value in values.items():
        topic = copy(state.topics()[name])
        setattr(copied, name, topic)
        publish(topic, value)
    return copied
