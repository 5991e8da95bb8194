"""The server of one resource, and all plugins, with a kubelet over a real socket."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import anyio.abc
import anyio.to_thread
import grpc  # type: ignore[import-untyped] # it ships no types
import grpc.aio  # type: ignore[import-untyped] # as above
import pytest

from api.proto import deviceplugin_pb2 as pb
from hooks.config import Config
from integration.agent_errors import CdiDeviceUnwritten
from integration.node.options import Options
from integration.node.service import Context
from integration.node.services.plugin.serving import Serving
from integration.node.values.counters import OK
from integration.node.values.health import HealthState
from integration.node.values.resources import Device, Resource
from tests.harness.kubelet_plugins import KubeletPlugins, Plugin
from tests.harness.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from pathlib import Path

pytestmark = pytest.mark.anyio

GPU = "nvidia.com/gpu"


def resource(*ids: str, name: str = GPU, state: HealthState = HealthState.HEALTHY) -> Resource:
    devices = tuple(
        Device(each, each, each, str(n), n, n, None, state) for n, each in enumerate(ids)
    )
    return Resource(name, devices)


class Answers:
    """Gives fixed answers."""

    async def allocate(self, resource: str, ids: Sequence[str]) -> pb.ContainerAllocateResponse:
        if "odd" in ids:
            raise RuntimeError("a\nmistake of ours")
        if "gone" in ids:
            raise CdiDeviceUnwritten(f"{resource} for a container", found="none", do="wait")
        return pb.ContainerAllocateResponse(envs={"ids": ",".join(ids)})

    def prefer(
        self, _: str, available: Sequence[str], __: Sequence[str], size: int
    ) -> Sequence[str]:
        return available[-size:]


class World:
    """A kubelet, and plugins with fixed answers."""

    def __init__(
        self, kubelet: KubeletPlugins, context: Context, tasks: anyio.abc.TaskGroup
    ) -> None:
        self.kubelet = kubelet
        self.counters = context.state.counters
        self.faults: dict[str, str] = {}
        self.serving = Serving(context, tasks, Answers(), self._fault)

    def _fault(self, resource: str, line: str) -> None:
        self.faults[resource] = line

    async def until(self, look: Callable[[], Any], *resources: Resource) -> None:
        """Serve these resources until ``look`` is true."""
        with anyio.fail_after(30):
            while not look():
                self.serving.serve(resources)
                await anyio.sleep(0.01)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    kubelet = KubeletPlugins(str(tmp_path / "kubelet"))
    options = Options("", 60, kubelet_socket=kubelet.socket)
    context = Context(Config(), options, lambda *_, **__: None)
    async with anyio.create_task_group() as tasks:
        kubelet.start()
        try:
            yield World(kubelet, context, tasks)
        finally:
            tasks.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(kubelet.stop)


async def aside(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a call in a thread, because the server runs in this event loop."""
    return await anyio.to_thread.run_sync(function, *arguments)


async def test_every_watcher_is_told_everything_from_the_beginning(world: World) -> None:
    kubelet = world.kubelet
    await world.until(lambda: kubelet.healthy(GPU) == {"a", "b"}, resource("a", "b"))
    path = f"{kubelet.directory}/nvidia-gpu.sock"
    second = await aside(Plugin, kubelet.plugins[GPU].request, path)
    await aside(second.watch)
    await world.until(lambda: len(second.devices) == 2, resource("a", "b"))
    sick = resource("a", "b", state=HealthState.UNHEALTHY)

    def is_told(watcher: Plugin) -> bool:
        return {each.health for each in watcher.devices.values()} == {"Unhealthy"}

    for watcher in (kubelet.plugins[GPU], second):
        await world.until(partial(is_told, watcher), sick)
        assert [len(each) for each in watcher.lists] == [2, 2]
        assert [node.ID for d in watcher.devices.values() for node in d.topology.nodes] == [0, 1]
    await aside(second.close)
    await world.until(lambda: kubelet.plugins[GPU].ended == "OK")  # the resource is gone
    assert kubelet.devices(GPU) == {}
    assert os.listdir(kubelet.directory) == ["kubelet.sock"]
    assert world.counters.updates[GPU,] >= 3


