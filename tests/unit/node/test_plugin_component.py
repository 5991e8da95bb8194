"""The device plugin as a service: from the agent's state to the kubelet's device list."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import anyio
import anyio.to_thread
import grpc  # type: ignore[import-untyped] # it ships no types
import pytest

from hooks.config import Config
from integration import backoff, detached
from integration.node.delivery import DeliveryMode
from integration.node.device_health.device_state import Condition
from integration.node.mps.clients import MpsDaemon
from integration.node.options import AUTO, NO, YES, Options
from integration.node.service import SERVICES, Context
from integration.node.services.plugin import answers, engine_watch
from integration.node.services.plugin import cdi as plugin_cdi
from integration.node.services.plugin import service as component
from integration.node.services.plugin.cdi import Specs, path_of
from integration.node.services.plugin.service import run
from integration.node.settings.source import Source
from integration.node.values.claims import ClaimDevice
from integration.node.values.health import HealthState
from integration.node.values.resources import (
    MPS,
    DeviceList,
    Mig,
    Settings,
    SharedResource,
    Sharing,
)
from integration.node.values.service_name import ServiceName
from integration.nvml.snapshot import NodeSnapshot
from integration.watcher import ANY, Watcher
from tests.harness.cri_server import CriServer
from tests.harness.fuse import FILE, fuse
from tests.harness.kubelet_plugins import KubeletPlugins, Plugin
from tests.harness.node_state import publish
from tests.harness.waiting import until
from tests.unit.node.test_plugin_allocation import GPUS, NODE, PART

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

    from api.proto import deviceplugin_pb2 as pb
    from hooks.node.inventory import Inventory
    from integration.cri.engine import Engine

pytestmark = pytest.mark.anyio

GPU = "nvidia.com/gpu"
SLICE = "nvidia.com/mig-1g.10gb"
CDI_NAME = f"k8s.device-plugin.nvidia.com/gpu={GPUS[0]}"
CDI_NAMES = frozenset(f"k8s.device-plugin.nvidia.com/gpu={each}" for each in (*GPUS, PART))
THERE = replace(NODE, driver=cast("Any", SimpleNamespace(version="550.1", root="/")))
BY_VARIABLE = Settings(mig_strategy=Mig.MIXED, device_list_strategies=(DeviceList.ENVVAR,))
BY_NAME = replace(BY_VARIABLE, device_list_strategies=(DeviceList.CDI_CRI,))


class Given(Source):
    """Settings that a test chooses."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings = settings

    def load(self) -> Settings:
        return self.settings


class World:
    """A kubelet, and the service while a test runs it."""

    def __init__(self, directory: Path) -> None:
        self.kubelet = KubeletPlugins(str(directory / "kubelet"))
        self.given = Given(BY_VARIABLE)
        self._nowhere = str(directory / "nowhere")

    @asynccontextmanager
    async def running(
        self,
        settings: Settings = BY_VARIABLE,
        mode: str = AUTO,
        engine: str = "",
        inventory: Inventory = THERE,
    ) -> AsyncIterator[Context]:
        self.given.settings = settings
        options = Options(
            "", 60, device_plugin=mode, kubelet_socket=self.kubelet.socket, settings=self.given,
            cri_sockets=(engine,) if engine else (),
        )  # fmt: skip
        nowhere = self._nowhere
        config = Config(
            dev=nowhere, proc=nowhere, sys=nowhere, host_root=nowhere, driver_root=nowhere,
            state=nowhere, cdi_spec_dirs=(f"{nowhere}/cdi",),
        )  # fmt: skip
        context = Context(config, options, lambda *_, **__: None)
        publish(context.state.node, NodeSnapshot(inventory=inventory))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run, context)
            try:
                yield context
            finally:
                tasks.cancel_scope.cancel()

    @asynccontextmanager
    async def serving(self, settings: Settings = BY_VARIABLE) -> AsyncIterator[Context]:
        """Run the service until the kubelet has both GPUs and the MIG device."""
        self.kubelet.start()
        async with self.running(settings) as context:
            await self.has(GPUS[0], GPUS[2])
            await self.has(PART, resource=SLICE)
            yield context

    async def has(self, *ids: str, resource: str = GPU) -> None:
        """Wait until exactly these devices are available."""
        await until(lambda: self.kubelet.healthy(resource) == set(ids))

    @property
    def plugin(self) -> Plugin:
        return self.kubelet.plugins[GPU]

    async def allocate(self, id_: str, resource: str = GPU) -> pb.ContainerAllocateResponse:
        plugin = self.kubelet.plugins[resource]
        return await anyio.to_thread.run_sync(plugin.allocate, id_)

    async def refuses(self, id_: str, code: str, resource: str = GPU) -> None:
        with pytest.raises(grpc.RpcError, match=f"NVSHIM-{code}"):
            await self.allocate(id_, resource)


