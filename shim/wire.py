"""The few protobuf messages of the verbs, read and written by hand.

Importing protobuf and its generated modules would cost three times as long as a whole verb.
What stands here is the wire format itself (varints and length-delimited fields) and five
messages; ``tests/unit/verbs`` compares every one with what protobuf makes of it.

Source: protobuf.dev/programming-guides/encoding; containerd api/runtime/bootstrap/v1,
api/runtime/task/v2, api/types/introspection.proto, api/types/runc/options.
"""

from __future__ import annotations

import os

from shim.errors import InvalidInvocation, RequestTooLarge

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Final

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_LONGEST_VARINT: Final = 10
_U64: Final = (1 << 64) - 1

# As much as containerd's own shim takes.
_LONGEST_REQUEST: Final = 10 << 20
_CHUNK: Final = 1 << 16

# LogLevel of BootstrapParams: DEBUG is -4, and what is below says even more.
_DEBUG: Final = -4


class BootstrapParams:
    """What a containerd from 2.3 on writes to ``start``.

    Attributes:
        instance_id: the container (or sandbox) to start a shim for.
        namespace: containerd's namespace.
        debug: whether the log level is debug or more.
        ttrpc_address: where events go.
        grpc_address: containerd's gRPC address.
        socket_dir: where the shim's socket is to be; empty leaves it to us.
        extensions: each an ``Any`` as (type URL, value), such as the runtime's options.
    """

    __slots__ = (
        "debug",
        "extensions",
        "grpc_address",
        "instance_id",
        "namespace",
        "socket_dir",
        "ttrpc_address",
    )

    def __init__(self) -> None:
        self.instance_id = ""
        self.namespace = ""
        self.debug = False
        self.ttrpc_address = ""
        self.grpc_address = ""
        self.socket_dir = ""
        self.extensions: list[tuple[str, bytes]] = []


def read_bootstrap(data: bytes, *, container_id: str, namespace: str) -> BootstrapParams | None:
    """Read stdin of ``start`` as BootstrapParams, if that is what it is.

    An older containerd writes the runtime's options there, as an ``Any``, which can decode as
    this message by accident. So it counts only if it names the container and the namespace
    that the flags name.

    Args:
        data: stdin.
        container_id: what flag ``-id`` says.
        namespace: what flag ``-namespace`` says.

    Returns:
        The message; None if this is an older containerd.

    Raises:
        InvalidInvocation: a path in it has a zero byte.
    """
    params = BootstrapParams()
    texts = {1: "instance_id", 2: "namespace", 5: "ttrpc_address", 6: "grpc_address"}
    texts[9] = "socket_dir"
    try:
        for number, value in fields(data):
            if number in texts:
                setattr(params, texts[number], _text(value))
            elif number == 3:  # noqa: PLR2004 - the field's number: log_level
                params.debug = _signed(value) <= _DEBUG
            elif number == 8:  # noqa: PLR2004 - the field's number: extensions
                params.extensions += [
                    read_any(_octets(v)) for n, v in fields(_octets(value)) if n == 1
                ]
    except ValueError:
        return None
    if (params.instance_id, params.namespace) != (container_id, namespace):
        return None
    for path in (params.ttrpc_address, params.grpc_address, params.socket_dir):
        if "\0" in path:
            raise InvalidInvocation(
                f"the path {path!r} in BootstrapParams", found="a zero byte", do="leave that out"
            )
    return params


def read_request(fd: int) -> bytes:
    """Read what containerd writes, to its end.

    Args:
        fd: stdin; it may be at its end already.

    Returns:
        The bytes; none if it cannot be read.

    Raises:
        RequestTooLarge: there are more than 10 MiB.
    """
    content = bytearray()
    try:
        while chunk := os.read(fd, _CHUNK):
            content += chunk
            if len(content) > _LONGEST_REQUEST:
                raise RequestTooLarge(
                    "to read the request from stdin",
                    found=f"more than {_LONGEST_REQUEST} bytes",
                    do="leave calling this program to containerd",
                )
    except OSError:
        return b""  # a directory, or a descriptor for writing: nobody's request
    return bytes(content)


def read_any(data: bytes) -> tuple[str, bytes]:
    """Read a ``google.protobuf.Any``.

    Args:
        data: the message.

    Returns:
        Its type URL and its value; both empty if ``data`` is.

    Raises:
        ValueError: it is no such message.
    """
    url, content = "", b""
    for number, value in fields(data):
        if number == 1:
            url = _text(value)
        elif number == 2:  # noqa: PLR2004 - the field's number: value
            content = _octets(value)
    return url, content


def read_text_field(data: bytes, wanted: int) -> str:
    """Read one string field of a message.

    Args:
        data: the message.
        wanted: the field's number.

    Returns:
        Its value; empty if it is not there.

    Raises:
        ValueError: it is no message, or the field is no string.
    """
    found = ""
    for number, value in fields(data):
        if number == wanted:
            found = _text(value)
    return found