async def test_what_is_refused_says_why_and_what_fails_does_not_end_the_server(
    world: World,
) -> None:
    kubelet = world.kubelet
    await world.until(lambda: kubelet.healthy(GPU), resource("a"))
    plugin = kubelet.plugins[GPU]
    for asked, code, said in (
        ("gone", grpc.StatusCode.FAILED_PRECONDITION, "NVSHIM-E2706 cdi-device-unwritten: "),
        ("odd", grpc.StatusCode.INTERNAL, "NVSHIM-E2714 plugin-failed: "),
    ):
        with pytest.raises(grpc.RpcError) as refused:
            await aside(plugin.allocate, asked)
        assert refused.value.code() == code
        assert refused.value.details().startswith(said)
        assert "\n" not in refused.value.details()
    assert (await aside(plugin.allocate, "a", "b")).envs["ids"] == "a,b"
    assert await aside(plugin.preferred, ["a", "b", "c"], 2) == ["b", "c"]
    options: pb.DevicePluginOptions = await aside(plugin.options)
    assert not options.pre_start_required
    request = pb.PreStartContainerRequest(devices_ids=["a"])
    await aside(plugin.call, "PreStartContainer", request, pb.PreStartContainerResponse)


async def test_a_server_that_has_crashed_or_lost_its_socket_is_begun_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    kubelet, make, made = world.kubelet, grpc.aio.server, []

    def remember() -> Any:
        made.append(make())
        return made[-1]

    async def until_registered(times: int, most: int) -> None:
        # The kubelet calls the plugin before we get its answer to Register. A plugin that loses its
        # socket before that is not registered.
        registered = world.counters.registrations
        await world.until(lambda: registered.get((GPU, OK), 0) >= times, resource("a"))
        await world.until(lambda: kubelet.healthy(GPU), resource("a"))
        assert times <= len(kubelet.registrations) <= most

    monkeypatch.setattr(grpc.aio, "server", remember)
    await until_registered(1, 1)
    first = kubelet.plugins[GPU]
    os.unlink(f"{kubelet.directory}/nvidia-gpu.sock")
    await until_registered(2, 2)
    second = kubelet.plugins[GPU]
    assert second is not first
    await made[-1].stop(0)  # as if it stopped by itself
    await world.until(lambda: "NVSHIM-E2714" in world.faults.get(GPU, ""), resource("a"))
    # Once more if its watcher was gone before the end of the server was noticed.
    await until_registered(3, 4)
    await world.until(lambda: kubelet.plugins[GPU] is not second, resource("a"))
    assert world.faults[GPU] == ""


async def test_a_kubelet_that_goes_before_it_has_answered_is_registered_with_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    kubelet, watch = world.kubelet, Plugin.watch
    gone: list[Plugin] = []

    def go_once(plugin: Plugin) -> None:
        watch(plugin)
        if not gone:
            eventually(lambda: plugin.lists, "it has listened")
            plugin.close()
            after = Plugin(plugin.request, f"{kubelet.directory}/nvidia-gpu.sock")
            after.options()  # by now the server has noticed
            after.close()
            gone.append(plugin)

    monkeypatch.setattr(Plugin, "watch", go_once)
    await world.until(lambda: gone and kubelet.healthy(GPU), resource("a"))
    assert len(kubelet.registrations) == 2


async def test_one_resource_goes_and_the_other_hears_nothing(world: World) -> None:
    kubelet, other = world.kubelet, "nvidia.com/mig-1g.10gb"
    both = (resource("a"), resource("m", name=other))
    await world.until(lambda: kubelet.healthy(GPU) and kubelet.healthy(other), *both)
    stays = kubelet.plugins[other]
    await world.until(lambda: kubelet.plugins[GPU].ended == "OK", both[1])
    assert kubelet.plugins[GPU].lists[-1] == {}
    assert stays.ended == ""
    assert len(stays.lists) == 1