def see(context: Context, inventory: Inventory | None = THERE, **change: Any) -> None:
    there = replace(inventory, **change) if inventory is not None else None
    publish(context.state.node, NodeSnapshot(inventory=there))


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path)
    yield world
    await anyio.to_thread.run_sync(world.kubelet.stop)


class SlowSpecs:
    """Keeps specs slowly, while a test blocks it."""

    def __init__(self) -> None:
        self.reached, self._goes_on = threading.Event(), threading.Event()
        self._goes_on.set()

    def keep(self, *_: Any) -> Specs:
        if not self._goes_on.is_set():
            self.reached.set()
            assert self._goes_on.wait(30)
        return Specs(devices=CDI_NAMES)

    @contextmanager
    def held_up(self) -> Iterator[None]:
        self._goes_on.clear()
        try:
            yield
        finally:
            self._goes_on.set()


@pytest.fixture
def specs(monkeypatch: pytest.MonkeyPatch) -> SlowSpecs:
    specs = SlowSpecs()
    monkeypatch.setattr(component, "keep_specs", specs.keep)
    return specs


async def test_what_cannot_be_seen_is_unhealthy_and_is_not_given(world: World) -> None:
    async with world.serving() as context:
        see(context, mig_devices=(), nvml_failure="NVML did not answer in time")
        await world.has(resource=SLICE)
        assert set(world.kubelet.devices(SLICE)) == {PART}
        await world.has(GPUS[0], GPUS[2])
        assert "NVSHIM-E2727" in context.state.faults.lines["plugin resources"]
        await world.refuses(PART, "E2705", SLICE)
        see(context, None)
        await world.has()
        assert set(world.kubelet.devices(GPU)) == {GPUS[0], GPUS[2]}
        see(context)
        await world.has(PART, resource=SLICE)
        await world.has(GPUS[0], GPUS[2])
        sick = Condition(HealthState.UNHEALTHY, reason="it has fallen off the bus")
        publish(context.state.health, {GPUS[0]: sick})
        await world.has(GPUS[2])
        assert context.state.faults.lines == {}


async def test_an_answer_goes_by_what_was_posted_just_now(world: World) -> None:
    async with world.serving() as context, anyio.create_task_group() as tasks:
        see(context, gpus=THERE.gpus[1:])
        tasks.start_soon(world.refuses, GPUS[0], "E27(05|30)")  # before or after the round


async def test_what_is_gone_is_not_given_though_nothing_was_worked_in_yet(
    world: World, specs: SlowSpecs
) -> None:
    async with world.serving() as context:
        with specs.held_up():
            other = replace(THERE.gpus[0], uuid="GPU-99999999-0000-4000-8000-000000000000")
            see(context, gpus=(other, *THERE.gpus[1:]))
            await until(specs.reached.is_set)
            await world.refuses(GPUS[0], "E2705")


async def test_what_is_gone_is_told_without_waiting_for_specs_and_what_is_new_is_not(
    world: World, specs: SlowSpecs
) -> None:
    async with world.serving() as context:
        with specs.held_up():
            see(context, gpus=THERE.gpus[1:])
            await until(lambda: set(world.kubelet.devices(GPU)) == {GPUS[2]})
            see(context)
            await anyio.sleep(0.1)
            assert set(world.kubelet.devices(GPU)) == {GPUS[2]}
        await until(lambda: set(world.kubelet.devices(GPU)) == {GPUS[0], GPUS[2]})


