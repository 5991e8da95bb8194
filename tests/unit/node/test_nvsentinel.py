"""The GPU health events that NVSentinel's platform connector gets, over real gRPC."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import anyio
import pytest
from google.protobuf.empty_pb2 import Empty

from api.proto import nvsentinel_pb2 as pb
from hooks.config import Config
from hooks.node.gpus import Gpu
from integration import backoff
from integration.node.device_health.device_state import Condition
from integration.node.options import Options
from integration.node.service import Context
from integration.node.services import nvsentinel
from integration.node.services.nvsentinel import CHECK, Report, reports_of, run
from integration.node.values.health import HealthState
from integration.nvml.snapshot import NodeSnapshot
from shim.causes.xids import Action, Remedy
from tests.harness.grpc_server import serve
from tests.harness.node_state import publish
from tests.harness.waiting import until
from tests.unit.node.dra.test_slices import NODE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.anyio

GPU, OTHER, PART = "GPU-0", "GPU-1", "MIG-a"
LOST: Final = Condition(HealthState.UNHEALTHY, reason="XID 79: off", xid=79, remedy=Remedy.REBOOT)


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        (Condition(), Report(GPU, is_healthy=True)),
        (replace(LOST, state=HealthState.HEALTHY, reason="", remedy=""), Report(GPU, True)),
        (LOST, Report(GPU, False, True, f"XID 79: off; {Remedy.REBOOT}", 79, pb.RESTART_BM)),
        (replace(LOST, remedy=Action.RESET, xid=0),
         Report(GPU, False, True, f"XID 79: off; {Action.RESET}", 0, pb.COMPONENT_RESET)),
        (replace(LOST, remedy=Remedy.NOTHING),
         Report(GPU, False, True, f"XID 79: off; {Remedy.NOTHING}", 79, pb.NONE)),
        (replace(LOST, remedy="pray"),
         Report(GPU, False, True, "XID 79: off; pray", 79, pb.CONTACT_SUPPORT)),
        (replace(LOST, state=HealthState.SUSPECT, remedy=""),
         Report(GPU, False, False, "XID 79: off", 79, pb.NONE)),
        (replace(LOST, state=HealthState.RECOVERING), None),
    ],
    ids=["well", "well again", "reboot", "reset", "nothing", "else", "suspect", "recovering"],
)  # fmt: skip
def test_what_is_told_of_a_gpu(condition: Condition, expected: Report | None) -> None:
    assert reports_of({GPU: condition, PART: LOST}).get(GPU) == expected
    assert PART not in reports_of({PART: LOST})


@contextmanager
def connector(path: Path) -> Iterator[list[pb.HealthEvent]]:
    """Run a platform connector; yield the events that it receives."""
    heard: list[pb.HealthEvent] = []

    def answer(request: pb.HealthEvents, _: Any) -> Empty:
        heard.extend(request.events)
        return Empty()

    methods = {"HealthEventOccurredV1": (answer, pb.HealthEvents)}
    server = serve(str(path), "datamodels.PlatformConnector", methods)
    try:
        yield heard
    finally:
        server.stop()


def said(events: list[pb.HealthEvent]) -> list[tuple[str, bool]]:
    """Return the GPU of each event, "" for all of them, and whether it is healthy."""
    return [("".join(it.entityValue for it in e.entitiesImpacted), e.isHealthy) for e in events]


def has_said(events: list[pb.HealthEvent], expected: list[tuple[str, bool]]) -> bool:
    return said(events) == expected


def of_boot(tmp_path: Path, boot: str) -> Config:
    """Return the configuration of a machine in its boot of that name."""
    path = tmp_path / "proc/sys/kernel/random/boot_id"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{boot}\n")
    return Config(proc=str(tmp_path / "proc"), state=str(tmp_path / "state"))


@pytest.mark.parametrize("acts", [False, True])
async def test_the_newest_state_is_sent_once_the_connector_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, acts: bool
) -> None:
    monkeypatch.setattr(backoff, "_FIRST_PAUSE", 0.05)
    monkeypatch.setattr(backoff, "_LONGEST_PAUSE", 0.05)
    monkeypatch.setattr("integration.node.services.nvsentinel._LONGEST_PAUSE", 0.05)
    path = tmp_path / "nvsentinel.sock"
    options = Options(nvsentinel=str(path), nvsentinel_acts=acts, node_name="gpu-17")
    context = Context(of_boot(tmp_path, "one"), options, lambda *_, **__: None)
    health, faults = context.state.health, context.state.faults
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run, context)
        publish(health, {GPU: LOST, OTHER: Condition(), PART: LOST})
        await until(lambda: "NVSHIM-E2759" in faults.lines.get("nvsentinel", ""), "it is a fault")
        publish(health, {GPU: replace(LOST, xid=48), OTHER: Condition(), PART: LOST})
        with connector(path) as heard:
            await until(lambda: len(heard) == 3, "both are told")
            await until(lambda: not faults.lines.get("nvsentinel"), "the fault is over")
            assert said(heard) == [("", True), (GPU, False), (OTHER, True)]
            first = heard[1]
            assert (first.agent, first.checkName, first.nodeName, list(first.errorCode)) == (
                "nvshim-node", CHECK, "gpu-17", ["48"],
            )  # fmt: skip
            assert (first.isFatal, first.recommendedAction) == (True, pb.RESTART_BM)
            assert first.entitiesImpacted == [pb.Entity(entityType="GPU_UUID", entityValue=GPU)]
            strategy = pb.EXECUTE_REMEDIATION if acts else pb.STORE_ONLY
            assert {each.processingStrategy for each in heard} == {strategy}
            assert first.generatedTimestamp.seconds > 0
        # It restarts. Changes in the meantime are sent then, and none is sent twice.
        publish(health, {GPU: replace(LOST, state=HealthState.RECOVERING), OTHER: Condition()})
        publish(health, {GPU: Condition(), OTHER: Condition()})
        with connector(path) as heard:
            await until(lambda: said(heard) == [(GPU, True)], "it is well again")
            # It is lost, forgotten after a while, and another GPU is in its place.
            publish(health, {GPU: LOST, OTHER: Condition()})
            await until(lambda: len(heard) == 2, "it is lost")
            publish(health, {OTHER: Condition()})
            await until(lambda: len(heard) == 3, "it is forgotten")
            publish(health, {OTHER: LOST})
            await until(lambda: said(heard)[-1] == (OTHER, False), "the next change is reported")
            assert said(heard)[1:] == [(GPU, False), (GPU, True), (OTHER, False)]
        tasks.cancel_scope.cancel()


async def test_what_an_earlier_boot_raised_is_cleared_once(tmp_path: Path) -> None:
    """A GPU that was replaced while the node was down is in no table of the new boot."""
    path = tmp_path / "nvsentinel.sock"
    options = Options(nvsentinel=str(path))

    async def told(boot: str, health: dict[str, Condition], events: int) -> list[pb.HealthEvent]:
        """Return what an agent sends first."""
        context = Context(of_boot(tmp_path, boot), options, lambda *_, **__: None)
        with connector(path) as heard:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(run, context)
                publish(context.state.health, health)
                await until(lambda: len(heard) == events, "all is told")
                publish(context.state.health, {**health, "GPU-last": LOST})
                await until(lambda: said(heard)[-1] == ("GPU-last", False), "the next change, too")
                tasks.cancel_scope.cancel()
        return heard[:-1]

    assert said(await told("one", {GPU: LOST}, 2)) == [("", True), (GPU, False)]
    # Only what is forgotten is cleared, so a drain that runs is not cancelled.
    last = ("GPU-last", True)
    assert said(await told("one", {GPU: LOST}, 2)) == [(GPU, False), last]
    heard = await told("two", {OTHER: LOST}, 2)
    assert said(heard) == [("", True), (OTHER, False)]
    # The connector sorts a batch by time, and an event without an entity clears all before it.
    assert heard[0].generatedTimestamp.seconds < heard[1].generatedTimestamp.seconds
    assert said(await told("two", {OTHER: LOST}, 2)) == [(OTHER, False), last]


def lacks(record: Path) -> bool:
    """Return whether the record names no GPU that is raised."""
    return GPU not in record.read_text()


def agent(tmp_path: Path, gpus: tuple[Gpu, ...] | None) -> Context:
    """Return the context of an agent; its node has these GPUs, or its inventory cannot be read."""
    options = Options(nvsentinel=str(tmp_path / "nvsentinel.sock"))
    context = Context(of_boot(tmp_path, "one"), options, lambda *_, **__: None)
    inventory = None if gpus is None else replace(NODE, gpus=gpus, mig_devices=())
    publish(context.state.node, NodeSnapshot(inventory))
    return context


async def test_what_an_earlier_boot_raised_is_cleared_where_no_gpu_is_left(tmp_path: Path) -> None:
    for expected in ([("", True)], list[tuple[str, bool]]()):
        context, whole = agent(tmp_path, ()), [*expected, (GPU, False)]
        with connector(tmp_path / "nvsentinel.sock") as heard:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(run, context)
                await until(partial(has_said, heard, expected), "all is told")
                publish(context.state.health, {GPU: LOST})
                await until(partial(has_said, heard, whole), "nothing else is")
                publish(context.state.health, {})
                await until(partial(has_said, heard, [*whole, (GPU, True)]), "it is forgotten")
                record = tmp_path / "state" / "nvsentinel.boot"
                await until(partial(lacks, record), "that is recorded")
                tasks.cancel_scope.cancel()


@pytest.mark.parametrize("gpus", [(), None], ids=["no GPU is left", "the driver is gone"])
async def test_a_gpu_that_is_removed_while_no_agent_runs_is_cleared(
    tmp_path: Path, gpus: tuple[Gpu, ...] | None
) -> None:
    with connector(tmp_path / "nvsentinel.sock") as heard:
        async with anyio.create_task_group() as tasks:
            context = agent(tmp_path, NODE.gpus)
            tasks.start_soon(run, context)
            publish(context.state.health, {GPU: LOST, OTHER: Condition()})
            record = tmp_path / "state" / "nvsentinel.boot"
            await until(lambda: record.exists() and GPU in record.read_text(), "it is recorded")
            tasks.cancel_scope.cancel()
        del heard[:]
        async with anyio.create_task_group() as tasks:
            context = agent(tmp_path, gpus)
            tasks.start_soon(run, context)
            if gpus is None:  # it may be there
                publish(context.state.health, {OTHER: LOST})
                await until(lambda: len(heard) == 2, "the table has other GPUs")
            await until(lambda: (GPU, True) in said(heard), "it is cleared")
            await until(partial(lacks, record), "that is recorded")
            tasks.cancel_scope.cancel()


async def test_while_nothing_is_known_of_gpus_nothing_is_cleared(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "nvsentinel.boot").write_text(f"one\n{GPU}\n")
    with connector(tmp_path / "nvsentinel.sock") as heard:
        async with anyio.create_task_group() as tasks:
            context = agent(tmp_path, None)
            tasks.start_soon(run, context)
            await anyio.wait_all_tasks_blocked()
            publish(context.state.node, NodeSnapshot(None, faults=("no driver",)))
            await anyio.wait_all_tasks_blocked()
            publish(context.state.health, {GPU: replace(LOST, xid=48)})
            await until(lambda: heard, "it is known again")
            tasks.cancel_scope.cancel()
    assert said(heard) == [(GPU, False)]


async def test_a_gpu_is_recorded_before_it_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent that is killed in between has not raised what the next one does not know."""
    record, recorded = tmp_path / "state" / "nvsentinel.boot", list[str]()

    async def send(*_: Any) -> None:
        recorded.append(record.read_text() if record.exists() else "")

    monkeypatch.setattr(nvsentinel, "_send", send)
    context = agent(tmp_path, NODE.gpus)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run, context)
        await until(lambda: recorded, "the earlier boot is cleared")
        publish(context.state.health, {GPU: LOST})
        await until(lambda: len(recorded) == 2, "it is raised")
        tasks.cancel_scope.cancel()
    assert recorded == ["", f"one\n{GPU}\n"]
