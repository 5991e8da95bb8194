"""Xids in the kernel's log, as drivers write them and as a container would forge them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from integration.agent_errors import KernelLogUnusable
from integration.node.faults.sxids import parse_switch_error
from integration.node.services.monitor.kernel_log import follow
from integration.nvml.values import SwitchError
from shim.causes.kernel_log import LoggedXid, parse_record

if TYPE_CHECKING:
    from pathlib import Path

    from integration.nvml.values import GpuEvent

HEAD = "4,339,5140900,-;"


def xid(
    bus_id: str,
    number: int,
    text: str,
    pid: int = 0,
    process: str = "",
    gpu_instance: int | None = None,
    compute_instance: int | None = None,
) -> LoggedXid:
    return LoggedXid(5.1409, bus_id, number, gpu_instance, compute_instance, pid, process, text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("NVRM: Xid (0000:03:00): 14, Channel 00000001",
         xid("0000:03:00", 14, "Channel 00000001")),
        ("NVRM: Xid (PCI:0000:18:00): 79, GPU has fallen off the bus.",
         xid("0000:18:00", 79, "GPU has fallen off the bus.")),
        ("NVRM: Xid (PCI:0000:18:00): 79, pid=1234, GPU has fallen off the bus.",
         xid("0000:18:00", 79, "GPU has fallen off the bus.", 1234)),
        ("NVRM: Xid (PCI:0000:18:00): 79, pid=1234, name=python3, GPU has fallen off the bus.",
         xid("0000:18:00", 79, "GPU has fallen off the bus.", 1234, "python3")),
        ("NVRM: Xid (PCI:0000:01:00): 31, Ch 00000003, engmask 00000101, intr 10000000",
         xid("0000:01:00", 31, "Ch 00000003, engmask 00000101, intr 10000000")),
        ("NVRM: Xid (PCI:0000:01:00): 31, pid=9, name=exe, Ch 0000000a, intr 00000000. MMU Fault",
         xid("0000:01:00", 31, "Ch 0000000a, intr 00000000. MMU Fault", 9, "exe")),
        ("NVRM: Xid (PCI:0000:cb:00): 13, pid='<unknown>', name=<unknown>, Graphics Exception",
         xid("0000:cb:00", 13, "Graphics Exception")),
        ("NVRM: Xid (PCI:0000:01:00 GPU-I:05): 94, pid=7194, Contained: CE User Channel (0x9).",
         xid("0000:01:00", 94, "Contained: CE User Channel (0x9).", 7194, gpu_instance=5)),
        ("NVRM: Xid (PCI:0000:3b:00 GPU-I:01 GPU-CI:02): 13, pid=9, name=a, Graphics Exception",
         xid("0000:3b:00", 13, "Graphics Exception", 9, "a", 1, 2)),
        ("NVRM: Xid (PCI:0000:17:00): 119, pid=7360, name=nvidia-smi, Timeout waiting for RPC!",
         xid("0000:17:00", 119, "Timeout waiting for RPC!", 7360, "nvidia-smi")),
        ("NVRM: Xid (PCI:0000:9b:00): 154, GPU recovery action changed from 0x0 (None) to 0x1",
         xid("0000:9b:00", 154, "GPU recovery action changed from 0x0 (None) to 0x1")),
        ("NVRM: Xid (PCI:000F:01:00): 62", xid("000f:01:00", 62, "")),
        ("NVRM: Xid (PCI:00000000:07:00): 62, x", xid("0000:07:00", 62, "x")),
        ("NVRM: Xid: 25, L1 -> L0", None),
        ("NVRM: Xid (GPU of another kind): 25, a", None),
        ("NVRM: Xid (PCI:0000:18:00): 8, pid=99999999, name=x, y",
         xid("0000:18:00", 8, "y", 0, "x")),
        ("NVRM: Xid (PCI:0000:18:00): 79, pid=1, name=a\tb, c",
         xid("0000:18:00", 79, "c", 1, "a b")),
        ("NVRM: GPU 0000:01:00.0: GPU has fallen off the bus.", None),
        ("NVRM: Xid (PCI:0000:18:00): 1234567, x", None),
        ("nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 12028, Non-fatal, Link 32", None),
        ("x[1]: NVRM: Xid (PCI:0000:18:00): 79, y", None),
        ("", None),
    ],
)  # fmt: skip
def test_what_drivers_write(text: str, expected: LoggedXid | None) -> None:
    assert parse_record(HEAD + text) == expected


@pytest.mark.parametrize(
    "record",
    [
        "12,339,5140900,-;NVRM: Xid (PCI:0000:18:00): 79, x",  # a program wrote it: facility 1
        # The kernel wrote it, but a program chose the start of the message.
        "6,340,5140900,-;NVRM: Xid: 79,[4711]: segfault at 0 ip 0 sp 0 error 4 in x[0+1000]",
        "6,340,5140900,-;NVRM: Xid: 79, [4711]: segfault at 0 ip 0 sp 0 error 4 in x[0+1000]",
        "6,340,5140900,-;NVRM: Xid (a): [4711]: segfault at 0 ip 0 sp 0 error 4",
        " SUBSYSTEM=NVRM: Xid (PCI:0000:18:00): 79, x",
        "NVRM: Xid (PCI:0000:18:00): 79, x",
        "4,339;",
        "-1,2,3,-;NVRM: Xid (PCI:0000:18:00): 79, x",
    ],
)
def test_what_is_not_the_kernels_word(record: str) -> None:
    assert parse_record(record) is None


@given(name=st.text(max_size=40).filter(lambda name: "\n" not in name), pid=st.integers(1, 1 << 22))
def test_a_name_decides_nothing(name: str, pid: int) -> None:
    text = f"NVRM: Xid (PCI:0000:18:00): 31, pid={pid}, name={name}, Ch 00000008"
    event = parse_record(f"{HEAD}{text}")
    assert event is not None
    assert (event.bus_id, event.xid, event.pid) == ("0000:18:00", 31, pid)
    assert event.gpu_instance is None
    assert event.process.isprintable()
    assert event.text.isprintable()


@given(st.text())
def test_anything_is_read(text: str) -> None:
    parse_record(text)
    parse_record(HEAD + text)
    parse_record(f"{HEAD}NVRM: Xid ({text}")


SWITCH = "nvidia-nvswitch0: SXid (PCI:0000:C2:00.0): "


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (SWITCH + "20034, Fatal, Link 28 LTSSM Fault Up",
         (20034, "fatal", 28, "LTSSM Fault Up")),
        (SWITCH + "28006, Non-fatal, Link 46 MC TS crumbstore MCTO (First)",
         (28006, "non-fatal", 46, "MC TS crumbstore MCTO (First)")),
        (SWITCH + "11012, Correctable, Link 03 ingress header ECC limit",
         (11012, "correctable", 3, "ingress header ECC limit")),
        (SWITCH + "10003, Fatal, unhandled interrupt in f(7)",
         (10003, "fatal", None, "unhandled interrupt in f(7)")),
        (SWITCH + "10004, Thermal Slowdown Engaged | Temp higher than WARN Threshold",
         (10004, "", None, "Thermal Slowdown Engaged | Temp higher than WARN Threshold")),
        (SWITCH + "20034, Severity 5 Engine instance 28 Sub-engine instance 00", None),
        (SWITCH + "20034, Data {0x80000000, 0x00000000}", None),
        (SWITCH + "garbled, Fatal", None),
        ("x " + SWITCH + "20034, Fatal, Link 28 LTSSM Fault Up", None),
        ("NVRM: Xid (PCI:0000:18:00): 79, x", None),
    ],
)  # fmt: skip
def test_what_the_driver_writes_of_switches(
    text: str, expected: tuple[int, str, int | None, str] | None
) -> None:
    event = parse_switch_error(HEAD + text)
    if expected is None:
        assert event is None
        return
    number, severity, link, words = expected
    assert event is not None
    assert event.switch == SwitchError("nvidia-nvswitch0", number, severity, link)
    assert (event.kind, event.bus_id, event.text) == ("sxid", "0000:c2:00.0", words)
    assert parse_switch_error(f"12,339,5140900,-;{text}") is None, "a program wrote it"


@pytest.mark.anyio
async def test_the_log_is_followed_from_its_end(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    os.mkfifo(path)
    heard: list[GpuEvent] = []
    writer = os.open(path, os.O_RDWR)
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(follow, str(path), heard.append)
            said = "NVRM: Xid (PCI:0000:18:00 GPU-I:01 GPU-CI:02): 31, pid=9, name=a, x"
            record = f"{HEAD}{said}\n SUBSYSTEM=pci\n".encode()
            os.write(writer, record[:20])
            await anyio.wait_all_tasks_blocked()
            switch = f"{HEAD}{SWITCH}20034, Fatal, Link 28 LTSSM Fault Up\n".encode()
            more = b"\xff\xfe;nonsense\n" + record.replace(b"31,", b"79,") + switch
            os.write(writer, record[20:] + more)
            with anyio.fail_after(10):
                while len(heard) < 3:  # noqa: ASYNC110 - a reader, not an event
                    await anyio.sleep(0.01)
            tasks.cancel_scope.cancel()
    finally:
        os.close(writer)
    assert [(each.kind, each.xid) for each in heard] == [("xid", 31), ("xid", 79), ("sxid", 0)]
    first = heard[0]
    assert (first.kind, first.source, first.gpu, first.bus_id) == (
        "xid",
        "kernel",
        "",
        "0000:18:00",
    )
    assert (first.gpu_instance, first.compute_instance) == (1, 2)
    assert (first.pid, first.process, first.text) == (9, "a", "x")


@pytest.mark.anyio
async def test_the_kernels_own_log_is_read_and_what_a_program_writes_there_is_not() -> None:
    heard: list[GpuEvent] = []
    try:
        writer = os.open("/dev/kmsg", os.O_WRONLY | os.O_NONBLOCK)
    except OSError as error:
        pytest.skip(f"/dev/kmsg: {error.strerror}")
    try:
        with anyio.move_on_after(0.3):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(follow, "/dev/kmsg", heard.append)
                await anyio.wait_all_tasks_blocked()
                os.write(writer, b"<4>NVRM: Xid (PCI:0000:18:00): 79, of the test of a parser")
    finally:
        os.close(writer)
    assert not heard


@pytest.mark.anyio
async def test_a_log_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name, found in (("none", "No such file"), ("file", "neither a device nor a pipe")):
        with pytest.raises(KernelLogUnusable, match=found):
            await follow(str(tmp_path / name), print)
    assert not [fd for fd in os.listdir("/proc/self/fd") if _leads_to(fd, tmp_path)]


def _leads_to(fd: str, path: Path) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{fd}").startswith(str(path))
    except OSError:
        return False
