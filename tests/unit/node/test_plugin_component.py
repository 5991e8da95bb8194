"""The device plugin as a part: what it makes of the board, and what the kubelet is told then."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import anyio
import anyio.to_thread
import grpc  # type: ignore[import-untyped] # it ships no types
import pytest

from hooks.config import Config
from integration.node import backoff
from integration.node.components import PARTS, Context
from integration.node.dra.values import ClaimDevice
from integration.node.health.machine import Condition
from integration.node.health.values import State
from integration.node.mps.containers import MpsDaemon
from integration.node.options import AUTO, NO, YES, Options
from integration.node.plugin import component
from integration.node.plugin.cdi import Specs, path_of
from integration.node.plugin.component import run
from integration.node.plugin.settings import Source
from integration.node.plugin.values import (
    MPS,
    DeviceList,
    Mig,
    Settings,
    SharedResource,
    Sharing,
)
from integration.node.refresh import Seen
from integration.node.watcher import ANY, Watcher
from tests.harness.kubelet_plugins import KubeletPlugins
from tests.harness.waiting import until
from tests.unit.node.test_plugin_allocation import GPUS, NODE, PART

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from hooks.node.inventory import Inventory

pytestmark = pytest.mark.anyio

GPU = "nvidia.com/gpu"
SLICE = "nvidia.com/mig-1g.10gb"
THERE = replace(NODE, driver=cast("Any", SimpleNamespace(version="550.1", root="/")))
BY_VARIABLE = Settings(mig_strategy=Mig.MIXED, device_list_strategies=(DeviceList.ENVVAR,))


class Given(Source):
    """Settings that are what a test says."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings = settings

    def load(self) -> Settings:
        return self.settings


@asynccontextmanager
async def running(
    tmp_path: Path, kubelet: KubeletPlugins, settings: Settings = BY_VARIABLE, mode: str = AUTO,
    *, said: list[str] | None = None,
) -> AsyncIterator[Context]:  # fmt: skip
    options = Options(
        "",
        60,
        device_plugin=mode,
        kubelet_socket=kubelet.socket,
        settings=Given(settings),
        cri_sockets=(),
    )
    nowhere = str(tmp_path / "nowhere")
    config = Config(
        dev=nowhere, proc=nowhere, sys=nowhere, host_root=nowhere, driver_root=nowhere,
        state=nowhere, cdi_spec_dirs=(nowhere,),
    )  # fmt: skip
    heard = said if said is not None else []
    context = Context(config, options, lambda _, line, **__: heard.append(line))
    context.board.post(seen=Seen(inventory=THERE))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run, context)
        try:
            yield context
        finally:
            tasks.cancel_scope.cancel()


@pytest.fixture
async def kubelet(tmp_path: Path) -> AsyncIterator[KubeletPlugins]:
    kubelet = KubeletPlugins(str(tmp_path / "kubelet"))
    yield kubelet
    await anyio.to_thread.run_sync(kubelet.stop)


async def test_what_cannot_be_seen_is_unhealthy_and_is_not_given(
    tmp_path: Path, kubelet: KubeletPlugins
) -> None:
    kubelet.start()
    async with running(tmp_path, kubelet) as context:
        await until(lambda: kubelet.healthy(SLICE) == {PART})
        await until(lambda: kubelet.healthy(GPU) == {GPUS[0], GPUS[2]})
        mute = replace(THERE, mig_devices=(), nvml_failure="NVML did not answer in time")
        context.board.post(seen=Seen(inventory=mute))
        await until(lambda: not kubelet.healthy(SLICE))
        assert set(kubelet.devices(SLICE)) == {PART}
        assert kubelet.healthy(GPU) == {GPUS[0], GPUS[2]}
        assert "NVSHIM-E2727" in context.board.faults["plugin resources"]
        with pytest.raises(grpc.RpcError, match="NVSHIM-E2705"):
            await anyio.to_thread.run_sync(kubelet.plugins[SLICE].allocate, PART)
        context.board.post(seen=Seen(inventory=None))
        await until(lambda: not kubelet.healthy(GPU))
        assert set(kubelet.devices(GPU)) == {GPUS[0], GPUS[2]}
        context.board.post(seen=Seen(inventory=THERE))
        await until(lambda: kubelet.healthy(SLICE) and len(kubelet.healthy(GPU)) == 2)
        sick = Condition(State.UNHEALTHY, reason="it has fallen off the bus")
        context.board.post(health={GPUS[0]: sick})
        await until(lambda: kubelet.healthy(GPU) == {GPUS[2]})
        assert context.board.faults == {}


