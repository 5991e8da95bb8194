"""The health service; the test publishes in place of the other services."""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import pytest

from hooks.config import Config
from integration.agent_errors import XidListWrong
from integration.containers.bundles import Container, Pod
from integration.containers.procfs import Procfs
from integration.node.device_health import health_store as store
from integration.node.device_health import requests
from integration.node.device_health.health_table import HealthTable
from integration.node.holders.values import Holding, Ledger
from integration.node.options import Options
from integration.node.service import Context
from integration.node.services.health import service
from integration.node.services.health.service import run
from integration.node.services.monitor import merging
from integration.node.services.monitor.service import EventForwarder
from integration.node.values.health import HealthState
from integration.nvml.snapshot import NodeSnapshot
from integration.nvml.values import DeviceSample, GpuEvent, GpuSample, Sample, SwitchError
from tests.harness.node_state import publish
from tests.harness.raising import raises
from tests.unit.node.inventories import inventory

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from integration.node.state.store import State

pytestmark = pytest.mark.anyio


@dataclass
class Nvml:
    """A sampler that answers what a test sets."""

    lost: str = ""
    failure: str = ""
    asked: int = 0
    said: list[Sample] = field(default_factory=list)

    async def sample(self, *, max_age: float, profile: bool = False) -> Sample:
        del max_age
        self.asked += 1
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        if self.failure:
            return Sample(now, failure=self.failure)
        mig = (DeviceSample("MIG-a"), DeviceSample("MIG-b"))
        gpus = (GpuSample("GPU-0", lost=self.lost), GpuSample("GPU-1", mig=mig))
        return Sample(now, gpus=gpus)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    for name in ("state", "sys/module/nvidia", "proc/sys/kernel/random"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "proc/sys/kernel/random/boot_id").write_text("one\n")
    return Config(
        state=str(tmp_path / "state"),
        proc=str(tmp_path / "proc"),
        sys=str(tmp_path / "sys"),
        health_quiet=0.2,
        health_longest_quiet=0.2,
        health_patience=0.3,
        health_window=0.5,
    )


@dataclass
class Agent:
    """The service as a test sees it."""

    state: State
    nvml: Nvml
    lines: list[tuple[str, str, dict[str, Any]]]
    forwarder: EventForwarder
    heard: int = 0

    async def until(self, look: Callable[[], bool], what: str) -> None:
        with anyio.move_on_after(10):
            while not look():  # noqa: ASYNC110 - at what others did
                await anyio.sleep(0.01)
            return
        raise AssertionError(f"{what}: {self.state.health.value} {self.lines}")

    async def becomes(self, uuid: str, state: HealthState) -> None:
        """Wait until a device has a state, or had it since the last wait: some are short."""

        def told() -> bool:
            for number, (_, event, fields) in enumerate(self.lines[self.heard :], self.heard + 1):
                if event.startswith("a device is") and (fields["device"], fields["state"]) == (
                    uuid, state
                ):  # fmt: skip
                    self.heard = number
                    return True
            return self.state.health.value[uuid].state == state

        await self.until(told, f"{uuid} {state}")

    def said(self, event: str) -> list[dict[str, Any]]:
        return [fields for _, said, fields in self.lines if said.startswith(event)]

    def tell(self, number: int, gpu: str = "GPU-0", **more: Any) -> None:
        """Send an error as the monitor does."""
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        self.state.gpu_events.send(replace(GpuEvent(now, "xid", gpu, xid=number), **more))

    def hear(self, number: int, gpu: str = "GPU-0", **more: Any) -> None:
        """Let the monitor receive an error from one of its sources."""
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        self.forwarder.add(replace(GpuEvent(now, "xid", gpu, xid=number), **more))


@asynccontextmanager
async def agent(config: Config, **options: Any) -> AsyncIterator[Agent]:
    lines: list[tuple[str, str, dict[str, Any]]] = []

    def say(level: str, event: str, **fields: Any) -> None:
        lines.append((level, event, fields))

    context = Context(config, Options("", 0.05, **options), say)
    nvml = Nvml()
    publish(context.state.node, NodeSnapshot(inventory=inventory()))
    publish(context.state.sampler, nvml)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run, context)
        forwarder = EventForwarder(context.state)
        tasks.start_soon(forwarder.keep)
        seen = Agent(context.state, nvml, lines, forwarder)
        await seen.until(lambda: "GPU-0" in context.state.health.value, "it begins")
        yield seen
        tasks.cancel_scope.cancel()


