"""The program that holds a pod's namespaces. It sleeps, and cannot do anything else.

A pod's containers join namespaces by the path /proc/PID/ns/…, which needs a process. In a shared
pid namespace it is their process 1: a container can inspect it like its own processes, and with
CAP_SYS_PTRACE even control it. So it is not a Python fork with a copy of the shim's memory, but a
generated program of some two hundred bytes:

- It calls ppoll(2) without descriptors and without a timeout, for ever. It has no libraries, no
  data and no heap.
- It is executed with SIGCHLD ignored, so the kernel itself reaps the orphans that process 1 of a
  pid namespace inherits. See wait(2).
- A filter forbids all system calls except its own, those that start and end a process, and the
  ``write`` that reports a failed start. An attacker who controls it gains nothing.

Source: elf(5), seccomp(2), ppoll(2); kernel Documentation/userspace-api/seccomp_filter.rst; the
kernel's tables of system calls and linux/audit.h; Intel's and Arm's manuals for the code.
"""

from __future__ import annotations

import os
import struct
from typing import Final

from api.values import dataclass
from shim.sandbox.errors import MachineUnsupported

# Its name in its root, and so in ``ps``.
NAME: Final = "sandbox"

_ADDRESS: Final = 0x400000
_LARGEST_PAGE: Final = 0x10000
_HEADER: Final = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT: Final = struct.Struct("<IIQQQQQQ")
_LOAD, _GNU_STACK = 1, 0x6474E551
_READ, _WRITE, _EXECUTE = 4, 2, 1

_INSTRUCTION: Final = struct.Struct("=HBBI")
_LOAD_WORD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
# Offsets in struct seccomp_data.
_NUMBER_OF_CALL, _ARCHITECTURE = 0, 4
_ALLOW: Final = 0x7FFF0000
_ERRNO_EPERM: Final = 0x00050001


@dataclass(frozen=True, slots=True)
class Machine:
    """The program's parts on one architecture."""

    elf: int  # its number in an ELF header
    audit: int  # its number in the filter
    code: bytes  # ``ppoll(NULL, 0, NULL, NULL, 0)``, over and over
    # the numbers of allowed system calls: rt_sigreturn, restart_syscall, ppoll, execve, write,
    # exit_group
    calls: tuple[int, ...]


MACHINES: Final = {
    "x86_64": Machine(
        elf=62,
        audit=0xC000003E,
        code=bytes.fromhex(
            "31ff"  # xor edi, edi
            "31f6"  # xor esi, esi
            "31d2"  # xor edx, edx
            "4531d2"  # xor r10d, r10d
            "4531c0"  # xor r8d, r8d
            "b80f010000"  # mov eax, 271
            "0f05"  # syscall
            "ebeb"  # jmp to the first
        ),
        calls=(15, 219, 271, 59, 1, 231),
    ),
    "aarch64": Machine(
        elf=183,
        audit=0xC00000B7,
        code=struct.pack(
            "<8I",
            0xD2800000,  # mov x0, #0
            0xD2800001,  # mov x1, #0
            0xD2800002,  # mov x2, #0
            0xD2800003,  # mov x3, #0
            0xD2800004,  # mov x4, #0
            0xD2800928,  # mov x8, #73
            0xD4000001,  # svc #0
            0x17FFFFF9,  # b to the first
        ),
        calls=(139, 128, 73, 221, 64, 94),
    ),
}


def machine(name: str = "") -> Machine:
    """Return the parts of the program for an architecture.

    Args:
        name: the name from uname(2); "" for this machine's.

    Raises:
        MachineUnsupported: there is no program for this architecture.
    """
    name = name or os.uname().machine
    try:
        return MACHINES[name]
    except KeyError:
        raise MachineUnsupported(
            "a sandbox that the shim holds",
            found=f"a machine of type {name}, and {', '.join(MACHINES)} are known",
            do='use sandboxer = "podsandbox" for this runtime',
        ) from None


def program(of: Machine) -> bytes:
    """Return the program for a machine, as an ELF file."""
    code_offset = _HEADER.size + 2 * _SEGMENT.size
    size = code_offset + len(of.code)
    header = _HEADER.pack(
        b"\x7fELF\x02\x01\x01",  # 64 bits, least significant byte first, version 1
        2,  # an executable
        of.elf,
        1,
        _ADDRESS + code_offset,
        _HEADER.size,
        0,
        0,
        _HEADER.size,
        _SEGMENT.size,
        2,
        0,
        0,
        0,
    )
    load = _SEGMENT.pack(_LOAD, _READ | _EXECUTE, 0, _ADDRESS, _ADDRESS, size, size, _LARGEST_PAGE)
    stack = _SEGMENT.pack(_GNU_STACK, _READ | _WRITE, 0, 0, 0, 0, 0, 16)
    return header + load + stack + of.code


def system_call_filter(of: Machine) -> bytes:
    """Return the filter of its system calls, as an array of ``struct sock_filter``.

    Other calls fail with EPERM.
    """
    count = len(of.calls)
    instructions = [
        (_LOAD_WORD, 0, 0, _ARCHITECTURE),
        (_JUMP_IF_EQUAL, 0, count + 1, of.audit),
        (_LOAD_WORD, 0, 0, _NUMBER_OF_CALL),
        # Jump over the other allowed calls, and over the refusal.
        *((_JUMP_IF_EQUAL, count - i, 0, call) for i, call in enumerate(of.calls)),
        (_RETURN, 0, 0, _ERRNO_EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(_INSTRUCTION.pack(*each) for each in instructions)
