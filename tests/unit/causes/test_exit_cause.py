"""Which faults concern a container, according to the agent or the kernel's log."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from hooks.config import ENVIRONMENT_VARIABLE
from hooks.node import cache
from hooks.node.cache import StoredInventory
from hooks.node.driver import Driver
from hooks.node.gpus import Gpu, MigDevice
from hooks.words import Arch
from shim.causes import exit_store
from shim.causes.exit_message import RELEVANT
from shim.causes.record import Fault, Whose, path_of, write_causes
from shim.errors import NvshimError
from shim.log import Log
from shim.work import exit_cause
from shim.work.exit_cause import End, tell_cause

DAY = 86400.0
INIT = 4_000_001  # above every pid
GONE = 4_000_002
GPUS = (
    Gpu(0, 0, "GPU-a", "0000:18:00.0", "H100"),
    Gpu(1, 1, "GPU-b", "0000:3b:00.0", "H100", mig=True),
)
MIGS = (
    MigDevice(1, 0, "MIG-b0", 1, 0, caps=(10, 11)),
    MigDevice(1, 1, "MIG-b1", 2, 0, caps=(20, 21)),
)
KNOWN = StoredInventory(Driver("1", Arch.X86_64, (), (), ()), GPUS, MIGS, (), "", 0.0)
GRANT = {"gpus": [{"index": 0, "uuid": "GPU-a", "bus_id": "0000:18:00.0"}], "mig_devices": []}


class Case:
    """A container that has just exited on a node."""

    def __init__(self, directory: Path) -> None:
        self.bundle = directory / "bundle"
        self.state = directory / "state"
        self.dev = directory / "dev"
        for made in (self.bundle, self.state, self.dev):
            made.mkdir()
        self.config = directory / "config.toml"
        self.configure()
        self.spec: dict[str, Any] = {"linux": {}}
        self.grant: dict[str, Any] | None = GRANT
        (self.bundle / "init.pid").write_text(str(INIT))
        self.log = Log(str(directory), debug=False)
        self.status = 134
        self.out_of_memory = False
        self.booted = 100 * DAY  # seconds to add to this machine's uptime

    def configure(self, text: str = "") -> None:
        lines = f'[node]\nstate = "{self.state}"\ndev = "{self.dev}"\n{text}'
        self.config.write_text(lines)

    def tell(self) -> dict[str, Any]:
        (self.bundle / "config.json").write_text(json.dumps(self.spec))
        if self.grant is not None:
            (self.bundle / "nvidia.json").write_text(json.dumps({"grant": self.grant}))
        end = End("k8s.io", "c1", str(self.bundle), INIT, self.status, time.time())
        return tell_cause(end, self.log)

    @contextmanager
    def kernel_log(
        self, *lines: str, ago: float = 0.5, facility: int = 0
    ) -> Iterator[Callable[[str], None]]:
        path = self.dev / "kmsg"
        os.mkfifo(path)
        fd = os.open(path, os.O_RDWR)
        fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, 1 << 20)
        # With the node's own clock: the machine may not have been up for so long.
        moment = int((time.monotonic() + self.booted - ago) * 1e6)

        def write(record: str) -> None:
            os.write(fd, record.encode())

        for line in lines:
            write(f"{facility << 3 | 4},1,{moment},-;{line}\n SUBSYSTEM=pci\n")
        try:
            yield write
        finally:
            os.close(fd)
            path.unlink()

    def found(self, *lines: str, **how: Any) -> tuple[Any, ...]:
        """Return the code and the owner of the first reported fault; () for none."""
        with self.kernel_log(*lines, **how):
            first = self.tell()["first"]
        return () if first is None else (first["code"], first["whose"])


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    case = Case(tmp_path)
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(case.config))
    monkeypatch.setattr(cache, "recall", lambda _: KNOWN)
    monkeypatch.setattr(time, "clock_gettime", lambda _: time.monotonic() + case.booted)
    before = time.time() - 100
    os.utime(case.bundle / "init.pid", (before, before))
    return case


# From NVIDIA/NVSentinel#1357.
LINK: Final = "XC1 i0 Link 17 (0x04084507 0x00000004 0x00000000 0x00000000 0x00000000 0x00000000)"


def xid(number: int, bus: str = "18", *, pid: int = 0, instance: str = "", text: str = "x") -> str:
    process = f"pid={pid}, name=python3, " if pid else ""
    return f"NVRM: Xid (PCI:0000:{bus}:00{instance}): {number}, {process}{text}"


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (xid(79), (79, "device")),
        (xid(79, pid=GONE), (79, "device")),
        (xid(79, pid=1), (79, "device")),
        (xid(79, "3b"), ()),
        (xid(31, pid=INIT), (31, "application")),
        (xid(31, pid=GONE), (31, "application")),
        (xid(31, pid=1), ()),
        (xid(31, "3b", pid=INIT), (31, "application")),
        (xid(109, pid=GONE), (109, "unclear")),
        (xid(4711), (4711, "unclear")),
        (xid(45, pid=INIT), ()),
        (xid(63), ()),
        (xid(145, text=f"RLW_SRC_TRACK Nonfatal {LINK}"), ()),
        (xid(145, text=f"RLW_SRC_TRACK Fatal {LINK}"), (145, "device")),
        # Text that may be part of a process's name must not count.
        (xid(145, text=f"RLW Nonfatal XC, RLW Fatal {LINK}"), (145, "device")),
        (xid(154), ()),
        (xid(154, text="GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)"),
         (154, "device")),
        (xid(154, text="GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)"),
         ()),
        ("usb 1-1: new device", ()),
    ],
)  # fmt: skip
def test_a_line_of_the_kernels_log(case: Case, line: str, found: tuple[Any, ...]) -> None:
    assert case.found(line) == found


def test_an_applications_fault_long_before_the_end_may_be_anothers(case: Case) -> None:
    assert case.found(xid(31, pid=GONE), ago=exit_cause.NEAR + 5) == (31, "unclear")
    assert case.found(xid(31, pid=INIT), ago=exit_cause.NEAR + 5) == (31, "application")


def test_what_was_before_its_start_or_by_a_program_does_not_count(case: Case) -> None:
    assert case.found(xid(79), ago=110) == ()
    assert case.found(xid(79), facility=1) == ()
    assert case.found(xid(79), ago=90) == (79, "device")


@pytest.mark.parametrize("drift", [time.CLOCK_MONOTONIC, time.CLOCK_MONOTONIC_RAW])
def test_the_logs_clock_may_be_either_that_counts_from_boot(
    case: Case, monkeypatch: pytest.MonkeyPatch, drift: int
) -> None:
    def read(clock: int) -> float:
        return time.monotonic() + case.booted + (7000 if clock == drift else 0)

    monkeypatch.setattr(time, "clock_gettime", read)
    assert case.found(xid(79)) == (79, "device")


@pytest.mark.parametrize(
    ("instance", "found"),
    [
        (" GPU-I:01", (94, "device")),
        (" GPU-I:01 GPU-CI:00", (94, "device")),
        (" GPU-I:02", ()),
        ("", (94, "device")),
    ],
)
def test_a_mig_device_has_the_faults_of_its_instance_and_of_its_gpu(
    case: Case, instance: str, found: tuple[Any, ...]
) -> None:
    case.grant = {"gpus": [], "mig_devices": [{"gpu": 1, "index": 0, "uuid": "MIG-b0"}]}
    assert case.found(xid(94, "3b", instance=instance)) == found


@pytest.mark.parametrize(
    ("paths", "found"),
    [
        (["/dev/nvidia0", "/dev/nvidiactl"], (79, "device")),
        (["/dev/nvidia1", "/dev/nvidia-caps/nvidia-cap10", "/dev/nvidia-caps/nvidia-cap11"], ()),
        ([], ()),
    ],
)
def test_without_a_record_its_nodes_tell_what_it_had(
    case: Case, paths: list[str], found: tuple[Any, ...]
) -> None:
    case.grant = None
    case.spec["linux"]["devices"] = [7, *({"type": "c", "path": path} for path in paths)]
    assert case.found(xid(79)) == found


def test_the_nodes_of_a_privileged_container_tell_nothing(case: Case) -> None:
    case.grant = None
    case.spec["linux"]["devices"] = [{"type": "c", "path": "/dev/nvidia0"}]
    case.spec["process"] = {"capabilities": {"bounding": ["CAP_SYS_ADMIN"]}}
    assert case.found(xid(79)) == ()
    assert case.found(xid(31, pid=INIT)) == (31, "application")


def test_a_storm_of_lines_is_read_to_its_end_and_the_device_is_told(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exit_cause, "_READING", 100.0)  # however slow the machine is
    storm = [xid(31, pid=GONE)] * 1000
    with case.kernel_log(*storm, xid(79), *storm):
        found = case.tell()
    assert found["first"]["code"] == 79
    remembered = exit_store.read_ended(str(case.state), "k8s.io", "c1")
    assert remembered is not None
    assert len(remembered["faults"]) == 16


def test_a_log_that_takes_too_long_is_left(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exit_cause, "_READING", 0.0)
    assert case.found(xid(79)) == ()


def test_what_the_agent_wrote_counts_and_then_the_log_is_not_read(case: Case) -> None:
    fault = Fault(time.time(), "xid", 79, whose=Whose.DEVICE, sure=True)
    write_causes(str(case.state), "k8s.io", "c1", [fault])
    assert case.found(xid(48)) == (79, "device")


def test_a_fault_counts_though_the_clock_was_set_back_since_the_start(case: Case) -> None:
    later = time.time() + 3600
    os.utime(case.bundle / "init.pid", (later, later))
    assert case.found(xid(79)) == (79, "device")
    assert case.found(xid(79), ago=RELEVANT + 60) == ()
    write_causes(str(case.state), "k8s.io", "c1", [Fault(time.time(), "xid", 48, sure=True)])
    assert case.tell()["first"]["code"] == 48


@pytest.mark.parametrize("stamp", ["", "7,-5,", "7,0,"])
def test_a_line_that_does_not_say_when_is_not_of_the_time_of_the_boot(
    case: Case, stamp: str
) -> None:
    case.booted = 60 - time.monotonic()
    with case.kernel_log() as write:
        write(f"4,{stamp}-;{xid(79)}\n")
        assert case.tell()["first"] is None


def test_a_fault_counts_on_a_node_that_was_just_booted(case: Case) -> None:
    case.booted = 60 - time.monotonic()
    assert case.found(xid(79), ago=55) == (79, "device")


def test_a_malformed_file_of_the_agents_is_none(case: Case) -> None:
    path = Path(path_of(str(case.state), "k8s.io", "c1"))
    path.parent.mkdir(parents=True)
    path.write_text("{")
    assert case.found(xid(79)) == (79, "device")


def test_with_an_agent_that_knows_nothing_nothing_is_told(case: Case) -> None:
    with open(case.state / "node.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert case.found(xid(79)) == ()
    assert case.found(xid(79)) == (79, "device")


@pytest.mark.parametrize(
    ("configured", "wish", "more", "status"),
    [
        ("", None, {}, 134),
        ("fault-exit-code = 85\n", None, {}, 85),
        ("fault-exit-code = 85\n", "0", {}, 134),
        ("fault-exit-code = 85\n", "7", {}, 7),
        ("", "255", {}, 255),
        ("", "85", {"sure": False}, 134),
        ("", "85", {"whose": Whose.HOST}, 134),
        ("", "85", {"whose": Whose.NEIGHBOUR}, 134),
        ("", "85", {"whose": Whose.APPLICATION}, 134),
        ("", "85", {"whose": Whose.UNCLEAR}, 134),
        ("", "85", {"when": 1e9}, 134),
    ],
)
def test_the_exit_code(
    case: Case, configured: str, wish: str | None, more: dict[str, Any], status: int
) -> None:
    case.configure(configured)
    if wish is not None:
        case.spec["annotations"] = {"io.containerd.nvidia.v1.fault-exit-code": wish}
    fault = {"whose": Whose.DEVICE, "sure": True, **more}
    when = fault.pop("when", time.time())
    write_causes(str(case.state), "k8s.io", "c1", [Fault(when, "xid", 79, **fault)])
    found = case.tell()
    assert found["status"] == status
    assert ("The exit code was 134." in found["cause"]) is (status != 134)


def test_a_container_out_of_memory_keeps_its_code(case: Case) -> None:
    case.configure("fault-exit-code = 85\n")
    (case.bundle / "config.json").write_text("{}")
    fault = Fault(time.time(), "xid", 79, whose=Whose.DEVICE, sure=True)
    write_causes(str(case.state), "k8s.io", "c1", [fault])
    end = End("k8s.io", "c1", str(case.bundle), INIT, 137, time.time(), out_of_memory=True)
    assert tell_cause(end, case.log)["status"] == 137


def _no_config(case: Case) -> None:
    case.config.write_text("[node")


def _no_init(case: Case) -> None:
    (case.bundle / "init.pid").unlink()


@pytest.mark.parametrize("spoil", [_no_config, _no_init])
def test_what_cannot_be_read_is_an_error_of_ours(case: Case, spoil: Callable[[Case], None]) -> None:
    spoil(case)
    with pytest.raises((NvshimError, OSError)):
        case.tell()
