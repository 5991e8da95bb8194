"""The agent as an NRI plugin: it registers, answers in time or refuses, and reconnects."""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from api.errors import Status
from api.proto import nri_pb2 as pb
from api.ttrpc import RemoteError
from hooks.config import Config
from integration.agent_errors import NriEnded, NriUnsynchronized
from integration.node.options import Options
from integration.node.service import Context
from integration.node.services.nri import records, service
from integration.node.services.nri.decision import NOTHING, decide
from integration.node.state.topic import wait_any
from integration.node.values.counters import FAILED, OK, REFUSED
from integration.nvml.snapshot import NodeSnapshot
from tests.harness.node_state import publish
from tests.harness.nri_runtime import NriRuntime
from tests.harness.waiting import until
from tests.unit.hooks.fake_node import Node
from tests.unit.node.nri.test_nri_decision import DEVICES, FIRST, MINE, MOUNTS, VICTIM, World

pytestmark = pytest.mark.anyio

FAULT = "nri connection"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def socket_path(short_path: Path) -> str:
    return str(short_path / "nri" / "nri.sock")


@pytest.fixture
def context(socket_path: str, tmp_path: Path) -> Context:
    options = Options(nri=True, nri_socket=socket_path)
    return Context(Config(state=str(tmp_path / "state")), options, lambda *_, **__: None)


@asynccontextmanager
async def running(context: Context) -> AsyncIterator[None]:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(service.run, context)
        yield
        tasks.cancel_scope.cancel()


def runtime(path: str) -> NriRuntime:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    return NriRuntime(path)


def request(*env: str, uid: str = VICTIM, handler: str = "") -> pb.CreateContainerRequest:
    return pb.CreateContainerRequest(
        pod=pb.PodSandbox(name="pod", uid=uid, namespace="tests", runtime_handler=handler),
        container=pb.Container(id="c1", name="main", env=env, mounts=MOUNTS),
    )


async def create(runtime: NriRuntime, *env: str, **more: Any) -> pb.CreateContainerResponse:
    answer: pb.CreateContainerResponse = await runtime.call(
        "CreateContainer", request(*env, **more), pb.CreateContainerResponse
    )
    return answer


async def until_fault(context: Context, start: str) -> None:
    faults = context.state.faults
    with anyio.fail_after(10):
        while not faults.lines.get(FAULT, "").startswith(start):
            await wait_any(faults, since=faults.version)


async def kept(state: str, *names: str) -> None:
    """Wait until only the records of these containers are left."""
    await until(lambda: sorted(os.listdir(f"{state}/nri")) == [*names], f"{names} are kept")


async def test_it_registers_says_what_it_wants_and_takes_the_containers_in_parts(
    context: Context, socket_path: str
) -> None:
    state = context.config.state
    for name in ("a", "b", "gone"):
        records.write(records.directory_of(state, name), {})
        os.utime(records.directory_of(state, name), (0, 0))
    engine = runtime(socket_path)
    async with running(context), engine.connected():
        assert engine.registered == pb.RegisterPluginRequest(plugin_name="nvshim", plugin_idx="90")
        # Event bits that a release does not know would fail the start; 0 would mean all events.
        assert (await engine.synchronize(("a",), (), ("b",))).events == 0x408
        assert context.state.faults.lines == {}
        await kept(state, "a", "b")
        await engine.call("StateChange", pb.StateChangeEvent(container={"id": "b"}))
        await engine.call("RemoveContainer", pb.RemoveContainerRequest(container={"id": "a"}))
        await engine.call("RemoveContainer", pb.RemoveContainerRequest(container={"id": "../b"}))
        await kept(state, "b")
        event = pb.StateChangeEvent(event=pb.REMOVE_CONTAINER, container={"id": "b"})
        await engine.call("StateChange", event)
        await kept(state)
        for method in ("PostCreateContainer", "ValidateContainerAdjustment", "RunPodSandbox"):
            with pytest.raises(RemoteError) as refused:
                await engine.call(method, pb.Empty())
            assert refused.value.status == Status.UNIMPLEMENTED
    engine.close()


