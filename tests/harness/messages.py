"""Flatten messages, to compare them field by field."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from google.protobuf.message import Message


def flat(message: Message) -> dict[str, Any]:
    """Return all fields that are set in a message, by path: ".memory.usage.limit".

    A nested message that is set is "present", even if it is empty. A number that is zero is not
    set, since it is not sent.
    """
    return dict(_walk(message, ""))


def _walk(message: Message, path: str) -> Iterator[tuple[str, Any]]:
    for field, value in message.ListFields():
        name = f"{path}.{field.name}"
        items = [(name, value)]
        if field.is_repeated:
            items = [(f"{name}[{number}]", item) for number, item in enumerate(value)]
        for at, item in items:
            if field.message_type is None:
                yield at, item
            else:
                yield at, "present"
                yield from _walk(item, at)
