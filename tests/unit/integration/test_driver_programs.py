"""Programs that may hang in the kernel, where signals do not reach them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hooks.config import Config
from hooks.node.driver import Driver, DriverFile
from hooks.node.gpus import Gpu
from hooks.words import Arch
from integration import driver_programs
from integration.agent_errors import MpsDaemonFailed
from integration.driver_programs import run_for
from integration.node.mps.paths import Places
from integration.node.mps.plan import Programs
from integration.node.services.dra import mig_create
from integration.node.services.mps import daemon
from integration.node.services.mps.daemon import Daemon
from integration.nvml.lock import is_exclusive
from integration.nvml.nvidia_smi import SmiFailed, run_nvidia_smi
from shim.programs import has_ended
from tests.harness.frozen import frozen_program
from tests.harness.launcher import REPOSITORY
from tests.harness.waiting import eventually
from tests.unit.node.inventories import node_with

ENVIRONMENT = {"PATH": "/usr/bin:/bin"}


@pytest.fixture
def frozen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the path of a program whose time counts from when it hangs, and what ends that."""
    with frozen_program(tmp_path) as (program, wait, thaw):
        waits = [wait]

        def has_ended_since(pidfd: int, seconds: float) -> bool:
            while waits:
                waits.pop()()
            return has_ended(pidfd, seconds)

        monkeypatch.setattr(driver_programs, "has_ended", has_ended_since)
        yield program, thaw
    for each in driver_programs._left:
        each.wait()
    driver_programs._left.clear()


def outcome_of(do: Callable[[], object]) -> BaseException:
    """Return what a function raises, with a timeout: it may never return."""
    raised: list[BaseException] = []

    def work() -> None:
        try:
            do()
        except BaseException as error:  # noqa: BLE001 - it is what is asked for
            raised.append(error)

    threading.Thread(target=work, daemon=True).start()
    return eventually(lambda: raised, "the program timed out")[0]


def test_what_a_program_says_is_told_with_its_status() -> None:
    script = "read line; echo $line $WHO; echo error >&2; exit 3"
    env = {**ENVIRONMENT, "WHO": "you"}
    done = run_for(["sh", "-c", script], 10, env=env, given=b"hello\n")
    assert (done.returncode, done.stdout, done.stderr) == (3, b"hello you\n", b"error\n")
    done = run_for(["sh", "-c", script], 10, env=env, merged=True)
    assert (done.stdout, done.stderr) == (b"you\nerror\n", b"")
    assert run_for(["true"], 10, env=ENVIRONMENT, given=b"unread\n").returncode == 0
    with pytest.raises(FileNotFoundError):
        run_for(["/nowhere"], 10, env={})


def test_what_a_program_leaves_behind_is_not_waited_for(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    done = run_for(["sh", "-c", f"sleep 1000 & echo $! > {pid}; echo said"], 10, env=ENVIRONMENT)
    os.kill(int(pid.read_text()), 9)
    assert done.stdout == b"said\n"


def test_one_that_takes_too_long_is_killed() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        run_for(["sleep", "1000"], 0.1, env=ENVIRONMENT)
    assert not driver_programs._left


def test_one_that_ends_as_it_is_to_be_killed_has_taken_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(subprocess.Popen, "kill", subprocess.Popen.wait)
    with pytest.raises(subprocess.TimeoutExpired):
        run_for(["sleep", "0.1"], 0, env=ENVIRONMENT)


_INTERRUPTED = """
import os, signal, subprocess
from integration.driver_programs import run_for

class Popen(subprocess.Popen):
    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        started.append(self)
        os.kill(os.getpid(), signal.SIGINT)

started, subprocess.Popen = [], Popen
signal.signal(signal.SIGINT, signal.default_int_handler)  # it may have been ignored
try:
    run_for(["sleep", "1000"], 60, env={"PATH": "/usr/bin:/bin"})
except KeyboardInterrupt:
    print("interrupted", started[0].returncode)
finally:
    started[0].kill()
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
"""


def test_one_that_is_just_being_started_is_killed_by_an_interrupt() -> None:
    argv = [sys.executable, "-c", _INTERRUPTED]
    done = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout == f"interrupted {-signal.SIGKILL}\n"


def test_an_interrupt_counts_though_the_program_cannot_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def popen(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        raise FileNotFoundError

    monkeypatch.setattr(subprocess, "Popen", popen)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_for(["true"], 10, env=ENVIRONMENT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def driver(program: str) -> Driver:
    smi = DriverFile("nvidia-smi", "nvidia-smi", program)
    return Driver("535", Arch.X86_64, (), (smi,), ())


def test_one_that_no_signal_reaches_is_left_alone(
    frozen: tuple[str, Callable[[], object]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_programs, "_TO_DIE", 0.1)
    program, thaw = frozen
    config = Config(state=str(tmp_path / "state"))
    raised = outcome_of(lambda: run_nvidia_smi(driver(program), config, ["-L"], 0.5))
    assert isinstance(raised, SmiFailed)
    assert "did not exit within 0.5 s" in raised.found
    (left,) = driver_programs._left
    thaw()

    def is_reaped() -> bool:
        run_for(["true"], 10, env=ENVIRONMENT)
        return not driver_programs._left

    eventually(is_reaped, "it is reaped once it has ended")
    assert left.returncode == -signal.SIGKILL


def test_a_switch_of_mig_mode_that_hangs_keeps_nvml_closed_for_nobody(
    frozen: tuple[str, Callable[[], object]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_programs, "_TO_DIE", 0.1)
    monkeypatch.setattr(mig_create, "_TO_SWITCH", 0.5)
    config = Config(state=str(tmp_path / "state"))
    gpu = Gpu(0, 0, "GPU-1", "0000:01:00.0", "a")
    inventory = node_with(gpu, driver=driver(frozen[0]))
    modes = mig_create.MigModes(config)
    raised = outcome_of(lambda: modes._switch(gpu, inventory, on=True))
    assert isinstance(raised, SmiFailed)
    assert driver_programs._left
    assert not is_exclusive(config.state)


def test_an_mps_daemon_whose_program_hangs_is_one_that_does_not_answer(
    frozen: tuple[str, Callable[[], object]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_programs, "_TO_DIE", 0.1)
    monkeypatch.setattr(daemon, "TIMEOUT", 0.5)
    mps = Daemon(Config(), Places(str(tmp_path), "a"))
    programs = Programs(root="", control=frozen[0], search=ENVIRONMENT["PATH"], libraries="")
    assert isinstance(outcome_of(lambda: mps.ask(programs, "get_server_list")), MpsDaemonFailed)
