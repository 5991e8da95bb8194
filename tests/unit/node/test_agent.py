from __future__ import annotations

import fcntl
import math
import os
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

import anyio
import pytest

from hooks.config import Config
from integration.agent_errors import AgentRunning
from integration.agent_status import is_ready, status_path
from integration.node import agent
from integration.node.agent import serve
from integration.node.options import NO, Options
from integration.node.service import SERVICES, Context
from integration.node.values.service_name import ServiceName
from integration.nvml.snapshot import NodeSnapshot
from integration.watcher import Watcher
from tests.harness.fuse import fuse
from tests.harness.node_state import publish
from tests.harness.raising import raises

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio


def silent(*_: object, **__: object) -> None: ...


def nothing(tmp_path: Path) -> Config:
    """Make a node without GPUs and driver, but with a state directory."""
    (tmp_path / "state").mkdir()
    return Config(
        driver_root=str(tmp_path / "driver"),
        dev=str(tmp_path / "dev"),
        proc=str(tmp_path / "proc"),
        sys=str(tmp_path / "sys"),
        state=str(tmp_path / "state"),
        make_nodes=False,
        char_links=False,
    )


async def test_who_asks_for_readiness_keeps_no_agent_from_beginning(tmp_path: Path) -> None:
    config = nothing(tmp_path)
    with (tmp_path / "state" / "node.lock").open("w") as asking:
        fcntl.flock(asking, fcntl.LOCK_SH)
        threading.Timer(0.2, partial(fcntl.flock, asking.fileno(), fcntl.LOCK_UN)).start()
        seen = await serve(config, Options("", 1), silent, once=True)
    assert seen.faults


async def test_an_agent_that_stays_is_told_of(tmp_path: Path) -> None:
    config = nothing(tmp_path)
    with (tmp_path / "state" / "node.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with raises(AgentRunning, match="another agent, process unknown, holds"):
            await serve(config, Options("", 1), silent, once=True)


def test_an_agent_whose_last_look_is_of_the_future_is_not_ready(tmp_path: Path) -> None:
    config = nothing(tmp_path)
    (tmp_path / "state" / "node.json").write_text('{"poll": 1}')
    with (tmp_path / "state" / "node.lock").open("w") as agent:
        fcntl.flock(agent, fcntl.LOCK_EX)
        assert is_ready(config)
        # The clock was set back, so the age of the last look is unknown.
        later = time.time() + 3600
        os.utime(status_path(config), (later, later))
        assert not is_ready(config)


def test_an_agent_is_not_ready_because_the_one_before_has_looked(tmp_path: Path) -> None:
    config = nothing(tmp_path)
    (tmp_path / "state" / "node.json").write_text('{"pid": 7, "poll": 1}')
    with (tmp_path / "state" / "node.lock").open("w") as agent:
        fcntl.flock(agent, fcntl.LOCK_EX)
        for number, ready in ((7, True), (8, False)):
            agent.seek(0)
            print(number, file=agent, flush=True)
            assert is_ready(config) is ready


def test_what_a_kubelet_waits_for_is_started_first_and_health_before_it() -> None:
    urgent = [name for name, service in SERVICES.items() if service.is_urgent]
    assert urgent == [ServiceName.HEALTH, ServiceName.PLUGIN, ServiceName.DRA]


@pytest.mark.parametrize("mode", ["auto", NO])
async def test_other_work_waits_until_a_kubelet_has_the_devices(
    monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setattr(agent, "_TO_ANNOUNCE", math.inf)
    context, done = Context(Config(), Options(device_plugin=mode), silent), anyio.Event()

    async def wait() -> None:
        await agent._announce(context)
        done.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        assert done.is_set() == (mode == NO)
        publish(context.state.announced, True)
        with anyio.fail_after(20):
            await done.wait()


async def test_a_spec_whose_directory_hangs_keeps_no_round_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "_LONGEST_KEEP", 0.1)
    with fuse(str(tmp_path / "cdi")) as server, Watcher(0) as watcher:
        spec = str(tmp_path / "cdi" / "nvidia.yaml")
        context = Context(nothing(tmp_path), Options(spec, 1), silent)
        rounds = agent._Rounds(context, watcher, "")
        server.hang()
        for _ in range(2):
            node = await rounds.keep(NodeSnapshot(faults=("no driver",)))
            assert node.faults == (f"{spec}: its file system does not answer", "no driver")
        assert context.state.node.value == node
        server.go_on()
        with anyio.fail_after(20):
            while len(node.faults) > 1:
                await anyio.sleep(0.01)
                node = await rounds.keep(NodeSnapshot(faults=("no driver",)))


async def test_what_changes_before_the_status_file_is_followed_is_written_as_well(
    tmp_path: Path,
) -> None:
    context = Context(nothing(tmp_path), Options("", 1), silent)
    with Watcher(0) as watcher:
        rounds = agent._Rounds(context, watcher, "")
        async with anyio.create_task_group() as tasks:
            await rounds.keep(NodeSnapshot())
            tasks.start_soon(rounds.keep_written, 0.0, context.state.faults)
            context.state.faults.report("plugin", "it has just failed")  # the task comes later
            await anyio.wait_all_tasks_blocked()
            assert "it has just failed" in (tmp_path / "state" / "node.json").read_text()
            tasks.cancel_scope.cancel()
