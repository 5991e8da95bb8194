"""Running a machine, with a stand-in for the emulator."""

from __future__ import annotations

import io
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness.raising import raises
from tools.errors import MachineFailed, MachineTimeout
from tools.vm import machine, tools
from tools.vm.guest import Guest

Run = Callable[..., int]


def guest_in(directory: Path) -> Guest:
    return Guest("bookworm", "3.11", str(directory))


@pytest.fixture
def console() -> io.BytesIO:
    return io.BytesIO()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, console: io.BytesIO) -> Run:
    """Run a shell script as the emulator."""

    def start(script: str, timeout: float = 60) -> int:
        monkeypatch.setattr(machine, "command", lambda *_: ["sh", "-c", script])
        return machine.run(
            guest_in(tmp_path), "true", shares=[str(tmp_path)], out=console, timeout=timeout
        )

    return start


@pytest.mark.parametrize(("emulator", "job"), [(33, 0), (35, 1), (37, 2), (233, 100)])
def test_exit_code_of_the_job_is_told(
    run: Run, console: io.BytesIO, emulator: int, job: int
) -> None:
    assert run(f"printf 'one\\r\\ntwo\\r\\n'; exit {emulator}") == job
    assert console.getvalue() == b"one\ntwo\n"


@pytest.mark.parametrize("emulator", ["exit 0", "exit 1", "exit 31", "exit 34", "kill -9 $$"])
def test_machine_that_ends_without_its_job_is_an_error_with_its_last_words(
    run: Run, emulator: str
) -> None:
    with raises(MachineFailed, match="Kernel panic"):
        run(f"echo 'Kernel panic - not syncing'; {emulator}")


def test_machine_that_takes_too_long_is_killed(run: Run, console: io.BytesIO) -> None:
    began = time.monotonic()
    with raises(MachineTimeout):
        run("echo $$; exec sleep 100", timeout=2)
    assert 2 <= time.monotonic() - began < 60
    assert not os.path.exists(f"/proc/{int(console.getvalue())}")


def test_machine_is_killed_when_its_run_is_interrupted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Interrupted(io.BytesIO):
        def flush(self) -> None:
            raise KeyboardInterrupt

    script = ["sh", "-c", "echo $$; exec sleep 100"]
    monkeypatch.setattr(machine, "command", lambda *_: script)
    out = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        machine.run(guest_in(tmp_path), "true", shares=[], out=out, timeout=50)
    assert not os.path.exists(f"/proc/{int(out.getvalue())}")


def test_emulator_is_never_given_the_hosts_hardware_and_a_comma_stays_in_its_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tools, "find", lambda program: program)  # it need not be installed
    directory = tmp_path / "a,b"
    (directory / "root/boot").mkdir(parents=True)
    for name in ("vmlinuz-6.1", "initrd.img-6.1"):
        (directory / "root/boot" / name).touch()
    argv = machine.command(guest_in(directory), [("/c,d", "share0")])
    assert argv[argv.index("-kernel") + 1].endswith("/a,b/root/boot/vmlinuz-6.1")
    assert argv[argv.index("-accel") + 1].startswith("tcg")
    assert "kvm" not in " ".join(argv)
    assert any("/a,,b/disk.img,format=raw," in word for word in argv)
    shared = argv[argv.index("-virtfs") + 1]
    assert shared.startswith("local,path=/c,,d,mount_tag=share0,")
    assert shared.endswith(",readonly=on")
    assert " systemd.unified_cgroup_hierarchy=1 " in argv[argv.index("-append") + 1]
    old = machine.command(guest_in(directory), [], 1)
    assert " systemd.unified_cgroup_hierarchy=0 " in old[old.index("-append") + 1]


@pytest.mark.parametrize(("refusals", "exit_code"), [(0, 7), (3, 7), (10_000, 100)])
def test_a_share_whose_driver_comes_late_is_mounted_and_one_without_is_an_error(
    tmp_path: Path, refusals: int, exit_code: int
) -> None:
    programs = {
        "mount": f'echo >>"$0.log"; [ "$(wc -l <"$0.log")" -gt {refusals} ]',
        "dd": 'od -A n -t u1 >"$0.log"',
        "sleep": "",
        "sync": "",
        "poweroff": "kill $PPID",
    }
    for name, script in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "shares").write_text("")
    (tmp_path / "run").write_text("exit 7")
    with open(os.path.join(os.path.dirname(machine.__file__), "job.sh"), encoding="utf-8") as file:
        job = file.read().replace("/run/nvshim-job", str(tmp_path))

    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(["sh", "-c", job], env=environment, check=False, timeout=120)

    assert int((tmp_path / "dd.log").read_text()) == exit_code + machine._OFFSET