async def test_an_engine_that_does_not_synchronize_it_is_a_fault_until_it_does(
    context: Context, socket_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_SYNCHRONIZATION", 0.01)
    engine = runtime(socket_path)
    async with running(context), engine.connected():
        await until_fault(context, NriUnsynchronized.code)
        await engine.synchronize(())
        assert context.state.faults.lines == {}
    engine.close()


async def test_no_answer_waits_until_records_are_removed(
    context: Context, socket_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A runtime waits two seconds, then it drops the plugin and containers have no GPUs."""
    end, waiting = threading.Event(), threading.Semaphore(0)

    def hang(*_: object) -> None:
        waiting.release()
        end.wait(20)

    monkeypatch.setattr(records, "remove", hang)
    monkeypatch.setattr(records, "reconcile", hang)
    monkeypatch.setattr(service, "_MOST_THREADS", 3)
    engine = runtime(socket_path)
    async with running(context), engine.connected():
        await engine.synchronize(())
        container = {"id": "a"}
        await engine.call("RemoveContainer", pb.RemoveContainerRequest(container=container))
        event = pb.StateChangeEvent(event=pb.REMOVE_CONTAINER, container=container)
        await engine.call("StateChange", event)
        for _ in range(3):
            assert await anyio.to_thread.run_sync(waiting.acquire, True, 20)
        await engine.call("RemoveContainer", pb.RemoveContainerRequest(container=container))
        threads = [each for each in threading.enumerate() if each.name == "nri records"]
        assert len(threads) == 3, "they do not become more and more"
        end.set()
    engine.close()


async def test_records_are_removed_again_after_no_thread_could_be_started(
    context: Context, socket_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_: object) -> None:
        raise RuntimeError("can't start new thread")

    state = context.config.state
    monkeypatch.setattr(service, "_MOST_THREADS", 1)
    engine = runtime(socket_path)
    async with running(context), engine.connected():
        await engine.synchronize(())
        records.write(records.directory_of(state, "a"), {})
        removed = pb.RemoveContainerRequest(container={"id": "a"})
        await until(lambda: "nri records" not in [each.name for each in threading.enumerate()])
        with monkeypatch.context() as patch, suppress(RemoteError):
            patch.setattr(threading.Thread, "start", start)
            await engine.call("RemoveContainer", removed)
        await engine.call("RemoveContainer", removed)
        await until(lambda: not os.listdir(f"{state}/nri"), timeout=5)
    engine.close()


async def test_it_comes_again_after_every_end_of_the_runtime(
    context: Context, socket_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_FIRST_PAUSE", 3600)
    monkeypatch.setattr(service, "_LONGEST_PAUSE", 3600)
    async with running(context):
        await until_fault(context, "NVSHIM-E00")  # nothing listens, and its directory is missing
        for _ in range(3):
            engine = runtime(socket_path)  # is noticed before the hour is over
            async with engine.connected():
                await engine.synchronize(())
                assert context.state.faults.lines == {}
            engine.close()
            await until_fault(context, NriEnded.code)


async def test_answers_have_the_gpus_of_the_grant_and_are_counted(
    context: Context, socket_path: str, node: Node, tmp_path: Path
) -> None:
    world = World(node, tmp_path)
    context = replace(context, config=world.config)
    publish(context.state.node, NodeSnapshot(inventory=world.inventory))
    engine, answers = runtime(socket_path), context.state.counters.nri_answers
    async with running(context), engine.connected():
        await engine.synchronize(())
        answer = await create(engine, f"{DEVICES}={FIRST}")
        assert "/dev/nvidia0" in [each.path for each in answer.adjust.linux.devices]
        for other in (
            await create(engine, f"{DEVICES}=all", uid=MINE),
            # That handler's shim or runtime injects this pod's GPUs.
            await create(engine, f"{DEVICES}={FIRST}", handler="nvidia"),
        ):
            assert other == pb.CreateContainerResponse()
        assert answers == {(OK,): 1}
        publish(context.state.node, NodeSnapshot())
        with pytest.raises(RemoteError, match="nri-undecided"):
            await create(engine, f"{DEVICES}={FIRST}")
        assert answers == {(OK,): 1, (REFUSED,): 1}
        publish(context.state.node, NodeSnapshot(inventory=world.inventory))
        assert (await create(engine, f"{DEVICES}={FIRST}")).HasField("adjust")
    engine.close()


async def test_what_takes_too_long_or_fails_is_an_error_and_no_silence(
    context: Context, socket_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = threading.Event()
    monkeypatch.setattr(service, "_ANSWER", 0.05)
    monkeypatch.setattr(service, "decide", lambda *_: end.wait(20) and NOTHING)
    engine = runtime(socket_path)
    async with running(context), engine.connected():
        await engine.synchronize(())
        with pytest.raises(RemoteError, match=r"nri-undecided.*0\.05 s"):
            await create(engine)
        end.set()
        monkeypatch.setattr(service, "_ANSWER", 60.0)

        def fail(*_: object) -> None:
            raise RuntimeError("a defect")

        monkeypatch.setattr(service, "decide", fail)
        with pytest.raises(RemoteError, match="a defect"):
            await create(engine)
        assert context.state.counters.nri_answers == {(REFUSED,): 1, (FAILED,): 1}
    engine.close()


async def test_decisions_that_hang_do_not_become_more_and_more_threads(
    context: Context, socket_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    end, begun = threading.Event(), list[object]()

    def hang(pod: object, *_: object) -> Any:
        begun.append(pod)
        end.wait(20)
        return NOTHING

    monkeypatch.setattr(service, "_MOST_THREADS", 2)
    monkeypatch.setattr(service, "_ANSWER", 0.05)
    monkeypatch.setattr(service, "decide", hang)
    engine = runtime(socket_path)
    async with running(context), engine.connected():
        await engine.synchronize(())
        for _ in range(4):
            with pytest.raises(RemoteError, match="nri-undecided"):
                await create(engine)
        assert len(begun) == 2
        end.set()
        monkeypatch.setattr(service, "_ANSWER", 20)
        with anyio.fail_after(20):
            while True:  # until both have ended
                with suppress(RemoteError):
                    assert await create(engine) == pb.CreateContainerResponse()
                    break
    engine.close()


@pytest.mark.parametrize("loses", ["time", "connection"])
async def test_a_decision_that_nobody_waits_for_any_more_leaves_no_record(
    context: Context, socket_path: str, node: Node, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, loses: str,
) -> None:  # fmt: skip
    world = World(node, tmp_path)
    context = replace(context, config=world.config)
    publish(context.state.node, NodeSnapshot(inventory=world.inventory))
    decided, end, removed = threading.Event(), threading.Event(), threading.Event()
    remove = records.remove

    def told(*arguments: str) -> None:
        remove(*arguments)
        removed.set()

    def slow(*arguments: Any) -> Any:
        decision = decide(*arguments)
        decided.set()
        end.wait(20)
        return decision

    monkeypatch.setattr(records, "remove", told)
    monkeypatch.setattr(service, "decide", slow)
    monkeypatch.setattr(service, "_ANSWER", 0.05 if loses == "time" else 30)
    engine = runtime(socket_path)
    async with running(context):
        async with engine.connected(), anyio.create_task_group() as tasks:
            await engine.synchronize(())
            if loses == "time":
                with pytest.raises(RemoteError, match="nri-undecided"):
                    await create(engine, f"{DEVICES}={FIRST}")
            else:
                tasks.start_soon(create, engine, f"{DEVICES}={FIRST}")
            await anyio.to_thread.run_sync(decided.wait, 20)
            assert world.kept() == ["c1"]
            tasks.cancel_scope.cancel()
        await until_fault(context, NriEnded.code)
        end.set()
        await anyio.to_thread.run_sync(removed.wait, 20)
        assert world.kept() == []
    engine.close()


async def test_it_registers_with_an_unusable_state_directory_and_refuses(
    context: Context, socket_path: str, node: Node, tmp_path: Path
) -> None:
    world = World(node, tmp_path)
    context = replace(context, config=world.config)
    publish(context.state.node, NodeSnapshot(inventory=world.inventory))
    os.makedirs(world.config.state, exist_ok=True)
    (Path(world.config.state) / "nri").write_text("not a directory")
    engine = runtime(socket_path)
    async with running(context), engine.connected():
        await engine.synchronize(())
        assert await create(engine, f"{DEVICES}=all", uid=MINE) == pb.CreateContainerResponse()
        with pytest.raises(RemoteError, match="rootfs-unavailable"):
            await create(engine, f"{DEVICES}={FIRST}")
    engine.close()
