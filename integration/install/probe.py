"""The program that a self-test runs in its container: it ends, with a status that nobody else has.

It is an ELF file of some hundred bytes, made here, so that no image and no compiler are needed, and
so that it is for the machine that it is run on.

Source: elf(5), _exit(2); the kernel's tables of system calls.
"""

from __future__ import annotations

import os
import struct
from typing import Final

from shim.sandbox.errors import MachineUnsupported

STATUS: Final = 42
"""What it ends with."""

_ADDRESS: Final = 0x400000
_LARGEST_PAGE: Final = 0x10000
_HEADER: Final = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT: Final = struct.Struct("<IIQQQQQQ")
_LOAD: Final = 1
_READ, _EXECUTE = 4, 1

# The machine's number in an ELF header, and exit_group(42) in its code.
_MACHINES: Final = {
    "x86_64": (
        62,
        bytes.fromhex(
            "bf2a000000"  # mov edi, 42
            "b8e7000000"  # mov eax, 231
            "0f05"  # syscall
        ),
    ),
    "aarch64": (
        183,
        struct.pack(
            "<3I",
            0xD2800540,  # mov x0, #42
            0xD2800BC8,  # mov x8, #94
            0xD4000001,  # svc #0
        ),
    ),
}


def program(machine: str = "") -> bytes:
    """The program.

    Args:
        machine: an architecture as uname(2) names it; this machine's if not given.

    Raises:
        MachineUnsupported: there is no such program for it.
    """
    machine = machine or os.uname().machine
    try:
        number, code = _MACHINES[machine]
    except KeyError:
        raise MachineUnsupported(
            "a program for a self-test",
            found=f"a machine of type {machine}, and {', '.join(_MACHINES)} are known",
            do="install with --no-self-test",
        ) from None
    offset = _HEADER.size + _SEGMENT.size
    size = offset + len(code)
    header = _HEADER.pack(
        b"\x7fELF\x02\x01\x01",  # 64 bits, least significant byte first, version 1
        2,  # an executable
        number,
        1,
        _ADDRESS + offset,
        _HEADER.size,
        0,
        0,
        _HEADER.size,
        _SEGMENT.size,
        1,
        0,
        0,
        0,
    )
    load = _SEGMENT.pack(_LOAD, _READ | _EXECUTE, 0, _ADDRESS, _ADDRESS, size, size, _LARGEST_PAGE)
    return header + load + code
