"""The state that services share: topics, faults, signals and events."""

from __future__ import annotations

from functools import partial

import anyio
import pytest

from integration.node.mps.clients import MpsDaemon
from integration.node.service import SERVICES
from integration.node.state import topic as topics
from integration.node.state.store import State, UnknownPublisherError
from integration.node.state.topic import (
    Topic,
    Watched,
    WrongPublisherError,
    call_on_change,
    version_of,
    wait_any,
)
from integration.node.values.service_name import ServiceName
from integration.nvml.snapshot import NodeSnapshot
from integration.nvml.values import GpuEvent
from tests.harness.node_state import publish

pytestmark = pytest.mark.anyio

GPU = "nvidia.com/gpu"
EVENT = GpuEvent(when=1.0, kind="xid", gpu="GPU-0", xid=79)


async def test_a_change_wakes_who_waits_for_it() -> None:
    state = State()
    since = version_of(state.node, state.faults)
    async with anyio.create_task_group() as tasks:
        woken = []

        async def wait(*watched: Watched) -> None:
            await wait_any(*watched, since=since)
            woken.append(watched)
            tasks.cancel_scope.cancel()

        tasks.start_soon(wait, state.node, state.faults)
        await anyio.wait_all_tasks_blocked()
        publish(state.unwatched, {"GPU-0": "it is lost"})  # no task waits for that
        publish(state.node, NodeSnapshot())  # as it was
        await anyio.wait_all_tasks_blocked()
        assert not woken
        publish(state.node, NodeSnapshot(faults=("no driver",)))
    assert woken == [(state.node, state.faults)]


async def test_a_change_that_has_come_already_is_not_waited_for() -> None:
    state = State()
    since = state.look_requested.version
    state.look_requested.send()
    assert await wait_any(state.look_requested, since=since) != since
    now = state.look_requested.version
    assert await wait_any(state.look_requested, since=now, timeout=0.01) == now


async def test_a_change_wakes_nobody_who_waits_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    state = State()
    async with anyio.create_task_group() as tasks:
        for topic in (state.health, state.mps_daemons, state.dra_health):
            tasks.start_soon(partial(wait_any, topic, since=topic.version))
        await anyio.wait_all_tasks_blocked()
        looks: list[tuple[Watched, ...]] = []

        def version(*watched: Watched) -> int:
            looks.append(watched)
            return version_of(*watched)

        monkeypatch.setattr(topics, "version_of", version)
        state.look_requested.send()
        publish(state.claimed_devices, ())
        publish(state.health, {})  # as it was
        await anyio.wait_all_tasks_blocked()
        assert looks == []
        publish(state.unwatched, {"": "NVML hangs"})
        publish(state.dra_health, ())  # as it was
        await anyio.wait_all_tasks_blocked()
        assert looks == []
        publish(state.mps_daemons, {GPU: MpsDaemon(GPU, ())})
        await anyio.wait_all_tasks_blocked()
        assert looks == [(state.mps_daemons,)]
        tasks.cancel_scope.cancel()


async def test_changes_yield_the_value_now_and_then_the_newest_of_those_published() -> None:
    topic = Topic(0, ServiceName.AGENT, "a number")
    found: list[int] = []
    async with anyio.create_task_group() as tasks:

        async def read() -> None:
            async for value in topic.changes():
                found.append(value)  # noqa: PERF401 - it does not end

        tasks.start_soon(read)
        await anyio.wait_all_tasks_blocked()
        assert found == [0]
        publish(topic, 1)
        publish(topic, 2)  # before the reader runs
        await anyio.wait_all_tasks_blocked()
        publish(topic, 2)
        await anyio.wait_all_tasks_blocked()
        assert found == [0, 2]
        tasks.cancel_scope.cancel()


async def test_who_has_waited_is_forgotten() -> None:
    topic = Topic(0, ServiceName.AGENT, "a number")
    for _ in range(3):
        await wait_any(topic, since=topic.version, timeout=0)
    assert not topic._waiting


async def test_a_call_on_change_is_made_at_each_change_and_at_once_if_asked() -> None:
    state, done = State(), list[str]()
    async with anyio.create_task_group() as tasks:
        follow = partial(call_on_change, lambda: done.append("now"), at_once=True)
        tasks.start_soon(call_on_change, lambda: done.append("later"), state.reloads)
        tasks.start_soon(follow, state.reloads)
        await anyio.wait_all_tasks_blocked()
        assert done == ["now"]
        publish(state.reloads, 1)
        state.look_requested.send()  # something else
        await anyio.wait_all_tasks_blocked()
        assert sorted(done) == ["later", "now", "now"]
        tasks.cancel_scope.cancel()


def test_a_hook_gets_each_published_value_also_an_equal_one() -> None:
    seen: list[int] = []
    topic = Topic(0, ServiceName.AGENT, "a number", on_publish=seen.append)
    publish(topic, 0)
    publish(topic, 1)
    assert (seen, topic.version) == ([0, 1], 1)


def test_only_its_owner_publishes_a_topic() -> None:
    state = State()
    with pytest.raises(WrongPublisherError, match="health publishes this topic, plugin does not"):
        state.health.publisher(ServiceName.PLUGIN)
    state.health.publisher(ServiceName.HEALTH).publish({})


def test_a_topic_without_a_publisher_stops_the_agent_at_its_start() -> None:
    State().check_publishers(SERVICES)
    others = [name for name in SERVICES if name is not ServiceName.MPS]
    with pytest.raises(UnknownPublisherError, match=r"without a publisher: mps_daemons$"):
        State().check_publishers(others)


def test_faults_come_and_go_by_subject() -> None:
    faults = State().faults
    faults.report("plugin", "no kubelet")
    faults.report("metrics", "no port")
    version = faults.version
    faults.report("metrics", "no port")
    assert faults.version == version
    faults.report("plugin", "")
    assert faults.lines == {"metrics": "no port"}
    faults.report("metrics address", "taken")
    faults.report("mps", "it ended")
    faults.clear("metrics")
    assert faults.lines == {"mps": "it ended"}


def test_events_reach_all_listeners_in_order() -> None:
    state = State()
    events = state.gpu_events
    events.send(EVENT)  # no listener
    with events.listen() as first, events.listen() as second:
        events.send(EVENT)
        events.send(GpuEvent(when=2.0, kind="ecc-double", gpu=""))
        for stream in (first, second):
            assert [stream.receive_nowait().when for _ in range(2)] == [1.0, 2.0]
    events.send(EVENT)  # no listener again
    assert not events.has_listeners
    assert state.counters.last_xids == {("GPU-0", "79"): 1.0}


def test_a_listener_that_does_not_read_does_not_block_the_sender() -> None:
    events = State().gpu_events
    with events.listen() as stream:
        for _ in range(5000):
            events.send(EVENT)
        assert stream.statistics().current_buffer_used < 5000