async def test_a_table_on_its_way_to_the_disk_at_the_end_does_not_replace_a_later_one(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, goes_on, ended = threading.Event(), threading.Event(), list[int]()
    write = store.write

    def slow(config: Config, table: HealthTable) -> None:
        if not begun.is_set():
            begun.set()
            goes_on.wait(60)
        write(config, table)
        ended.append(1)

    monkeypatch.setattr(service, "_SHUTDOWN", 60.0)
    config = replace(config, health_quiet=60.0, health_longest_quiet=60.0)
    async with agent(config) as it:
        monkeypatch.setattr(store, "write", slow)
        it.tell(79)
        await it.until(begun.is_set, "the table is on its way")
        it.tell(79, "GPU-1")
        await it.becomes("GPU-1", HealthState.UNHEALTHY)
        threading.Timer(0.1, goes_on.set).start()
    await it.until(lambda: len(ended) == 2, "both writes have ended")
    conditions = store.read(config).table.conditions
    assert conditions["GPU-1"].state == HealthState.UNHEALTHY


def held(name: str, device: str, gpu: str) -> Holding:
    pod = Pod("research", "train")
    bundle = f"/b/{name}"
    container = Container(f"id-{name}", "k8s.io", bundle, pod, name, "p", sandbox=False, pid=1)
    return Holding(container, (device,), (gpu,))


async def test_a_gpu_that_falls_off_the_bus_and_comes_back(config: Config) -> None:
    async with agent(config) as it:
        publish(it.state.ledger, Ledger(holdings=(held("main", "GPU-0", "GPU-0"),)))
        it.nvml.lost = "GPU is lost"
        wanted = it.state.look_requested.version
        it.tell(79, source="kernel", text="GPU has fallen off the bus.")
        await it.becomes("GPU-0", HealthState.UNHEALTHY)
        health = it.state.health.value["GPU-0"]
        assert (health.xid, health.blamed) == (79, ("research/train/main",))
        assert health.reason == "XID 79: the GPU has fallen off the bus"
        assert it.state.look_requested.version > wanted  # it requests another look at the node
        (line,) = it.said("XID 79")
        assert line["container"] == "research/train/main"
        assert line["known"] == "only holder"
        assert line["do"].startswith("reboot the node")
        assert it.state.xid_counts.value == {("GPU-0", 79, "research/train/main"): 1}
        assert it.state.health.value["GPU-1"].state == HealthState.HEALTHY
        asked = it.nvml.asked
        await it.until(lambda: it.nvml.asked > asked + 2, "it is asked again")
        assert it.state.health.value["GPU-0"].state == HealthState.UNHEALTHY
        it.nvml.lost = ""
        await it.becomes("GPU-0", HealthState.HEALTHY)
        lines = [line for line in it.said("a device is") if line["device"] == "GPU-0"]
        assert [(line["state"], line.get("xid")) for line in lines] == [
            ("unhealthy", 79), ("recovering", 79), ("healthy", None),
        ]  # fmt: skip


async def test_all_that_is_well_is_left_alone(config: Config) -> None:
    async with agent(config) as it:
        await it.until(lambda: it.nvml.asked > 0, "it is asked once")
        await anyio.sleep(0.3)
        assert it.nvml.asked == 1
        it.tell(31, pid=0)
        await it.until(lambda: bool(it.said("XID 31")), "it is said")
        assert it.state.health.value["GPU-0"].state == HealthState.HEALTHY


async def test_the_other_source_names_the_instance_and_spares_the_rest(config: Config) -> None:
    config = replace(config, health_suspects=1, health_quiet=60.0)
    async with agent(config) as it:
        holdings = (held("a", "MIG-a", "GPU-1"), held("b", "MIG-b", "GPU-1"))
        publish(it.state.ledger, Ledger(holdings=holdings))
        it.hear(94, "GPU-1", source="kernel")
        it.hear(94, "GPU-1", source="nvml", gpu_instance=2, compute_instance=0)
        await it.becomes("MIG-b", HealthState.UNHEALTHY)
        assert it.state.health.value["MIG-a"].state == HealthState.HEALTHY
        assert it.state.xid_counts.value == {("GPU-1", 94, "research/train/b"): 1}
        # The event names no MIG device: it concerns all of them.
        it.hear(94, "GPU-1", source="kernel")
        await it.becomes("MIG-a", HealthState.UNHEALTHY)


async def test_a_serious_xid_of_a_whole_gpu_does_not_wait_for_the_log(
    config: Config, monkeypatch: pytest.MonkeyPatch, process: Callable[[str], int]
) -> None:
    monkeypatch.setattr(merging, "HOLD", 3600.0)
    async with agent(replace(config, health_quiet=60.0)) as it:
        publish(it.state.ledger, Ledger(holdings=(held("main", "GPU-0", "GPU-0"),)))
        it.hear(79, source="nvml")
        await it.becomes("GPU-0", HealthState.UNHEALTHY)
        assert (it.state.health.value["GPU-0"].blamed, it.state.xid_counts.value) == ((), {})
        it.hear(79, source="kernel", pid=process("id-main"))
        await it.until(lambda: bool(it.said("XID 79")), "it is said")
        assert it.state.health.value["GPU-0"].blamed == ("research/train/main",)
        assert it.state.xid_counts.value == {("GPU-0", 79, "research/train/main"): 1}
        (line,) = it.said("XID 79")
        assert line["known"] == "by its process"
        assert len(it.said("a device is")) == 1


@pytest.fixture
def process(config: Config, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], int]:
    """Return a function that starts a process in the cgroup of a container."""
    monkeypatch.setattr(
        "integration.node.services.monitor.service.Procfs", lambda: Procfs(config.proc)
    )

    def make(container_id: str) -> int:
        directory = Path(config.proc, "7")
        directory.mkdir()
        (directory / "stat").write_text(f"7 (train) S 1 {'0 ' * 30}")
        (directory / "cgroup").write_text(f"0::/kubepods/{container_id}\n")
        return 7

    return make


