"""Answers from a snapshot, and the files that are read for each answer."""

from __future__ import annotations

import inspect
import os
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from hooks.config import Config
from hooks.node.drained import DRIVER, Drain
from integration.agent_errors import (
    CdiDeviceUnwritten,
    DeviceDrained,
    DeviceGone,
    DeviceTaken,
    DeviceUnknown,
    MpsNotReady,
)
from integration.cri.engine import Engine
from integration.devices import drain_marks as marks
from integration.node.device_health.device_state import Condition
from integration.node.mps.clients import MpsDaemon
from integration.node.options import Options
from integration.node.service import Context
from integration.node.services.plugin.answers import SnapshotAnswers
from integration.node.services.plugin.cdi import Specs, files_of, path_of
from integration.node.services.plugin.engine_watch import EngineAnswer
from integration.node.services.plugin.resources import resources_of
from integration.node.services.plugin.snapshot import Snapshot
from integration.node.values.claims import ClaimDevice
from integration.node.values.counters import OK, REFUSED
from integration.node.values.health import HealthState
from integration.node.values.resources import (
    MPS,
    DeviceList,
    Mig,
    Settings,
    SharedResource,
    Sharing,
)
from integration.nvml.snapshot import NodeSnapshot
from integration.nvml.topology import Topology
from tests.harness.node_state import publish
from tests.harness.raising import Kind, raises
from tests.unit.node.test_plugin_allocation import GPUS, NODE, PART

if TYPE_CHECKING:
    from pathlib import Path

    from api.errors import NvshimError

pytestmark = pytest.mark.anyio

GPU = "nvidia.com/gpu"
NAMES = frozenset(f"k8s.device-plugin.nvidia.com/gpu={each}" for each in GPUS)
BY_NAME = Settings(device_list_strategies=(DeviceList.CDI_CRI,))
BY_VARIABLE = Settings(device_list_strategies=(DeviceList.ENVVAR,))
READS = EngineAnswer(Engine("containerd", "2.1.9", {"enableCDI": True}))