async def test_an_answer_goes_by_what_was_posted_just_now(
    tmp_path: Path, kubelet: KubeletPlugins
) -> None:
    kubelet.start()
    async with running(tmp_path, kubelet) as context:
        await until(lambda: len(kubelet.healthy(GPU)) == 2)
        plugin = kubelet.plugins[GPU]
        left = replace(THERE, gpus=THERE.gpus[1:])

        async def ask() -> None:
            with pytest.raises(grpc.RpcError, match="NVSHIM-E2730"):
                await anyio.to_thread.run_sync(plugin.allocate, GPUS[0])

        async with anyio.create_task_group() as tasks:
            context.board.post(seen=Seen(inventory=left))
            tasks.start_soon(ask)


async def test_what_is_gone_is_not_given_though_nothing_was_worked_in_yet(
    tmp_path: Path, kubelet: KubeletPlugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck, go_on = threading.Event(), threading.Event()

    def keep(_: object, inventory: Inventory | None, __: object) -> Specs:
        if inventory is not THERE:
            stuck.set()
            go_on.wait(30)
        return Specs()

    monkeypatch.setattr("integration.node.plugin.component.keep_specs", keep)
    monkeypatch.setattr("integration.node.plugin.component._MOST_BEHIND", 0.1)
    kubelet.start()
    async with running(tmp_path, kubelet) as context:
        try:
            await until(lambda: len(kubelet.healthy(GPU)) == 2)
            other = replace(THERE.gpus[0], uuid="GPU-99999999-0000-4000-8000-000000000000")
            exchanged = replace(THERE, gpus=(other, *THERE.gpus[1:]))
            context.board.post(seen=Seen(inventory=exchanged))
            await until(stuck.is_set)
            with pytest.raises(grpc.RpcError, match="NVSHIM-E2705"):
                await anyio.to_thread.run_sync(kubelet.plugins[GPU].allocate, GPUS[0])
        finally:
            go_on.set()


async def test_what_is_gone_is_told_without_waiting_for_specs_and_what_is_new_is_not(
    tmp_path: Path, kubelet: KubeletPlugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on = threading.Event()
    may_go_on.set()

    def keep_specs(*_: Any) -> Specs:
        assert may_go_on.wait(30)
        return Specs()

    monkeypatch.setattr(component, "keep_specs", keep_specs)
    kubelet.start()
    async with running(tmp_path, kubelet) as context:
        await until(lambda: len(kubelet.healthy(GPU)) == 2)
        may_go_on.clear()
        try:
            context.board.post(seen=Seen(inventory=replace(THERE, gpus=THERE.gpus[1:])))
            await until(lambda: set(kubelet.devices(GPU)) == {GPUS[2]})
            context.board.post(seen=Seen(inventory=THERE))
            await anyio.sleep(0.1)
            assert set(kubelet.devices(GPU)) == {GPUS[2]}
        finally:
            may_go_on.set()
        await until(lambda: set(kubelet.devices(GPU)) == {GPUS[0], GPUS[2]})


async def test_a_kubelet_that_begins_is_registered_with_before_anything_else(
    tmp_path: Path, kubelet: KubeletPlugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_go_on = threading.Event(), threading.Event()

    def keep_specs(_: Settings, inventory: Inventory | None, __: Config) -> Specs:
        if inventory is not THERE:
            begun.set()
            assert may_go_on.wait(30)
        return Specs()

    monkeypatch.setattr(component, "keep_specs", keep_specs)
    kubelet.start()
    async with running(tmp_path, kubelet) as context:
        try:
            await until(lambda: len(kubelet.healthy(GPU)) == 2)
            context.board.post(seen=Seen(inventory=replace(THERE, notes=("something is new",))))
            await until(begun.is_set)
            await anyio.to_thread.run_sync(kubelet.restart)
            await until(lambda: len(kubelet.healthy(GPU)) == 2)
            assert not may_go_on.is_set()
        finally:
            may_go_on.set()


async def test_what_is_asked_for_while_settings_change_is_answered_by_the_new_ones(
    tmp_path: Path, kubelet: KubeletPlugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_go_on = threading.Event(), threading.Event()
    name = f"k8s.device-plugin.nvidia.com/gpu={GPUS[0]}"

    def keep_specs(settings: Settings, *_: Any) -> Specs:
        if DeviceList.CDI_CRI not in settings.device_list_strategies:
            return Specs()
        begun.set()
        assert may_go_on.wait(30)
        return Specs(devices=frozenset({name}))

    monkeypatch.setattr("integration.node.plugin.component.keep_specs", keep_specs)
    kubelet.start()
    async with running(tmp_path, kubelet) as context:
        await until(lambda: len(kubelet.healthy(GPU)) == 2)
        given = cast("Given", context.options.settings)
        given.settings = replace(BY_VARIABLE, device_list_strategies=(DeviceList.CDI_CRI,))
        context.board.post(hangups=1)
        await until(begun.is_set)
        answers = []

        async def ask() -> None:
            allocate = kubelet.plugins[GPU].allocate
            answers.append(await anyio.to_thread.run_sync(allocate, GPUS[0]))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await anyio.sleep(0.2)
            may_go_on.set()
        assert [each.name for each in answers[0].cdi_devices] == [name]


async def test_a_spec_that_is_removed_right_after_it_was_written_is_written_again(
    tmp_path: Path, kubelet: KubeletPlugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"k8s.device-plugin.nvidia.com/gpu={GPUS[0]}"
    removed: list[str] = []

    def keep_specs(_: Settings, __: Inventory | None, config: Config) -> Specs:
        path = path_of("gpu", config)
        if os.path.exists(path):
            return Specs(devices=frozenset({name}))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w") as file:
            file.write("{}")
        if not removed:
            os.unlink(path)
            removed.append(path)
        return Specs(devices=frozenset({name}), written=(path,))

    monkeypatch.setattr(component, "keep_specs", keep_specs)
    kubelet.start()
    by_name = replace(BY_VARIABLE, device_list_strategies=(DeviceList.CDI_CRI,))
    async with running(tmp_path, kubelet, by_name):
        await until(lambda: len(kubelet.healthy(GPU)) == 2)
        answer = await anyio.to_thread.run_sync(kubelet.plugins[GPU].allocate, GPUS[0])
        assert [each.name for each in answer.cdi_devices] == [name]
        assert os.path.exists(removed[0])


async def test_what_mps_does_not_serve_yet_is_unhealthy(
    tmp_path: Path, kubelet: KubeletPlugins
) -> None:
    kubelet.start()
    sharing = Sharing(MPS, resources=(SharedResource(GPU, 2),))
    settings = replace(BY_VARIABLE, sharing=sharing)
    async with running(tmp_path, kubelet, settings) as context:
        await until(lambda: len(kubelet.devices(GPU)) == 4)
        assert kubelet.healthy(GPU) == set()
        with pytest.raises(grpc.RpcError, match="NVSHIM-E2735"):
            await anyio.to_thread.run_sync(kubelet.plugins[GPU].allocate, f"{GPUS[0]}::0")
        context.board.post(mps={GPU: MpsDaemon(GPU, (GPUS[0],))})
        await until(lambda: kubelet.healthy(GPU) == {f"{GPUS[0]}::0", f"{GPUS[0]}::1"})
        answer = await anyio.to_thread.run_sync(kubelet.plugins[GPU].allocate, f"{GPUS[0]}::0")
        assert "CUDA_MPS_PIPE_DIRECTORY" in answer.envs


async def test_a_change_of_claims_is_told_to_the_kubelet_once_and_is_no_reason_for_more(
    tmp_path: Path, kubelet: KubeletPlugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds, once = [], component._Plugin._round

    async def counted(plugin: component._Plugin) -> float:
        rounds.append(plugin)
        return await once(plugin)

    monkeypatch.setattr(component._Plugin, "_round", counted)
    monkeypatch.setattr(component, "_SWARM", 0)
    kubelet.start()
    specs = tmp_path / "nowhere"  # as the configuration has it
    specs.mkdir()
    async with running(tmp_path, kubelet) as context:
        await until(lambda: kubelet.healthy(SLICE) and len(kubelet.healthy(GPU)) == 2)
        await anyio.wait_all_tasks_blocked()
        before, told = len(rounds), len(kubelet.plugins[GPU].lists)
        others = len(kubelet.plugins[SLICE].lists)
        claim = ClaimDevice("gpu", "node-1", "gpu-0", GPUS[0], GPUS[0])
        with Watcher(quiet=0) as watcher:
            watcher.follow({str(specs): ANY})
            for turn in range(5):
                context.board.post(claimed=(claim,))
                await until(lambda: kubelet.healthy(GPU) == {GPUS[2]})
                (specs / f"k8s.driver-claim_{turn}.json").write_text("{}")
                await watcher.wait()
                context.board.post(claimed=())
                await until(lambda: len(kubelet.healthy(GPU)) == 2)
        await anyio.wait_all_tasks_blocked()
        assert len(kubelet.plugins[GPU].lists) == told + 10
        assert len(kubelet.plugins[SLICE].lists) == others
        assert len(rounds) == before
        (specs / "k8s.device-plugin.nvidia.com-gpu.json").write_text("{}")
        await until(lambda: len(rounds) > before)


async def test_a_kubelet_that_has_lost_its_connection_is_registered_with_again_at_once(
    tmp_path: Path, kubelet: KubeletPlugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backoff, "_FIRST_PAUSE", 1000)
    kubelet.start()
    async with running(tmp_path, kubelet):
        await until(lambda: len(kubelet.healthy(GPU)) == 2)
        before = kubelet.plugins[GPU]
        await anyio.to_thread.run_sync(before.close)
        await until(lambda: kubelet.plugins[GPU] is not before)
        await until(lambda: len(kubelet.healthy(GPU)) == 2)


@pytest.mark.parametrize(
    ("first", "pauses"), [(1.0, [1, 2, 4, 8, 16, 30, 30]), (0.0, [0, 1, 2, 4, 8, 16, 30])]
)
def test_pauses_become_longer_until_it_has_gone_well_for_a_while(
    first: float, pauses: list[float]
) -> None:
    pausing = backoff.Backoff(first)
    assert [pausing.pause() for _ in pauses] == pauses
    assert [pausing.pause(31), pausing.pause(30)] == pauses[:2]


async def test_where_another_plugin_begins_ours_ends_and_tells_of_nothing_more(
    tmp_path: Path, kubelet: KubeletPlugins
) -> None:
    kubelet.start()
    path = f"{kubelet.directory}/nvidia-gpu.sock"
    async with running(tmp_path, kubelet) as context:
        await until(lambda: kubelet.healthy(SLICE) and len(kubelet.healthy(GPU)) == 2)
        assert len(context.board.resources) == 2
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(f"{path}.new")
            other.listen()
            os.rename(f"{path}.new", path)
            await until(lambda: context.board.resources == ())
            assert "NVSHIM-E2710" in context.board.faults["plugin kubelet"]
            await until(lambda: sorted(os.listdir(kubelet.directory)) == [
                "kubelet.sock", "nvidia-gpu.sock"
            ])  # fmt: skip
        os.unlink(path)
        await until(lambda: len(context.board.resources) == 2)
        await until(lambda: len(kubelet.healthy(GPU)) == 2)


async def test_it_serves_without_a_kubelet_only_if_it_is_told_to(
    tmp_path: Path, kubelet: KubeletPlugins
) -> None:
    wanted = PARTS["plugin"].is_wanted
    assert [bool(wanted(Options("", 60, device_plugin=mode))) for mode in (NO, AUTO)] == [
        False, True,
    ]  # fmt: skip
    os.makedirs(kubelet.directory)
    for mode, served in ((AUTO, []), (YES, ["nvidia-gpu.sock"])):
        async with running(
            tmp_path, kubelet, replace(BY_VARIABLE, mig_strategy=Mig.NONE), mode
        ) as (context):
            if mode == YES:
                await until(lambda: "nvidia-gpu.sock" in os.listdir(kubelet.directory))
                assert "NVSHIM-E2709" in context.board.faults["plugin kubelet"]
            else:
                await anyio.sleep(0.2)
            assert os.listdir(kubelet.directory) == served
    assert os.listdir(kubelet.directory) == []