async def test_a_process_is_blamed_for_the_error_of_its_own_instance(
    config: Config, process: Callable[[str], int]
) -> None:
    pid = process("id-b")
    async with agent(replace(config, health_quiet=60.0)) as it:
        holdings = tuple(held(name, f"MIG-{name[0]}", "GPU-1") for name in ("a", "b", "b-too"))
        publish(it.state.ledger, Ledger(holdings=holdings))
        for instance in (1, 2):
            it.hear(94, "GPU-1", gpu_instance=instance, compute_instance=0)
        it.hear(94, "GPU-1", source="kernel", gpu_instance=2, pid=pid)
        await it.until(lambda: len(it.state.xid_counts.value) == 2, "both are counted")
        assert set(it.state.xid_counts.value.items()) == {
            (("GPU-1", 94, f"research/train/{name}"), 1) for name in ("a", "b")
        }
        known = {line["container"]: line["known"] for line in it.said("XID 94")}
        assert known == {"research/train/a": "only holder", "research/train/b": "by its process"}
        blamed = {uuid: it.state.health.value[uuid].blamed for uuid in ("MIG-a", "MIG-b")}
        assert blamed == {"MIG-a": ("research/train/a",), "MIG-b": ("research/train/b",)}


async def test_an_unhealthy_device_is_not_made_healthy_by_restarting(config: Config) -> None:
    async with agent(config) as it:
        it.tell(79, times=3)
        await it.becomes("GPU-0", HealthState.UNHEALTHY)
        await it.until(lambda: store.read_devices(config) is not None, "it is written")
        await it.until(
            lambda: "unhealthy" in json.dumps(store.read_devices(config)), "it is written"
        )
    async with agent(config) as it:
        assert it.state.health.value["GPU-0"].state == HealthState.UNHEALTHY
        await anyio.sleep(0.5)  # it answers, but was not reset
        assert it.state.health.value["GPU-0"].state == HealthState.UNHEALTHY
    os.mkdir(f"{config.sys}/module/anew")
    os.rename(f"{config.sys}/module/anew", f"{config.sys}/module/nvidia")
    async with agent(config) as it:
        await it.becomes("GPU-0", HealthState.HEALTHY)


async def test_what_makes_a_device_unhealthy_as_the_agent_ends_is_kept(config: Config) -> None:
    async with anyio.create_task_group() as tasks:

        def say(_: str, event: str, **__: Any) -> None:
            if event == "a device is unhealthy":
                tasks.cancel_scope.cancel()

        context = Context(config, Options("", 0.05), say)
        publish(context.state.node, NodeSnapshot(inventory=inventory()))
        publish(context.state.sampler, Nvml())
        tasks.start_soon(run, context)
        it = Agent(context.state, Nvml(), [], EventForwarder(context.state))
        await it.until(lambda: "GPU-0" in context.state.health.value, "it begins")
        it.tell(79)
        await anyio.sleep_forever()
    known = store.read(config).table.conditions["GPU-0"]
    assert known.state == HealthState.UNHEALTHY


async def test_a_damaged_file_is_said_and_written_anew(config: Config) -> None:
    store_path = anyio.Path(store.path_of(config))
    await store_path.write_text("{")
    async with agent(config) as it:
        assert it.lines[0][1].startswith(f"{store.path_of(config)}: damaged")
        await it.until(lambda: store.read_devices(config) is not None, "it is written")