class Reconciling:
    """Records the rounds that an answer requests."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.asked: list[str] = []
        self.repaired = snapshot

    async def repair_specs(self) -> None:
        self.asked.append("specs")
        self.snapshot = self.repaired

    def doubt_engine(self) -> None:
        self.asked.append("engine")

    def find_topology(self) -> None:
        self.asked.append("topology")


class World:
    """A node with three GPUs, the second in MIG mode, and its answers."""

    def __init__(self, directory: Path) -> None:
        self.config = Config(
            state=str(directory), dev=str(directory), cdi_spec_dirs=(str(directory),),
            drained=str(directory / "drained"),
        )  # fmt: skip
        self.lines: list[str] = []
        self.context = Context(self.config, Options("", 60), self._say)
        self.reconciling = Reconciling(self.snapshot())
        self.answers = SnapshotAnswers(self.context, self.reconciling)
        publish(self.context.state.node, NodeSnapshot(inventory=NODE))

    def snapshot(self, settings: Settings = BY_NAME, **more: Any) -> Snapshot:
        usual: dict[str, Any] = {
            "inventory": NODE, "resources": resources_of(NODE, settings), "engine": READS,
            "specs": Specs(NAMES, files=files_of(self.config)),
        }  # fmt: skip
        return Snapshot(settings=settings, **usual | more)

    def _say(self, _: str, event: str, **fields: Any) -> None:
        self.lines.append(f"{event} {fields}")


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def named(uuid: str) -> ClaimDevice:
    return ClaimDevice("gpu", "node-1", "gpu-0", uuid, uuid)


async def test_an_answer_is_counted_said_and_published(world: World) -> None:
    answer = await world.answers.allocate(GPU, [GPUS[0]])
    state = world.context.state
    assert [each.name for each in answer.cdi_devices] == [min(NAMES)]
    assert not answer.envs
    assert list(state.plugin_allocations.value) == [GPUS[0]]
    assert state.counters.allocations == {(GPU, OK): 1}
    assert world.lines == [f"allocated {{'resource': '{GPU}', 'devices': '{GPUS[0]}'}}"]
    assert world.reconciling.asked == []


@pytest.mark.parametrize("reason", ["topic", "gone", "drain", "id", "resource"])
async def test_what_the_snapshot_has_is_refused_by_what_is_known_now(
    world: World, tmp_path: Path, reason: str
) -> None:
    state, resource, device = world.context.state, GPU, GPUS[0]
    error: Kind[NvshimError]
    if reason == "topic":
        error = DeviceTaken
        publish(state.claimed_devices, (named(device),))
    elif reason == "gone":
        error = DeviceGone
        publish(state.node, NodeSnapshot(inventory=replace(NODE, gpus=NODE.gpus[1:])))
    elif reason == "drain":
        error = DeviceDrained
        (tmp_path / "drained").mkdir()
        (tmp_path / "drained" / device).touch()
    elif reason == "id":
        error, device = DeviceUnknown, "GPU-of-another-node"
    else:
        error, resource = DeviceUnknown, "nvidia.com/another"
    with raises(error):
        await world.answers.allocate(resource, [device])
    assert state.plugin_allocations.value == {}
    assert state.counters.allocations == {(resource, REFUSED): 1}
    if resource == GPU and device == GPUS[0]:
        assert await world.answers.allocate(resource, [GPUS[2]])


@pytest.mark.parametrize(
    ("drain", "out"),
    [
        (Drain(GPUS[1], NODE.gpus[1].bus_id), {PART}),
        (Drain(NODE.gpus[1].bus_id), {PART}),  # it had no UUID then
        (Drain(PART, NODE.gpus[1].bus_id), {PART}),
        (Drain(NODE.gpus[0].bus_id), {GPUS[0]}),
        (Drain("GPU-removed", NODE.gpus[0].bus_id), set()),  # a card that was there before
        (Drain(DRIVER), {GPUS[0], GPUS[2], PART}),
    ],
)
async def test_what_a_mark_takes_out_of_service_is_refused_at_once_whatever_names_it(
    world: World, drain: Drain, out: set[str]
) -> None:
    settings = replace(BY_VARIABLE, mig_strategy=Mig.MIXED)
    world.reconciling.snapshot = world.snapshot(settings)
    marks.put(world.config, drain)
    for resource, device in ((GPU, GPUS[0]), (GPU, GPUS[2]), ("nvidia.com/mig-1g.10gb", PART)):
        with raises(DeviceDrained) if device in out else nullcontext():
            await world.answers.allocate(resource, [device])


async def test_shares_are_refused_while_their_daemon_is_not_ready_now(world: World) -> None:
    settings = replace(BY_VARIABLE, sharing=Sharing(MPS, resources=(SharedResource(GPU, 2),)))
    world.reconciling.snapshot = world.snapshot(settings)
    share = f"{GPUS[0]}::0"
    with pytest.raises(MpsNotReady):
        await world.answers.allocate(GPU, [share])
    publish(world.context.state.mps_daemons, {GPU: MpsDaemon(GPU, GPUS)})
    answer = await world.answers.allocate(GPU, [share])
    assert "CUDA_MPS_PIPE_DIRECTORY" in answer.envs


async def test_a_device_that_is_unhealthy_now_is_given_and_that_is_said(world: World) -> None:
    sick = Condition(HealthState.UNHEALTHY, reason="it has fallen off the bus")
    publish(world.context.state.health, {GPUS[0]: sick})
    assert await world.answers.allocate(GPU, [GPUS[0]])
    assert "unhealthy" in world.lines[0]
    assert GPUS[0] in world.lines[0]


def test_nothing_is_awaited_between_the_check_of_claims_and_what_is_published() -> None:
    assert not inspect.iscoroutinefunction(SnapshotAnswers._allocate)
    assert not inspect.iscoroutinefunction(SnapshotAnswers.prefer)


@pytest.mark.parametrize("kind", ["gpu", "gds"])
async def test_specs_are_repaired_if_one_is_another_file_and_only_then(
    world: World, tmp_path: Path, kind: str
) -> None:
    path = tmp_path / os.path.basename(path_of(kind, world.config))
    path.write_text("{}")
    world.reconciling.snapshot = world.snapshot()
    await world.answers.allocate(GPU, [GPUS[0]])
    assert world.reconciling.asked == []
    (tmp_path / "other").write_text("{}")
    os.rename(tmp_path / "other", path)
    world.reconciling.repaired = world.snapshot(specs=Specs())
    with raises(CdiDeviceUnwritten):  # it checks the specs as they were written
        await world.answers.allocate(GPU, [GPUS[0]])
    assert world.reconciling.asked == ["specs"]


@pytest.mark.parametrize(("settings", "asked"), [(BY_NAME, ["specs"]), (BY_VARIABLE, [])])
async def test_specs_of_unknown_files_are_repaired_where_they_count(
    world: World, settings: Settings, asked: list[str]
) -> None:
    world.reconciling.snapshot = world.snapshot(settings, specs=Specs(NAMES))
    world.reconciling.repaired = world.snapshot(settings)
    assert await world.answers.allocate(GPU, [GPUS[0]])
    assert world.reconciling.asked == asked


async def test_while_the_engine_is_another_one_the_shim_is_told_as_well(
    world: World, tmp_path: Path
) -> None:
    snapshot = partial(world.snapshot, engine=replace(READS, sockets=((str(tmp_path / "s"), 1),)))
    world.reconciling.snapshot = snapshot()
    answer = await world.answers.allocate(GPU, [GPUS[0]])
    assert len(answer.cdi_devices) == 1
    assert answer.envs == {"NVIDIA_VISIBLE_DEVICES": GPUS[0]}
    assert world.reconciling.asked == ["engine"]
    world.reconciling.snapshot = snapshot(BY_VARIABLE)
    answer = await world.answers.allocate(GPU, [GPUS[0]])
    assert (len(answer.cdi_devices), len(answer.envs)) == (0, 1)


async def test_an_engine_that_was_not_asked_yet_is_taken_for_none(world: World) -> None:
    world.reconciling.snapshot = world.snapshot(engine=None)
    answer = await world.answers.allocate(GPU, [GPUS[0]])
    assert (len(answer.cdi_devices), len(answer.envs)) == (1, 1)
    assert world.reconciling.asked == []


def test_a_preference_goes_by_the_topology_that_is_known_and_asks_for_a_better_one(
    world: World,
) -> None:
    ids = [GPUS[0], GPUS[2]]
    assert world.answers.prefer(GPU, ids, [], 1) == (GPUS[0],)
    assert world.reconciling.asked == []
    world.reconciling.snapshot = world.snapshot(topology=Topology(failure="not yet"))
    assert world.answers.prefer(GPU, ids, [GPUS[2]], 1) == (GPUS[2],)
    assert world.reconciling.asked == ["topology"]


def test_a_preference_leaves_out_what_a_claim_has_taken_meanwhile(world: World) -> None:
    """The kubelet offers it until it has read the new list, and Allocate would refuse it."""
    first, last = GPUS[0], GPUS[2]
    publish(world.context.state.claimed_devices, (named(first),))
    assert world.answers.prefer(GPU, [first, last], [], 1) == (last,)
    assert world.answers.prefer(GPU, [first, last], [first], 1) == (first,)


def test_a_preference_is_for_the_last_device_where_claims_have_the_first(world: World) -> None:
    context = replace(world.context, options=replace(world.context.options, dra=True))
    answers = SnapshotAnswers(context, world.reconciling)
    first, last = sorted([GPUS[0], GPUS[2]])
    assert answers.prefer(GPU, [first, last], [], 1) == (last,)