def bootstrap_result(address: str) -> bytes:
    """The answer of ``start`` to a containerd that sent BootstrapParams.

    Args:
        address: where the shim listens, with its scheme.

    Returns:
        A BootstrapResult of version 3. It ends with the word "ttrpc": containerd 2.3.0 to
        2.3.3 strip white space from the answer before they decode it.
    """
    return _varint_field(1, 3) + _bytes_field(2, address.encode()) + _bytes_field(3, b"ttrpc")


def delete_response(pid: int, exit_status: int, exited_at: int) -> bytes:
    """The answer of ``delete``: a DeleteResponse, the same in task v2 and v3.

    Args:
        pid: the init process; 0 if it is not known.
        exit_status: as a shell would say it: 128 and the signal's number.
        exited_at: nanoseconds since the epoch.
    """
    seconds, nanoseconds = divmod(exited_at, 1_000_000_000)
    timestamp = _varint_field(1, seconds) + _varint_field(2, nanoseconds)
    return _varint_field(1, pid) + _varint_field(2, exit_status) + _bytes_field(3, timestamp)


def runtime_info(
    name: str, version: str, revision: str, *, options: bytes = b"", features: bytes = b""
) -> bytes:
    """The answer of ``-info``: a RuntimeInfo.

    Args:
        name: the runtime's name for containerd.
        version: ours.
        revision: the commit it was built from; may be empty.
        options: an ``Any`` with the options that were asked about, if there were any.
        features: an ``Any`` with what the low-level runtime can do, if that is known.
    """
    versions = _bytes_field(1, version.encode()) + _bytes_field(2, revision.encode())
    return b"".join(
        (
            _bytes_field(1, name.encode()),
            _bytes_field(2, versions),
            _bytes_field(3, options),
            _bytes_field(4, features),
        )
    )


def any_message(url: str, value: bytes) -> bytes:
    """A ``google.protobuf.Any``.

    Args:
        url: the type's URL.
        value: what it is.
    """
    return _bytes_field(1, url.encode()) + _bytes_field(2, value)


def fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Take a message apart.

    Args:
        data: the message.

    Yields:
        Each field's number and value: an int for the numeric kinds, bytes for the others.

    Raises:
        ValueError: it ends within a field, or has one of a kind that proto3 does not have.
    """
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, kind = key >> 3, key & 7
        if number == 0:
            message = "a field has no number"
            raise ValueError(message)
        value: int | bytes
        if kind == _VARINT:
            value, at = _varint(data, at)
            yield number, value
            continue
        if kind == _BYTES:
            length, at = _varint(data, at)
        elif kind in (_FIXED32, _FIXED64):
            length = 4 if kind == _FIXED32 else 8
        else:
            message = f"a field is of kind {kind}"
            raise ValueError(message)
        end = at + length
        if end > len(data):
            message = "the message ends within a field"
            raise ValueError(message)
        value = data[at:end]
        yield number, value if kind == _BYTES else int.from_bytes(value, "little")
        at = end


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for index, octet in enumerate(data[at : at + _LONGEST_VARINT]):
        value |= (octet & 0x7F) << (7 * index)
        if octet < 0x80:  # noqa: PLR2004 - the bit that says that more octets follow
            return value & _U64, at + index + 1
    message = "a number does not end"
    raise ValueError(message)


def _signed(value: int | bytes) -> int:
    if not isinstance(value, int):
        message = "a number was expected"
        raise ValueError(message)  # noqa: TRY004 - to the caller it is malformed data
    # An int32 below zero is written as 64 bits; only the lower 32 count.
    lower = value & 0xFFFFFFFF
    return lower - (1 << 32) if lower >> 31 else lower


def _octets(value: int | bytes) -> bytes:
    if isinstance(value, int):
        message = "a message or bytes were expected"
        raise ValueError(message)  # noqa: TRY004 - to the caller it is malformed data
    return value


def _text(value: int | bytes) -> str:
    return _octets(value).decode()  # UnicodeDecodeError is a ValueError


def _encode_varint(value: int) -> bytes:
    octets = bytearray()
    while value > 0x7F:  # noqa: PLR2004 - seven bits to an octet
        octets.append(value & 0x7F | 0x80)
        value >>= 7
    octets.append(value)
    return bytes(octets)


# proto3 leaves out what has its default value.


def _varint_field(number: int, value: int) -> bytes:
    return _encode_varint(number << 3 | _VARINT) + _encode_varint(value) if value else b""


def _bytes_field(number: int, value: bytes) -> bytes:
    return (
        _encode_varint(number << 3 | _BYTES) + _encode_varint(len(value)) + value if value else b""
    )