async def test_a_kubelet_that_begins_is_registered_with_before_anything_else(
    world: World, specs: SlowSpecs
) -> None:
    async with world.serving() as context:
        with specs.held_up():
            see(context, notes=("something is new",))
            await until(specs.reached.is_set)
            await anyio.to_thread.run_sync(world.kubelet.restart)
            await world.has(GPUS[0], GPUS[2])


async def test_no_answer_waits_for_a_round(world: World, specs: SlowSpecs) -> None:
    async with world.serving(BY_NAME) as context:
        with specs.held_up():
            see(context, gpus=THERE.gpus[:-1])
            await until(specs.reached.is_set)
            answer = await world.allocate(GPUS[0])
            assert [each.name for each in answer.cdi_devices] == [CDI_NAME]
            prefer = partial(world.plugin.preferred, [GPUS[0], GPUS[2]], 1)
            assert await anyio.to_thread.run_sync(prefer) == [GPUS[0]]
            await world.refuses(GPUS[2], "E27(05|30)")


async def test_while_settings_change_answers_go_wholly_by_the_old_ones_and_then_by_the_new(
    world: World, specs: SlowSpecs
) -> None:
    async with world.serving() as context:
        with specs.held_up():
            world.given.settings = BY_NAME
            publish(context.state.reloads, 1)
            await until(specs.reached.is_set)
            answer = await world.allocate(GPUS[0])
            assert answer.envs["NVIDIA_VISIBLE_DEVICES"] == GPUS[0]
            assert not answer.cdi_devices
        with anyio.fail_after(30):
            while not answer.cdi_devices:
                answer = await world.allocate(GPUS[0])
        assert [each.name for each in answer.cdi_devices] == [CDI_NAME]


