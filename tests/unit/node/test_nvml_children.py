"""Child processes that open NVML, forked by a server that does not, on a simulated node."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from hooks.config import load_config
from integration.nvml import process, session
from integration.nvml.errors import ChildFailed
from integration.nvml.inventory import inventory_of
from integration.nvml.lock import exclusive
from integration.nvml.process import fork_server, start
from integration.nvml.query import ask_nvml
from integration.nvml.session import Children
from integration.simulated import Scenario, SimulatedNode
from integration.timeouts import PATIENCE
from tests.harness.processes import family
from tests.harness.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hooks.config import Config

pytestmark = pytest.mark.anyio

_PIDS: Final = Path("/sys/fs/cgroup/pids")


@pytest.fixture(autouse=True)
def _not_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a killed child time to exit on a busy machine, too."""
    monkeypatch.setattr(session, "TO_DIE", 10.0 * PATIENCE)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[SimulatedNode]:
    with SimulatedNode.create(str(tmp_path / "node"), Scenario.load("two")) as node:
        yield node


@pytest.fixture
def config(node: SimulatedNode) -> Config:
    return load_config(node.config_path)


def fault(config: Config, text: str) -> None:
    Path(config.state, "nvml-faults").write_text(text, encoding="ascii")


def servers() -> list[int]:
    """Return the fork servers of this process."""
    found = []
    for pid in family(os.getpid())[1:]:
        with suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            parent = int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
            if parent == os.getpid() and any(
                word.endswith(b"/nvml/fork_server.py") for word in words
            ):
                found.append(pid)
    return found


def samples_of(config: Config) -> tuple[Children, str]:
    """Return the starter of children, and the library that they open."""
    driver = inventory_of(config).driver
    (library,) = [each.source for each in driver.libraries if "libnvidia-ml.so" in each.source]
    return Children(lambda *_, **__: None, config.state), library


def test_what_is_forked_answers_as_what_is_started(config: Config) -> None:
    def answers() -> list[object]:
        found = inventory_of(config, fresh=True)
        told = [ask_nvml(config, question) for question in ("links", "parts", "persistence")]
        return [found.gpus, found.nvml_failure, *told]

    started = answers()
    assert None not in started
    with fork_server():
        assert servers() == []
        assert answers() == started
        (server,) = servers()
        assert family(server) == [server]
        assert "libnvidia-ml" not in Path(f"/proc/{server}/maps").read_text()
        assert answers() == started
        assert servers() == [server]
    assert servers() == []


def test_what_hangs_is_killed_and_the_next_is_answered(config: Config) -> None:
    with fork_server():
        fault(config, "nvmlInit=hang")
        assert not ask_nvml(replace(config, nvml_timeout=0.3), "persistence")
        (server,) = servers()
        assert family(server) == [server]
        fault(config, "")
        assert json.loads(ask_nvml(config, "persistence") or b"") == {"modes": [0, 0]}
        assert servers() == [server]


async def test_how_one_has_ended_is_told(config: Config) -> None:
    children, library = samples_of(config)
    with fork_server():
        fault(config, "nvmlInit=crash")
        child = children.start("samples", library)
        with pytest.raises(ChildFailed, match="NVML crashed: SIGSEGV"):
            await child.answer(20)
        await children.end(child)
        assert children.abandoned == 0


async def test_it_has_two_pipes_and_the_lock_until_it_ends(config: Config) -> None:
    children, library = samples_of(config)
    with fork_server():
        child = children.start("samples", library)
        await child.answer(20)
        pid = child.process.pid
        opened = [os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()]
        assert not any(target.startswith("socket:") for target in opened)
        assert sum(target.startswith("pipe:") for target in opened) == 2
        assert sum(target.endswith("/nvml.lock") for target in opened) == 1
        assert os.getsid(pid) == pid
        with exclusive(config.state, 0) as lock:
            assert lock is None
        await children.end(child)
        assert child.process.poll() is not None
        with exclusive(config.state, 0) as lock:
            assert lock is not None


async def test_a_server_that_cannot_fork_keeps_what_it_has_forked(config: Config) -> None:
    if not (_PIDS / "tasks").exists():
        pytest.skip("no limit of processes of cgroup v1")
    children, library = samples_of(config)
    cgroup = _PIDS / f"nvshim-fork-{os.getpid()}"
    cgroup.mkdir()
    try:
        with fork_server():
            child = children.start("samples", library)
            await child.answer(20)
            (server,) = servers()
            (cgroup / "cgroup.procs").write_text(str(server))
            (cgroup / "pids.max").write_text("1")
            assert not ask_nvml(config, "persistence")
            assert servers() == [server]
            assert child.process.poll() is None
            (cgroup / "pids.max").write_text("max")
            assert ask_nvml(config, "persistence")
            await children.end(child)
    finally:
        cgroup.rmdir()


async def test_a_server_that_does_not_answer_is_ended_and_that_is_said(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    children, library = samples_of(config)
    with fork_server():
        assert ask_nvml(config, "persistence")
        (server,) = servers()
        os.kill(server, signal.SIGSTOP)
        monkeypatch.setattr(process, "_TO_FORK", 0.1)
        with pytest.raises(ChildFailed, match="can be started: timed out"):
            children.start("samples", library)
        assert servers() == []


async def test_a_server_that_is_killed_takes_its_own_along_and_another_begins(
    config: Config,
) -> None:
    children, library = samples_of(config)
    with fork_server():
        child = children.start("samples", library)
        await child.answer(20)
        (server,) = servers()
        os.kill(server, signal.SIGKILL)
        with pytest.raises(ChildFailed, match="NVML crashed: SIGKILL"):
            await child.answer(20)
        await until(lambda: not os.path.exists(f"/proc/{child.process.pid}"), "it ends with it")
        await children.end(child)
        assert ask_nvml(config, "persistence") is not None
        assert servers() != [server]


def test_a_program_that_it_does_not_know_cannot_be_started() -> None:
    with fork_server(), open(os.devnull, "wb") as output:
        words = (sys.executable, "-I", "-S", "/nowhere/program.py")
        with pytest.raises(FileNotFoundError, match=r"/nowhere/program\.py"):
            start(
                words,
                stdin=subprocess.DEVNULL,
                stdout=output.fileno(),
                state="/nowhere",
                patience=0,
            )