async def test_a_person_puts_a_device_back(config: Config) -> None:
    async with agent(config) as it:
        it.tell(79)
        await it.becomes("GPU-0", HealthState.UNHEALTHY)
        await anyio.to_thread.run_sync(requests.ask, config, "GPU-0", 10)
        assert it.state.health.value["GPU-0"].state == HealthState.HEALTHY
        assert "returned to service by hand" in json.dumps(store.read_devices(config))


async def test_nvml_that_goes_on_failing_makes_unhealthy_and_what_cannot_be_watched_suspect(
    config: Config,
) -> None:
    async with agent(config) as it:
        publish(it.state.unwatched, {"": "NVML hangs"})
        await it.becomes("GPU-0", HealthState.SUSPECT)
        it.nvml.failure = "it did not answer in 5 s"
        publish(it.state.sample, await it.nvml.sample(max_age=0))
        await it.becomes("MIG-a", HealthState.UNHEALTHY)
        it.nvml.failure = ""
        await it.becomes("MIG-a", HealthState.SUSPECT)  # it answers, but has no events
        publish(it.state.unwatched, {})
        publish(it.state.sample, await it.nvml.sample(max_age=0))
        await it.becomes("MIG-a", HealthState.HEALTHY)


async def test_nvml_that_was_let_go_of_makes_nothing_unhealthy(config: Config) -> None:
    async with agent(config) as it:
        await it.until(lambda: it.nvml.asked > 0, "it is asked once")
        it.nvml.failure = "let go: GPU 1 is reset"
        publish(it.state.nvml_pause, it.nvml.failure)
        publish(it.state.unwatched, {"": it.nvml.failure})
        await it.becomes("GPU-0", HealthState.SUSPECT)
        for _ in range(5):
            publish(it.state.sample, await it.nvml.sample(max_age=0))
            await anyio.sleep(0.1)  # longer in total than one timeout
        assert {health.state for health in it.state.health.value.values()} == {HealthState.SUSPECT}
        it.nvml.failure = ""
        publish(it.state.nvml_pause, "")
        publish(it.state.unwatched, {})
        await it.becomes("GPU-0", HealthState.HEALTHY)


async def test_devices_that_go_and_the_driver_that_goes(config: Config) -> None:
    async with agent(config) as it:
        publish(it.state.node, NodeSnapshot(inventory=inventory(mig=False)))
        await it.until(lambda: "MIG-a" not in it.state.health.value, "it is gone")
        publish(it.state.node, NodeSnapshot(faults=("NVSHIM-E0102 no driver",)))
        # NVML keeps answering, so this takes only the quiet period.
        await it.until(lambda: len(it.said("a device is unhealthy")) == 2, "both are unhealthy")
        for line in it.said("a device is unhealthy"):
            assert line["reason"] == "the driver is gone: NVSHIM-E0102 no driver"
        publish(it.state.node, NodeSnapshot(inventory=inventory()))
        await it.becomes("GPU-0", HealthState.HEALTHY)


async def test_what_is_not_to_be_judged_is_not(config: Config) -> None:
    with raises(XidListWrong):
        await run(Context(config, Options("", 1, ignored_xids="x"), print))
    async with agent(config) as it:
        it.tell(79)
        await it.becomes("GPU-0", HealthState.UNHEALTHY)
        await it.until(lambda: "unhealthy" in json.dumps(store.read_devices(config)), "written")
    lines: list[str] = []
    context = Context(
        config, Options("", 1, ignored_xids="all"), lambda _, event, **__: lines.append(event)
    )
    with anyio.move_on_after(0.1):
        await run(context)
    assert lines == ["health checks are disabled"]
    assert store.read_devices(config) is None
    async with agent(config) as it:  # the file was kept
        assert it.state.health.value["GPU-0"].state == HealthState.UNHEALTHY


async def test_an_nvswitch_is_not_taken_for_a_gpu(config: Config) -> None:
    switch = SwitchError("nvidia-nvswitch0", 20034, "fatal", 28)
    error = GpuEvent(1.0, "sxid", "", bus_id="0000:c2:00.0", switch=switch, source="kernel")
    async with agent(config) as it:
        await it.becomes("GPU-0", HealthState.HEALTHY)
        for severity in ("non-fatal", "fatal"):
            it.state.gpu_events.send(replace(error, switch=replace(switch, severity=severity)))
        await it.until(lambda: len(it.said("SXid 20034")) == 2, "both are said")
        assert [line["gpu"] for line in it.said("SXid 20034")] == ["unknown"] * 2