async def test_while_the_directory_of_the_specs_hangs_health_is_announced_as_ever(
    world: World, specs: SlowSpecs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(component, "_LONGEST_KEEP", 0.1)
    monkeypatch.setattr(component, "_RETRY", 0.1)
    monkeypatch.setattr(answers, "_TO_CHECK", 0.1)
    ill = {GPUS[0]: Condition(HealthState.UNHEALTHY)}
    (tmp_path / "nowhere").mkdir()
    directory = str(tmp_path / "nowhere" / "cdi")
    monkeypatch.setattr(plugin_cdi, "path_of", lambda *_: f"{directory}/{FILE}")
    with fuse(directory) as server:
        async with world.serving(BY_NAME) as context:
            server.hang()
            publish(context.state.health, ill)
            await world.has(GPUS[2])
            await world.refuses(GPUS[2], "E2706")
            # What no spec is known to describe could only be refused.
            await until(lambda: "plugin cdi" in context.state.faults.lines)
            await world.has()
            assert "NVSHIM-E2712" in context.state.faults.lines["plugin cdi"]
            see(context, gpus=THERE.gpus[1:])
            await until(lambda: set(world.kubelet.devices(GPU)) == {GPUS[2]})
            server.go_on()
            await world.has(GPUS[2])
            assert "plugin cdi" not in context.state.faults.lines


class WrittenSpecs:
    """Keeps specs in one file, which is written if its content differs."""

    def __init__(self) -> None:
        self.path = ""

    def keep(self, _: Settings, __: Inventory | None, config: Config) -> Specs:
        self.path = path_of("gpu", config)
        if os.path.exists(self.path) and not os.path.getsize(self.path):
            return Specs(devices=CDI_NAMES)
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        with open(self.path, "w"):
            pass
        return Specs(devices=CDI_NAMES, written=(self.path,))


@pytest.mark.parametrize("change", [os.unlink, lambda path: os.truncate(path, 1)])
async def test_a_spec_that_was_changed_is_written_again_before_it_is_named(
    world: World, monkeypatch: pytest.MonkeyPatch, change: Callable[[str], None]
) -> None:
    specs = WrittenSpecs()
    monkeypatch.setattr(component, "keep_specs", specs.keep)
    monkeypatch.setattr(component, "_SWARM", 1000)  # so that no round comes before the answer
    monkeypatch.setattr(component, "_LONGEST_SWARM", 1000)
    async with world.serving(BY_NAME):
        await world.allocate(GPUS[0])
        for _ in range(2):
            change(specs.path)
            answer = await world.allocate(GPUS[0])
            assert [each.name for each in answer.cdi_devices] == [CDI_NAME]
            assert os.path.getsize(specs.path) == 0


async def test_what_is_named_by_a_spec_is_refused_while_that_cannot_be_written(
    world: World, specs: SlowSpecs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(component, "_LONGEST_REPAIR", 0.1)
    path = tmp_path / "nowhere/cdi/k8s.device-plugin.nvidia.com-gpu.json"
    path.parent.mkdir(parents=True)
    path.touch()
    async with world.serving(BY_NAME):
        with specs.held_up():
            path.unlink()
            await world.refuses(GPUS[0], "E2706")
        assert (await world.allocate(GPUS[0])).cdi_devices


async def test_a_spec_that_is_removed_right_after_it_was_written_is_written_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed: list[str] = []

    def keep_specs(_: Settings, __: Inventory | None, config: Config) -> Specs:
        path = path_of("gpu", config)
        if os.path.exists(path):
            return Specs(devices=CDI_NAMES)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w") as file:
            file.write("{}")
        if not removed:
            os.unlink(path)
            removed.append(path)
        return Specs(devices=CDI_NAMES, written=(path,))

    monkeypatch.setattr(component, "keep_specs", keep_specs)
    async with world.serving(BY_NAME):
        answer = await world.allocate(GPUS[0])
        assert [each.name for each in answer.cdi_devices] == [CDI_NAME]
        assert os.path.exists(removed[0])


async def test_what_no_spec_describes_is_unhealthy_until_one_does(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Allocate refuses it, and a Deployment would create one pod after another."""
    kept = [Specs(devices=CDI_NAMES - {CDI_NAME}, fault="no space")]
    monkeypatch.setattr(component, "keep_specs", lambda *_: kept[-1])
    world.kubelet.start()
    async with world.running(BY_NAME) as context:
        await world.has(GPUS[2])
        assert set(world.kubelet.devices(GPU)) == {GPUS[0], GPUS[2]}
        await world.refuses(GPUS[0], "E2706")
        kept.append(Specs(devices=CDI_NAMES))
        see(context, notes=("something is new",))
        await world.has(GPUS[0], GPUS[2])
        assert (await world.allocate(GPUS[0])).cdi_devices


async def test_without_a_required_channel_no_device_can_be_had(
    world: World, tmp_path: Path
) -> None:
    channels = tmp_path / "nowhere/nvidia-caps-imex-channels"
    world.kubelet.start()
    wanted = replace(BY_VARIABLE, imex_channels=(0,), imex_required=True)
    async with world.running(wanted) as context:
        await until(lambda: len(world.kubelet.devices(GPU)) == 2)
        assert world.kubelet.healthy(GPU) == set()
        assert "NVSHIM-E2707" in context.state.faults.lines["plugin imex"]
        await world.refuses(GPUS[0], "E2707")
        channels.mkdir(parents=True)
        (channels / "channel0").touch()
        await world.has(GPUS[0], GPUS[2])
        assert "plugin imex" not in context.state.faults.lines
        assert (await world.allocate(GPUS[0])).envs["NVIDIA_IMEX_CHANNELS"] == "0"
        (channels / "channel0").unlink()
        await world.has()
        await world.refuses(GPUS[0], "E2707")


async def test_without_a_spec_of_a_required_channel_no_device_can_be_had(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    channels = tmp_path / "nowhere/nvidia-caps-imex-channels"
    channels.mkdir(parents=True)
    (channels / "channel0").touch()
    monkeypatch.setattr(component, "keep_specs", lambda *_: Specs(devices=CDI_NAMES))
    world.kubelet.start()
    async with world.running(replace(BY_NAME, imex_channels=(0,), imex_required=True)):
        await until(lambda: len(world.kubelet.devices(GPU)) == 2)
        assert world.kubelet.healthy(GPU) == set()
        await world.refuses(GPUS[0], "E2706")


async def test_a_channel_that_comes_later_is_in_a_spec_before_a_device_can_be_had(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    channels = tmp_path / "nowhere/nvidia-caps-imex-channels"
    name = "k8s.device-plugin.nvidia.com/imex-channel=0"

    def keep_specs(*_: object) -> Specs:
        has_channel = (channels / "channel0").exists()
        return Specs(devices=CDI_NAMES | {name} if has_channel else CDI_NAMES)

    monkeypatch.setattr(component, "keep_specs", keep_specs)
    world.kubelet.start()
    async with world.running(replace(BY_NAME, imex_channels=(0,), imex_required=True)):
        await until(lambda: len(world.kubelet.devices(GPU)) == 2)
        assert world.kubelet.healthy(GPU) == set()
        channels.mkdir(parents=True)
        (channels / "channel0").touch()
        await world.has(GPUS[0], GPUS[2])
        answer = await world.allocate(GPUS[0])
        assert {each.name for each in answer.cdi_devices} == {CDI_NAME, name}


@pytest.mark.parametrize("node", ["nvidia-fs0", "gdrdrv", "infiniband/uverbs0"])
async def test_a_feature_whose_module_is_loaded_later_is_in_a_spec_then(
    world: World, rounds: Rounds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: str
) -> None:
    path, name = tmp_path / "nowhere" / node, "k8s.device-plugin.nvidia.com/gds=all"
    seen: list[tuple[bool, int]] = []  # whether the node exists, and how many rounds were done

    def keep_specs(*_: object) -> Specs:
        seen.append((path.exists(), len(rounds)))
        return Specs(devices=CDI_NAMES | {name} if path.exists() else CDI_NAMES)

    monkeypatch.setattr(component, "keep_specs", keep_specs)
    world.kubelet.start()
    async with world.running(replace(BY_NAME, gds=True)):
        await world.has(GPUS[0], GPUS[2])
        for is_loaded in (True, False):
            if is_loaded:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch()
            else:
                path.unlink()
            await until(lambda: seen[-1][0] is is_loaded and seen[-1][1] < len(rounds))  # noqa: B023
            answer = await world.allocate(GPUS[0])
            assert (name in {each.name for each in answer.cdi_devices}) is is_loaded


@pytest.mark.parametrize("node", ["nvidia-fs0", "nvidia-caps-imex-channels/channel0"])
async def test_a_node_that_is_made_again_is_in_a_spec_with_its_new_numbers(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: str
) -> None:
    """A module that is loaded again may have another major number."""
    path, other = tmp_path / "nowhere" / node, tmp_path / "other"
    path.parent.mkdir(parents=True, exist_ok=True)
    for each in (path, other):
        each.touch()
    numbers = other.stat().st_ino  # in place of the device's
    written: list[int] = []

    def keep_specs(*_: object) -> Specs:
        written.append(path.stat().st_ino)
        return Specs(devices=CDI_NAMES)

    monkeypatch.setattr(component, "keep_specs", keep_specs)
    world.kubelet.start()
    async with world.running(replace(BY_NAME, gds=True, imex_channels=(0,))):
        await world.has(GPUS[0], GPUS[2])
        os.rename(other, path)
        await until(lambda: written[-1] == numbers)


@pytest.mark.parametrize("where", ["host", "driver", "link"])
async def test_a_file_that_a_feature_mounts_is_in_a_spec_as_soon_as_it_is_there(
    world: World, rounds: Rounds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    root, name = tmp_path / "driver", "k8s.device-plugin.nvidia.com/gds=all"
    path = (tmp_path / "nowhere" if where == "host" else root) / "etc/cufile.json"
    if where == "link":
        path.parent.mkdir(parents=True)
        path.symlink_to("/usr/local/cuda/cufile.json")  # within the driver root
        path = root / "usr/local/cuda/cufile.json"
    seen: list[tuple[bool, int]] = []  # whether the file exists, and how many rounds were done

    def keep_specs(*_: object) -> Specs:
        seen.append((path.exists(), len(rounds)))
        return Specs(devices=CDI_NAMES | {name} if path.exists() else CDI_NAMES)

    monkeypatch.setattr(component, "keep_specs", keep_specs)
    world.kubelet.start()
    async with world.running(replace(BY_NAME, gds=True)) as context:
        await world.has(GPUS[0], GPUS[2])
        driver = cast("Any", SimpleNamespace(version="560.1", root=str(root)))
        publish(context.state.node, NodeSnapshot(inventory=replace(THERE, driver=driver)))
        for is_there in (True, False):
            if is_there:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch()
            else:
                path.unlink()
            await until(lambda: seen[-1][0] is is_there and seen[-1][1] < len(rounds))  # noqa: B023
            answer = await world.allocate(GPUS[0])
            assert (name in {each.name for each in answer.cdi_devices}) is is_there


async def test_what_mps_does_not_serve_yet_is_unhealthy(world: World) -> None:
    world.kubelet.start()
    sharing = Sharing(MPS, resources=(SharedResource(GPU, 2),))
    async with world.running(replace(BY_VARIABLE, sharing=sharing)) as context:
        await until(lambda: len(world.kubelet.devices(GPU)) == 4)
        assert world.kubelet.healthy(GPU) == set()
        await world.refuses(f"{GPUS[0]}::0", "E2735")
        publish(context.state.mps_daemons, {GPU: MpsDaemon(GPU, (GPUS[0],))})
        await world.has(f"{GPUS[0]}::0", f"{GPUS[0]}::1")
        assert "CUDA_MPS_PIPE_DIRECTORY" in (await world.allocate(f"{GPUS[0]}::0")).envs


@pytest.mark.usefixtures("specs")
async def test_the_engine_is_asked_when_it_starts_and_an_answer_waits_for_none(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold, held, unknown = threading.Event(), threading.Event(), DeliveryMode(())
    ask = engine_watch._ask

    def slow(sockets: list[str]) -> Engine | None:
        held.set()
        assert hold.wait(30)
        return ask(sockets)

    monkeypatch.setattr(engine_watch, "_ask", slow)
    world.kubelet.start()
    path = str(tmp_path / "engine.sock")
    with CriServer(path, "2.1.9", cdi=True) as engine:
        async with world.running(BY_NAME, engine=path) as context:
            await world.has(GPUS[0], GPUS[2])
            await until(held.is_set)
            # Not known yet: use both.
            assert by_both_ways(await world.allocate(GPUS[0])) == (True, True)
            hold.set()
            await until(lambda: context.state.delivery.value == DeliveryMode((DeviceList.CDI_CRI,)))
            assert by_both_ways(await world.allocate(GPUS[0])) == (True, False)
            hold.clear()
            held.clear()
            await anyio.to_thread.run_sync(partial(engine.restart, "1.6.20", cdi=None))
            assert by_both_ways(await world.allocate(GPUS[0])) == (True, True)
            hold.set()
            await until(lambda: "1.6.20" in (context.state.delivery.value or unknown).why)
            assert by_both_ways(await world.allocate(GPUS[0])) == (True, True)


def by_both_ways(answer: pb.ContainerAllocateResponse) -> tuple[bool, bool]:
    """Return whether an answer has the CDI names, and the variable."""
    return bool(answer.cdi_devices), answer.envs.get("NVIDIA_VISIBLE_DEVICES") == GPUS[0]


class Rounds(list[float]):
    """The results of the service's rounds."""

    begun = 0

    async def settled(self) -> None:
        """Wait until no round is under way, nor a call in a thread that may be a reason for one."""
        quiet = 0
        while quiet < 2:  # a thread is idle just before its caller knows
            await anyio.wait_all_tasks_blocked()
            threads = [each for each in threading.enumerate() if each.name == "run_detached"]
            is_quiet = self.begun == len(self) and len(threads) <= len(detached._idle)
            quiet = quiet + 1 if is_quiet else 0
            await anyio.sleep(0.01)


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> Rounds:
    """Return the results of the service's rounds."""
    done, once = Rounds(), component._Reconciler._round

    async def counted(reconciler: component._Reconciler) -> float:
        done.begun += 1
        done.append(await once(reconciler))
        return done[-1]

    monkeypatch.setattr(component._Reconciler, "_round", counted)
    return done


async def test_a_change_of_claims_is_told_to_the_kubelet_once_and_is_no_reason_for_more(
    world: World, tmp_path: Path, rounds: Rounds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(component, "_SWARM", 0)
    # Otherwise the round for our own new sockets may come after the count below.
    monkeypatch.setattr(component, "_PAUSE", 0)
    specs = tmp_path / "nowhere/cdi"  # from the configuration
    specs.mkdir(parents=True)
    async with world.serving() as context:
        await rounds.settled()
        before, told = len(rounds), len(world.plugin.lists)
        others = len(world.kubelet.plugins[SLICE].lists)
        claim = ClaimDevice("gpu", "node-1", "gpu-0", GPUS[0], GPUS[0])
        with Watcher(quiet=0) as watcher:
            watcher.follow({str(specs): ANY})
            for turn in range(5):
                publish(context.state.claimed_devices, (claim,))
                await world.has(GPUS[2])
                (specs / f"k8s.driver-claim_{turn}.json").write_text("{}")
                await watcher.wait()
                publish(context.state.claimed_devices, ())
                await world.has(GPUS[0], GPUS[2])
        await rounds.settled()
        assert len(world.plugin.lists) == told + 10
        assert len(world.kubelet.plugins[SLICE].lists) == others
        assert len(rounds) == before
        (specs / "k8s.device-plugin.nvidia.com-gpu.json").write_text("{}")
        await until(lambda: len(rounds) > before)


async def test_a_kubelet_that_has_lost_its_connection_is_registered_with_again_at_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backoff, "_FIRST_PAUSE", 1000)
    async with world.serving():
        before = world.plugin
        await anyio.to_thread.run_sync(before.close)
        await until(lambda: world.plugin is not before)
        await world.has(GPUS[0], GPUS[2])


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
    world: World,
) -> None:
    directory = world.kubelet.directory
    path = f"{directory}/nvidia-gpu.sock"
    async with world.serving() as context:
        assert len(context.state.resources.value) == 2
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(f"{path}.new")
            other.listen()
            os.rename(f"{path}.new", path)
            await until(lambda: context.state.resources.value == ())
            assert "NVSHIM-E2710" in context.state.faults.lines["plugin kubelet"]
            left = ["kubelet.sock", "nvidia-gpu.sock"]
            await until(lambda: sorted(os.listdir(directory)) == left)
        os.unlink(path)
        await until(lambda: len(context.state.resources.value) == 2)
        await world.has(GPUS[0], GPUS[2])


async def test_it_serves_without_a_kubelet_only_if_it_is_told_to(
    world: World, rounds: Rounds
) -> None:
    wanted = SERVICES[ServiceName.PLUGIN].is_wanted
    modes = [bool(wanted(Options("", 60, device_plugin=mode))) for mode in (NO, AUTO)]
    assert modes == [False, True]
    directory = world.kubelet.directory
    os.makedirs(directory)
    settings = replace(BY_VARIABLE, mig_strategy=Mig.NONE)
    async with world.running(settings, AUTO) as context:
        await until(lambda: context.state.settings.value is not None)
        see(context, notes=("something is new",))
        before = len(rounds)
        await until(lambda: len(rounds) > before)
        assert (context.state.resources.value, context.state.faults.lines) == ((), {})
        assert os.listdir(directory) == []
    async with world.running(settings, YES) as context:
        await until(lambda: os.listdir(directory) == ["nvidia-gpu.sock"])
        assert "NVSHIM-E2709" in context.state.faults.lines["plugin kubelet"]
    assert os.listdir(directory) == []


async def test_it_says_when_a_kubelet_has_the_devices_or_none_is_due(
    world: World, specs: SlowSpecs
) -> None:
    async with world.running() as context:  # without a kubelet
        await until(lambda: context.state.announced.value)
    world.kubelet.start()
    none = replace(THERE, gpus=(), mig_devices=())
    async with world.running(inventory=none) as context:
        await until(lambda: context.state.announced.value)
    with ExitStack() as held:
        held.enter_context(specs.held_up())
        async with world.running() as context:
            await until(specs.reached.is_set)
            assert not context.state.announced.value
            held.close()
            await until(lambda: context.state.announced.value)
            await world.has(GPUS[0], GPUS[2])
