"""The machine code of the program that holds namespaces, and its seccomp filter."""

from __future__ import annotations

import os
import shutil
import signal
import struct
import subprocess
import time
from pathlib import Path
from typing import Final

import pytest

from shim.sandbox import holder
from shim.sandbox.errors import MachineUnsupported
from tests.harness.raising import raises
from tests.harness.waiting import eventually

_ALLOW: Final = 0x7FFF0000
_EPERM: Final = 0x00050001

# The numbers of the system calls, from the kernel's tables.
_SYSTEM_CALLS: Final = {
    "x86_64": {"write": 1, "rt_sigreturn": 15, "execve": 59, "restart_syscall": 219,
               "exit_group": 231, "ppoll": 271},
    "aarch64": {"write": 64, "ppoll": 73, "exit_group": 94, "restart_syscall": 128,
                "rt_sigreturn": 139, "execve": 221},
}  # fmt: skip


def _judge(instructions: bytes, architecture: int, call: int) -> int:
    """Interpret a seccomp filter as the kernel does, for the instructions that ours uses."""
    program = list(struct.iter_unpack("=HBBI", instructions))
    data = {0: call, 4: architecture}
    accumulator = position = 0
    while True:
        code, if_true, if_false, value = program[position]
        position += 1
        if code == 0x20:
            accumulator = data[value]
        elif code == 0x15:
            position += if_true if accumulator == value else if_false
        else:
            assert code == 0x06
            return int(value)


@pytest.mark.parametrize("name", sorted(holder.MACHINES))
def test_the_filter_lets_through_what_it_needs_and_nothing_else(name: str) -> None:
    machine = holder.MACHINES[name]
    instructions = holder.system_call_filter(machine)
    allowed = {n for n in range(1024) if _judge(instructions, machine.audit, n) == _ALLOW}
    assert allowed == set(_SYSTEM_CALLS[name].values())
    assert _judge(instructions, machine.audit, 1023) == _EPERM
    # The same numbers on another architecture, or in the x32 table.
    foreign = 0x40000003
    assert {_judge(instructions, foreign, n) for n in allowed} == {_EPERM}
    assert {_judge(instructions, machine.audit, n | 0x40000000) for n in allowed} == {_EPERM}


@pytest.mark.parametrize("name", sorted(holder.MACHINES))
def test_the_program_is_an_elf_file_with_its_code_at_its_entry(name: str) -> None:
    machine = holder.MACHINES[name]
    program = holder.program(machine)
    kind, elf, _, entry, segments = struct.unpack_from("<HHIQQ", program, 16)
    assert (kind, elf, segments) == (2, machine.elf, 64)
    load = struct.unpack_from("<IIQQQQQQ", program, segments)
    assert load[:3] == (1, 5, 0)
    assert load[5] == load[6] == len(program)
    assert load[3] % load[7] == 0
    assert program[entry - load[3] :] == machine.code
    stack = struct.unpack_from("<II", program, segments + 56)
    assert stack == (0x6474E551, 6)  # not executable


def test_an_unknown_machine_is_refused() -> None:
    with raises(MachineUnsupported, match="riscv64"):
        holder.machine("riscv64")


@pytest.mark.skipif(os.uname().machine not in holder.MACHINES, reason="not of this machine")
def test_the_program_runs_sleeps_and_ends_when_killed(tmp_path: Path) -> None:
    _check_run([_written(tmp_path, holder.machine())])


@pytest.mark.skipif(not shutil.which("qemu-aarch64-static"), reason="needs qemu-user-static")
def test_the_program_of_the_other_machine_runs_in_an_emulator(tmp_path: Path) -> None:
    path = _written(tmp_path, holder.MACHINES["aarch64"])
    _check_run(["qemu-aarch64-static", path])


def _written(directory: Path, machine: holder.Machine) -> str:
    path = directory / holder.NAME
    path.write_bytes(holder.program(machine))
    path.chmod(0o111)
    return str(path)


def _check_run(argv: list[str]) -> None:
    with subprocess.Popen(argv, env={}) as process:
        try:

            def state() -> str:
                with open(f"/proc/{process.pid}/stat", encoding="utf-8") as file:
                    return file.read().rpartition(")")[2].split()[0]

            eventually(lambda: state() == "S", "it sleeps")
            process.send_signal(signal.SIGSTOP)
            eventually(lambda: state() == "T", "it is stopped")
            process.send_signal(signal.SIGCONT)
            time.sleep(0.1)
            assert state() == "S"
        finally:
            process.kill()
    assert process.returncode == -signal.SIGKILL
