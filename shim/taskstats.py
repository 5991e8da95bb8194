"""How many processes of a cgroup run, sleep, are stopped or wait: a question to the kernel.

It is asked over generic netlink, of a kernel with CONFIG_TASKSTATS, about a directory of cgroup
version 1. The kernel answers before sendto(2) returns.

Source: kernel include/uapi/linux/cgroupstats.h, taskstats.h, genetlink.h, netlink.h;
Documentation/accounting/cgroupstats.rst.
"""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

_NETLINK_GENERIC: Final = 16
_NLM_F_REQUEST: Final = 1

_GENL_ID_CTRL: Final = 0x10
_CTRL_CMD_GETFAMILY: Final = 3
_CTRL_ATTR_FAMILY_ID: Final = 1
_CTRL_ATTR_FAMILY_NAME: Final = 2

_FAMILY: Final = b"TASKSTATS\0"
_CGROUPSTATS_CMD_GET: Final = 4
_CGROUPSTATS_CMD_ATTR_FD: Final = 1
_CGROUPSTATS_TYPE_CGROUP_STATS: Final = 1

_MESSAGE: Final = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_GENERIC: Final = struct.Struct("=BBH")  # command, version
_ATTRIBUTE: Final = struct.Struct("=HH")  # length, type
_COUNTS: Final = struct.Struct("=5Q")

# Seconds. The answer is there at once, or there is none.
_TIMEOUT: Final = 0.2


@dataclass(frozen=True, slots=True)
class Counts:
    """How many tasks are in which state, in the order of the kernel's struct."""

    nr_sleeping: int
    nr_running: int
    nr_stopped: int
    nr_uninterruptible: int
    nr_io_wait: int


def count_tasks(directory: str) -> Counts | None:
    """Ask the kernel about one cgroup.

    Args:
        directory: its directory in a hierarchy of version 1; those below are not counted.

    Returns:
        The counts; None if this kernel does not offer them, or not in this network namespace.
    """
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_GENERIC) as netlink:
            netlink.settimeout(_TIMEOUT)
            attribute = encode_attribute(_CTRL_ATTR_FAMILY_NAME, _FAMILY)
            answer = _ask(netlink, _GENL_ID_CTRL, _CTRL_CMD_GETFAMILY, attribute)
            (family,) = struct.unpack("=H", answer[_CTRL_ATTR_FAMILY_ID])
            fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                attribute = encode_attribute(_CGROUPSTATS_CMD_ATTR_FD, struct.pack("=I", fd))
                answer = _ask(netlink, family, _CGROUPSTATS_CMD_GET, attribute)
            finally:
                os.close(fd)
            return Counts(*_COUNTS.unpack_from(answer[_CGROUPSTATS_TYPE_CGROUP_STATS]))
    except (OSError, KeyError, struct.error):
        return None


def _ask(netlink: socket.socket, family: int, command: int, attribute: bytes) -> dict[int, bytes]:
    body = _GENERIC.pack(command, 1, 0) + attribute
    header = _MESSAGE.pack(_MESSAGE.size + len(body), family, _NLM_F_REQUEST, 0, 0)
    netlink.sendto(header + body, (0, 0))
    return decode_answer(netlink.recv(1 << 14), family)


def decode_answer(message: bytes, family: int) -> dict[int, bytes]:
    """The attributes of one message.

    Args:
        message: as the kernel sent it.
        family: of which kind it has to be; an error is of another.

    Returns:
        The attributes' values by their types.

    Raises:
        struct.error: it is too short to be one.
        KeyError: it is of another kind.
    """
    length, kind, _, _, _ = _MESSAGE.unpack_from(message)
    if kind != family:
        raise KeyError(kind)
    return dict(_attributes(message[_MESSAGE.size + _GENERIC.size : length]))


def encode_attribute(kind: int, value: bytes) -> bytes:
    """An attribute, padded to the four bytes that the next one is aligned to."""
    length = _ATTRIBUTE.size + len(value)
    return _ATTRIBUTE.pack(length, kind) + value + bytes(-length % 4)


def _attributes(text: bytes) -> Iterator[tuple[int, bytes]]:
    while len(text) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(text)
        if length < _ATTRIBUTE.size:
            return
        yield kind, text[_ATTRIBUTE.size : length]
        text = text[length + -length % 4 :]
