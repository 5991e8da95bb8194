"""One run of one machine: boot, run the job, and return its exit code.

The job is a shell script that runs as root once the guest is up. Its output arrives over the serial
console, and is passed on at once.

Source: qemu(1); isa-debug-exit (hw/misc/debugexit.c): the emulator exits with (code << 1) | 1.
"""

from __future__ import annotations

import os
import select
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from typing import BinaryIO, Final

from tools.errors import MachineFailed, MachineTimeout
from tools.vm import tools
from tools.vm.guest import TARGET, Guest

_CPUS: Final = 2
_MEMORY_MIB: Final = 1024

# Never "kvm": it may hang in a nested machine, and times would not be comparable.
_ACCELERATOR: Final = "tcg,thread=multi,tb-size=512"

# cgroup v1 without a v2 hierarchy next to it, in which crun 1.8 creates no cgroup.
_COMMAND_LINE: Final = (
    "console=ttyS0 quiet panic=-1 root=/dev/vda rootfstype=ext4 rw fsck.mode=skip"
    " systemd.unified_cgroup_hierarchy={unified} systemd.legacy_systemd_cgroup_controller=1"
    " systemd.show_status=0 mitigations=off"
    f" random.trust_cpu=on net.ifnames=0 audit=0 systemd.unit={TARGET}"
)

CGROUPS: Final = (1, 2)
"""Versions of cgroups that a guest can have; the newest is its default."""

_SHARED: Final = "security_model=none,multidevs=remap,readonly=on"

# The offset that job.sh adds to the job's exit code.
_OFFSET: Final = 16


def run(
    guest: Guest,
    job: str,
    *,
    shares: Sequence[str],
    out: BinaryIO,
    timeout: float,
    cgroups: int = CGROUPS[-1],
) -> int:
    """Boot a machine and run a job in it.

    Args:
        shares: directories of the host that the guest sees at the same paths, read-only.
        out: gets the console's output at once.
        timeout: seconds for the whole run.
        cgroups: one of :data:`CGROUPS`.

    Returns:
        The exit code of the job; 100 for all above that.

    Raises:
        ToolMissing: the emulator is not installed.
        MachineTimeout: it took too long. The machine is killed.
        MachineFailed: the machine stopped before its job finished.
    """
    with tempfile.TemporaryDirectory(prefix="nvshim-job-") as directory:
        _write(directory, "shares", "".join(f"{_tag(i)} {p}\n" for i, p in enumerate(shares)))
        _write(directory, "run", job)
        exported = [(directory, "job"), *((path, _tag(i)) for i, path in enumerate(shares))]
        process = subprocess.Popen(
            command(guest, exported, cgroups),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # Only this process gets a Ctrl-C at the terminal, and then kills the machine.
            start_new_session=True,
        )
        try:
            last = _relay(process, out, time.monotonic() + timeout)
            if last is None:
                raise MachineTimeout(
                    f"a job in {guest.release} within {timeout:g} s", found="it still runs"
                )
            code = process.wait()
        finally:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
    if code < (_OFFSET << 1 | 1) or not code & 1:
        raise MachineFailed(
            f"a job in {guest.release}",
            found=f"the emulator exited with {code}; its last line: {last}",
        )
    return (code >> 1) - _OFFSET


def command(
    guest: Guest, exported: Sequence[tuple[str, str]], cgroups: int = CGROUPS[-1]
) -> list[str]:
    """Return the command line of the emulator.

    Args:
        exported: directories of the host, and the tags under which the guest mounts them.
        cgroups: the same as for :func:`run`.
    """
    virtfs = []
    for path, tag in exported:
        virtfs += ["-virtfs", f"local,path={_escape(path)},mount_tag={tag},{_SHARED}"]
    return [
        # The machine is killed when its parent exits in any way.
        tools.find("setpriv"), "--pdeathsig", "KILL",
        tools.find("qemu-system-x86_64"),
        "-machine", "pc-q35-7.2", "-accel", _ACCELERATOR, "-cpu", "max",
        "-smp", str(_CPUS), "-m", str(_MEMORY_MIB),
        "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
        "-chardev", "stdio,id=console,signal=off", "-serial", "chardev:console",
        "-device", "isa-debug-exit,iobase=0xf4,iosize=0x04",
        "-kernel", guest.boots("vmlinuz"), "-initrd", guest.boots("initrd.img"),
        "-drive", f"file={_escape(guest.disk)},format=raw,snapshot=on,if=none,id=d0,cache=unsafe",
        "-device", "virtio-blk-pci,drive=d0",
        *virtfs,
        "-append", _COMMAND_LINE.format(unified=cgroups - 1),
    ]  # fmt: skip


def _relay(process: subprocess.Popen[bytes], out: BinaryIO, deadline: float) -> str | None:
    """Copy the console until it closes; return its last lines, or None if time is up."""
    if process.stdout is None:
        return ""
    descriptor = process.stdout.fileno()
    last: deque[bytes] = deque(maxlen=5)
    while (left := deadline - time.monotonic()) > 0:
        ready, _, _ = select.select([descriptor], [], [], left)
        if not ready:
            break
        data = os.read(descriptor, 1 << 16)
        if not data:
            return b" ".join(last).decode(errors="replace")
        data = data.replace(b"\r", b"")
        last += [line for line in data.split(b"\n") if line.strip()]
        out.write(data)
        out.flush()
    return None


def _tag(number: int) -> str:
    return f"share{number}"


def _escape(path: str) -> str:
    """Return a path as a value of the emulator's options."""
    return path.replace(",", ",,")


def _write(directory: str, name: str, text: str) -> None:
    with open(os.path.join(directory, name), "w", encoding="utf-8") as file:
        file.write(text)
