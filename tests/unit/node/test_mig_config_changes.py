"""Events that interrupt the apply of a layout, or start another one."""

from __future__ import annotations

import fcntl
import os
import sys
import threading
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final

import anyio
import pytest

from hooks.config import Config
from integration.agent_errors import ApiServerRefused, ApiServerSilent
from integration.apiserver.client import ApiServer
from integration.node.options import Options
from integration.node.service import Context
from integration.node.services import mig_config
from integration.node.state.topic import Topic
from integration.node.values.service_name import ServiceName
from integration.nvml.snapshot import NodeSnapshot
from tests.harness.node_state import publish
from tests.harness.waiting import until
from tests.unit.node.inventories import inventory, node_with

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.anyio


async def test_a_gpu_that_is_away_during_its_reset_interrupts_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    applied: list[str] = []
    may_end = anyio.Event()

    async def apply(_: Context, name: str, __: object) -> str:
        applied.append(f"{name} begun")
        await may_end.wait()
        applied.append(f"{name} done")
        return mig_config.SUCCESS

    monkeypatch.setattr(mig_config, "_apply", apply)
    context = Context(Config(), Options(), say=lambda *_, **__: None)
    label = Topic("two", ServiceName.MIG_CONFIG, "")
    gpus = inventory().gpus
    both, one = (NodeSnapshot(node_with(*gpus[:count])) for count in (2, 1))
    publish(context.state.node, both)
    reports = mig_config._Reports(context, ApiServer("", 0, ""))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(mig_config._apply_once, context, label, reports)
        await until(lambda: applied == ["two begun"])
        publish(context.state.node, one)
        await anyio.wait_all_tasks_blocked()
        publish(context.state.node, both)
        await anyio.wait_all_tasks_blocked()
        may_end.set()
        await until(lambda: applied == ["two begun", "two done"])
        # It is applied again for a GPU that is now missing.
        publish(context.state.node, one)


