"""``Any`` in containerd's form.

Rules
- A protobuf message is identified by its bare full name, ``containerd.events.TaskExit``. Python's
  own ``Any.Pack`` would write ``type.googleapis.com/containerd.events.TaskExit``, which containerd
  does not know. Readers accept both forms.
- Some values are not protobuf but JSON with a separate URL, such as the OCI spec of an exec: see
  the constants.

Source: containerd's typeurl package; its registrations in containerd's oci and runtime packages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, TypeVar

from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import DecodeError, Message

from api.ttrpc.errors import TypeMismatch

M = TypeVar("M", bound=Message)

__all__ = [
    "LINUX_RESOURCES",
    "PROCESS",
    "SPEC",
    "full_name",
    "is_json",
    "pack",
    "pack_json",
    "unpack",
    "unpack_json",
]

# The prefix of all JSON-typed values of the OCI runtime spec; "1" is its major version.
_JSON_PREFIX: Final = "types.containerd.io/opencontainers/runtime-spec/1/"
SPEC: Final = _JSON_PREFIX + "Spec"
PROCESS: Final = _JSON_PREFIX + "Process"
LINUX_RESOURCES: Final = _JSON_PREFIX + "LinuxResources"


def pack(message: Message, *, url: str | None = None) -> AnyMessage:
    """Pack a message as ``Any``.

    Args:
        message: the message to pack.
        url: the type URL; the message's bare full name by default.

    Returns:
        The ``Any``.
    """
    type_url = message.DESCRIPTOR.full_name if url is None else url
    return AnyMessage(type_url=type_url, value=message.SerializeToString())


def pack_json(value: Mapping[str, Any], url: str) -> AnyMessage:
    """Pack a JSON-typed value as ``Any``.

    Args:
        value: the value to pack.
        url: its type URL, for example :data:`PROCESS`.

    Returns:
        The ``Any``.
    """
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    return AnyMessage(type_url=url, value=text.encode())


def full_name(packed: AnyMessage) -> str:
    """Return the name of the type in an ``Any``, without any prefix.

    Args:
        packed: any ``Any``.

    Returns:
        For a message its full name; for a JSON-typed value the whole URL, since its last part alone
        is ambiguous.
    """
    url = packed.type_url
    return url if is_json(packed) else url.rpartition("/")[2]


def is_json(packed: AnyMessage) -> bool:
    """Whether an ``Any`` holds a JSON-typed value of the OCI runtime spec."""
    return packed.type_url.startswith(_JSON_PREFIX)


def unpack(packed: AnyMessage, type_: type[M]) -> M:
    """Unpack the message in an ``Any``.

    Args:
        packed: an ``Any`` with a bare type URL or one with a prefix (``type.googleapis.com/``).
        type_: the expected type.

    Returns:
        The message.

    Raises:
        TypeMismatch: it contains another type, or malformed bytes.
    """
    wanted = type_.DESCRIPTOR.full_name
    if full_name(packed) != wanted:
        raise TypeMismatch(
            f"a value of type {wanted}", found=f"type {packed.type_url or 'unnamed'}"
        )
    try:
        return type_.FromString(packed.value)
    except DecodeError:
        raise TypeMismatch(
            f"a value of type {wanted}", found=f"{len(packed.value)} bytes that are none"
        ) from None


def unpack_json(packed: AnyMessage, *urls: str) -> dict[str, Any]:
    """Unpack the JSON object in a JSON-typed ``Any``.

    Args:
        packed: the ``Any`` as received.
        urls: the accepted type URLs; all of the OCI runtime spec's by default.

    Returns:
        The object, with all its fields.

    Raises:
        TypeMismatch: it contains another type, or is not a JSON object.
    """
    wanted = " or ".join(urls) or f"{_JSON_PREFIX}*"
    if packed.type_url not in urls if urls else not is_json(packed):
        raise TypeMismatch(
            f"a JSON value of type {wanted}", found=f"type {packed.type_url or 'unnamed'}"
        )
    try:
        value = json.loads(packed.value)
    except (ValueError, RecursionError) as error:
        raise TypeMismatch(
            f"a JSON value of type {wanted}", found=f"not valid JSON: {error}"
        ) from None
    if not isinstance(value, dict):
        raise TypeMismatch(
            f"a JSON value of type {wanted}", found=f"a JSON {type(value).__name__}, no object"
        )
    return value