@pytest.mark.parametrize("state", [mig_config.SUCCESS, mig_config.FAILED])
async def test_it_is_applied_again_when_a_gpu_returns_to_service(
    monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    applied = 0

    async def apply(*_: object) -> str:
        nonlocal applied
        applied += 1
        return state

    monkeypatch.setattr(mig_config, "_apply", apply)
    context = Context(Config(), Options(), say=lambda *_, **__: None)
    label = Topic("two", ServiceName.MIG_CONFIG, "")
    one, two = inventory().gpus
    well = NodeSnapshot(node_with(one, two))
    publish(context.state.node, well)
    reports = mig_config._Reports(context, ApiServer("", 0, ""))

    async def follow() -> None:
        while True:
            await mig_config._apply_once(context, label, reports)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(follow)
        await until(lambda: applied == 1)
        await anyio.wait_all_tasks_blocked()
        publish(context.state.node, NodeSnapshot(node_with(one, replace(two, drained="a reset"))))
        await anyio.wait_all_tasks_blocked()
        assert applied == 1
        publish(context.state.node, well)
        if state == mig_config.SUCCESS:
            await until(lambda: applied == 2)
        await anyio.wait_all_tasks_blocked()
        assert applied == (2 if state == mig_config.SUCCESS else 1)
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("state", [mig_config.SUCCESS, mig_config.FAILED])
async def test_a_state_is_told_when_the_server_is_back(
    monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    monkeypatch.setattr(mig_config, "_UNANSWERED", 0.02)
    context = Context(Config(), Options(), say=lambda *_, **__: None)
    is_away, told = True, list[tuple[str, str]]()

    class Reports(mig_config._Reports):
        def _write(self, state: str, message: str) -> None:
            if is_away:
                raise ApiServerSilent("to label the Node", found="no answer")
            told.append((state, message))

    async def apply(_: Context, name: str, reports: mig_config._Reports) -> str:
        await reports.write(state, name)
        return state

    monkeypatch.setattr(mig_config, "_apply", apply)
    publish(context.state.node, NodeSnapshot(node_with(*inventory().gpus)))
    label = Topic("two", ServiceName.MIG_CONFIG, "")
    reports = Reports(context, ApiServer("", 0, ""))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(mig_config._apply_once, context, label, reports)
        await until(lambda: "mig-config state" in context.state.faults.lines)
        is_away = False
        await until(lambda: told == [(state, "two")])
        tasks.cancel_scope.cancel()


async def test_a_label_that_is_followed_again_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is none before that watch ends, too."""
    monkeypatch.setattr(mig_config, "_UNANSWERED", 0.0)
    context = Context(Config(), Options(), say=lambda *_, **__: None)
    faults: list[dict[str, str]] = []
    is_over = threading.Event()

    class Quiet:
        def next(self) -> None:
            is_over.wait()

        def close(self) -> None:
            is_over.set()

    class Server(ApiServer):
        def call(self, *_: Any) -> dict[str, Any]:
            faults.append(dict(context.state.faults.lines))
            if len(faults) == 1:
                raise ApiServerSilent("to read the Node", found="no answer")
            return {}

        def watch(self, *_: Any) -> Any:
            return Quiet()

    label = Topic("", ServiceName.MIG_CONFIG, "")
    async with anyio.create_task_group() as tasks:
        server = Server("", 0, "")
        reports = mig_config._Reports(context, server)
        tasks.start_soon(mig_config._follow, context, server, label, reports)
        await until(lambda: len(faults) > 1 and not context.state.faults.lines)
        tasks.cancel_scope.cancel()
    assert "mig-config label" in faults[1]


async def test_a_node_that_has_not_changed_for_long_is_followed_all_the_same() -> None:
    """A server with many Nodes forgets its version after a minute or two."""
    context, started = Context(Config(), Options(), say=lambda *_, **__: None), list[str]()
    is_over = threading.Event()

    class Quiet:
        def next(self) -> None:
            is_over.wait()

        def close(self) -> None:
            is_over.set()

    class Server(ApiServer):
        def call(self, *_: Any) -> dict[str, Any]:
            return {"metadata": {"resourceVersion": "7", "labels": {mig_config.LABEL: "two"}}}

        def watch(self, _: str, version: str, __: Any) -> Any:
            started.append(version)
            if version:
                raise ApiServerRefused("to watch /api/v1/nodes", found="410 Gone: too old")
            return Quiet()

    label, server = Topic("", ServiceName.MIG_CONFIG, ""), Server("", 0, "")
    reports = mig_config._Reports(context, server)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(mig_config._follow, context, server, label, reports)
        await until(lambda: started)
        await anyio.wait_all_tasks_blocked()
        assert (label.value, context.state.faults.lines) == ("two", {})
        tasks.cancel_scope.cancel()


async def test_nothing_is_pending_once_the_label_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    context = Context(Config(), Options(), say=lambda *_, **__: None)
    told: list[Any] = []

    class Server(ApiServer):
        def call(self, method: str, _: str, body: Any = None, __: Any = None) -> dict[str, Any]:
            if method == "PATCH":
                told.extend(body["metadata"]["labels"].values())
            return {"metadata": {"labels": {mig_config.STATE: told[-1]} if told else {}}}

    async def apply(_: Context, __: str, reports: mig_config._Reports) -> str:
        await reports.write(mig_config.PENDING, "")
        await anyio.sleep_forever()
        return ""

    monkeypatch.setattr(mig_config, "_apply", apply)
    publish(context.state.node, NodeSnapshot(node_with(*inventory().gpus)))
    label = Topic("", ServiceName.MIG_CONFIG, "")
    publish(label, "two")
    reports = mig_config._Reports(context, Server("", 0, ""))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(mig_config._apply_once, context, label, reports)
        await until(lambda: told == ["pending"])
        publish(label, "")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(mig_config._apply_once, context, label, reports)
        await until(lambda: told == ["pending", None])
        tasks.cancel_scope.cancel()


class Node(ApiServer):
    """A server with a Node that may refuse events, or answer late."""

    states: ClassVar[list[str | None]] = []  # those that the label of the state had
    asked: ClassVar[list[str]] = []  # the methods of all calls
    refuses: ClassVar[list[str]] = []  # those of the next calls that are refused
    may_label: ClassVar[threading.Event] = threading.Event()

    def call(self, method: str, _: str, body: Any = None, __: Any = None) -> dict[str, Any]:
        self.asked.append(method)
        if method in self.refuses:
            self.refuses.remove(method)
            raise ApiServerSilent(f"to {method}", found="no answer")
        if method == "PATCH":
            self.may_label.wait()
            self.states.append(body["metadata"]["labels"][mig_config.STATE])
        state = self.states[-1] if self.states else None
        return {"metadata": {"labels": {} if state is None else {mig_config.STATE: state}}}


@pytest.fixture
def node() -> Node:
    node = Node("", 0, "")
    node.states.clear()
    node.asked.clear()
    node.refuses.clear()
    node.may_label.set()
    return node


async def test_a_state_that_is_taken_without_its_event_is_not_the_last(node: Node) -> None:
    reports = mig_config._Reports(Context(Config(), Options(), say=lambda *_, **__: None), node)
    await reports.write(mig_config.SUCCESS, "the GPUs are as one says")
    node.refuses.append("POST")
    await reports.write(mig_config.PENDING, "the layout one waits for a claim")
    await reports.write(mig_config.SUCCESS, "the GPUs are as one says")
    assert node.states == ["success", "pending", "success"]
    node.refuses.append("POST")
    await reports.write(mig_config.PENDING, "the layout one waits for a claim")
    await reports.withdraw()
    assert node.states[3:] == ["pending", None]


async def test_a_node_that_is_registered_again_gets_its_state_again(node: Node) -> None:
    context = Context(Config(), Options(), say=lambda *_, **__: None)
    reports = mig_config._Reports(context, node)
    labels = {mig_config.LABEL: "one"}
    await reports.restore({"labels": labels})
    assert node.states == [], "nothing is known yet"
    await reports.write(mig_config.SUCCESS, "the GPUs are as one says")
    node.asked.clear()
    await reports.restore({"labels": {**labels, mig_config.STATE: "success"}})
    await reports.restore({})
    assert node.asked == []
    node.states.append(None)  # the new Node
    node.refuses.append("GET")
    await reports.restore({"labels": labels})
    assert "mig-config state" in context.state.faults.lines
    await reports.restore({"labels": labels})
    assert node.states == ["success", None, "success"]
    assert node.asked == ["GET", "GET", "PATCH"]
    assert not context.state.faults.lines
    await reports.write(mig_config.PENDING, "")
    node.states.append("success")  # a later state, written just before it is restored
    await reports.restore({"labels": labels})
    assert node.states[-1] == "success"


async def test_a_state_that_is_given_up_is_not_taken_after_a_later_one(node: Node) -> None:
    reports = mig_config._Reports(Context(Config(), Options(), say=lambda *_, **__: None), node)
    node.may_label.clear()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(reports.write, mig_config.PENDING, "")
        await until(lambda: "PATCH" in node.asked)
        tasks.cancel_scope.cancel()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(reports.withdraw)
        await anyio.wait_all_tasks_blocked()
        node.may_label.set()
    assert node.states == ["pending", None]


async def test_a_state_whose_thread_begins_late_is_not_taken_after_a_later_one(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    late: list[Callable[[], Any]] = []

    async def run(do: Callable[..., Any], *arguments: object) -> Any:
        if not late:
            late.append(partial(do, *arguments))
            await anyio.sleep_forever()
        return do(*arguments)

    monkeypatch.setattr(mig_config, "run_detached", run)
    reports = mig_config._Reports(Context(Config(), Options(), say=lambda *_, **__: None), node)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(reports.write, mig_config.PENDING, "")
        await until(lambda: late)
        tasks.cancel_scope.cancel()
    await reports.withdraw()
    late[0]()
    assert node.states == []


async def test_a_pending_state_goes_when_the_server_is_back(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mig_config, "_UNANSWERED", 0.0)
    context = Context(Config(), Options(), say=lambda *_, **__: None)
    reports = mig_config._Reports(context, node)
    await reports.write(mig_config.PENDING, "")
    node.refuses.append("PATCH")
    label = Topic("", ServiceName.MIG_CONFIG, "")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(mig_config._apply_once, context, label, reports)
        await until(lambda: node.states == ["pending", None])
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("state", ["pending", "success", "failed"])
async def test_only_a_pending_state_goes_if_the_label_went_while_no_agent_ran(
    node: Node, state: str
) -> None:
    node.states.append(state)
    context = Context(Config(), Options(), say=lambda *_, **__: None)
    reports = mig_config._Reports(context, node)
    await reports.withdraw()
    await reports.withdraw()
    assert node.states == [state, *([None] if state == "pending" else [])]
    assert node.asked.count("GET") == 1


async def test_a_layout_that_meets_a_reset_waits_for_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reset began after the agent had looked, and before the program had the lock."""
    looks = iter([False, True, True])
    monkeypatch.setattr(mig_config, "is_resetting", lambda _: next(looks, False))
    monkeypatch.setattr(mig_config, "_PAUSE", 0.0)
    said: list[tuple[str, str]] = []
    lock = os.open(tmp_path / "reset.lock", os.O_WRONLY | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)

    class Reports:
        async def write(self, state: str, message: str) -> None:
            if not said:
                os.close(lock)
            said.append((state, message))

    def command(_: Context, name: str) -> Iterator[str]:
        yield from (sys.executable, "-c", APPLY, name, str(tmp_path / "reset.lock"))

    reports: Any = Reports()
    monkeypatch.setattr(mig_config, "_command", command)
    context = Context(replace(Config(), state=str(tmp_path)), Options(), say=lambda *_, **__: None)
    assert await mig_config._apply(context, "one", reports) == mig_config.SUCCESS
    assert [state for state, _ in said] == ["pending", "pending", "success"]


async def test_a_layout_whose_program_is_killed_has_failed_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[tuple[str, str]] = []

    class Reports:
        async def write(self, state: str, message: str) -> None:
            said.append((state, message))

    def command(_: Context, __: str) -> Iterator[str]:
        yield from ("sh", "-c", "echo GPU 0: creates an instance >&2; kill -KILL $$")

    reports: Any = Reports()
    monkeypatch.setattr(mig_config, "_command", command)
    context = Context(replace(Config(), state=str(tmp_path)), Options(), say=lambda *_, **__: None)
    assert await mig_config._apply(context, "one", reports) == mig_config.FAILED
    assert said[-1] == (
        "failed", "`nvshim mig apply` exited with -9: GPU 0: creates an instance"
    )  # fmt: skip


# Like `nvshim mig apply`, it refuses to run in parallel, and undoes its changes.
APPLY: Final = """
import fcntl, signal, sys, time
layout, file = sys.argv[1:]
lock = open(file, "w")
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except OSError:
    sys.exit("NVSHIM-E2645 reset-running: another one is running")
if layout == "slow":
    def undo(*_):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        time.sleep(0.5)
        sys.exit(1)
    signal.signal(signal.SIGINT, undo)
    print("destroys an instance", file=sys.stderr, flush=True)
    time.sleep(60)
"""


async def test_a_layout_waits_until_the_one_before_is_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mig_config, "_TO_UNDO", 0.1)
    monkeypatch.setattr(mig_config, "_PAUSE", 0.05)

    def command(_: Context, name: str) -> Iterator[str]:
        yield from (sys.executable, "-c", APPLY, name, str(tmp_path / "reset.lock"))

    class Reports:
        async def write(self, state: str, message: str) -> None:
            said.append((state, message))

    said: list[tuple[str, str]] = []
    reports: Any = Reports()
    monkeypatch.setattr(mig_config, "_command", command)
    config = replace(Config(), state=str(tmp_path))
    context = Context(config, Options(), say=lambda *_, **__: None)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(mig_config._apply, context, "slow", reports)
        await until(lambda: said == [("pending", "")])
        tasks.cancel_scope.cancel()
    said.clear()
    assert await mig_config._apply(context, "next", reports) == mig_config.SUCCESS
    assert said[-1][0] == "success"
    assert said[0][1].startswith("the layout next waits for")
