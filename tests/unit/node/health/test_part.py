"""The part of the agent, with a board whose other parts are the test."""

from __future__ import annotations

import json
import os
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import pytest

from api.values import changed
from hooks.config import Config
from integration.inspection.bundles import Container, Pod
from integration.inspection.procfs import Procfs
from integration.node.health import requests, store
from integration.node.health.errors import XidListWrong
from integration.node.health.part import run
from integration.node.health.values import State
from integration.node.ledger.values import Holding, Ledger
from integration.node.monitor.values import DeviceSample, GpuEvent, GpuSample, Sample
from integration.node.parts import Context, Options
from integration.node.refresh import Seen
from tests.unit.node.health.inventories import inventory

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from integration.node.board import Board

pytestmark = pytest.mark.anyio


@dataclass
class Nvml:
    """A sampler that says what it is told to."""

    lost: str = ""
    failure: str = ""
    asked: int = 0
    said: list[Sample] = field(default_factory=list)

    async def sample(self, *, max_age: float) -> Sample:
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
    """What a test sees of the part."""

    board: Board
    nvml: Nvml
    lines: list[tuple[str, str, dict[str, Any]]]

    async def until(self, look: Callable[[], bool], what: str) -> None:
        with anyio.move_on_after(10):
            while not look():  # noqa: ASYNC110 - at what others did
                await anyio.sleep(0.01)
        assert look(), f"{what}: {self.board.health} {self.lines}"

    async def becomes(self, uuid: str, state: State) -> None:
        await self.until(lambda: self.board.health[uuid].state == state, f"{uuid} {state}")

    def said(self, event: str) -> list[dict[str, Any]]:
        return [fields for _, said, fields in self.lines if said.startswith(event)]

    def tell(self, number: int, gpu: str = "GPU-0", **more: Any) -> None:
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        self.board.tell(replace(GpuEvent(now, "xid", gpu, xid=number), **more))


@asynccontextmanager
async def agent(config: Config, **options: Any) -> AsyncIterator[Agent]:
    lines: list[tuple[str, str, dict[str, Any]]] = []

    def say(level: str, event: str, **fields: Any) -> None:
        lines.append((level, event, fields))

    context = Context(config, Options("", 0.05, **options), say)
    nvml = Nvml()
    context.board.post(seen=Seen(inventory=inventory()), sampler=nvml)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run, context)
        seen = Agent(context.board, nvml, lines)
        await seen.until(lambda: "GPU-0" in context.board.health, "it begins")
        yield seen
        tasks.cancel_scope.cancel()


def held(name: str, device: str, gpu: str) -> Holding:
    pod = Pod("research", "train")
    container = Container(f"id-{name}", "k8s.io", "/b", pod, name, "p", sandbox=False, pid=1)
    return Holding(container, (device,), (gpu,))


async def test_a_gpu_that_falls_off_the_bus_and_comes_back(config: Config) -> None:
    async with agent(config) as it:
        it.board.post(ledger=Ledger(holdings=(held("main", "GPU-0", "GPU-0"),)))
        it.nvml.lost = "GPU is lost"
        wanted = it.board.wanted
        it.tell(79, source="kernel", text="GPU has fallen off the bus.")
        await it.becomes("GPU-0", State.UNHEALTHY)
        health = it.board.health["GPU-0"]
        assert (health.xid, health.blamed) == (79, ("research/train/main",))
        assert health.reason == "XID 79: the GPU has fallen off the bus"
        assert it.board.wanted > wanted  # the node is looked at
        (line,) = it.said("XID 79")
        assert line["container"] == "research/train/main"
        assert line["known"] == "only holder"
        assert line["do"].startswith("reboot the node")
        assert it.board.xids == {("GPU-0", 79, "research/train/main"): 1}
        assert it.board.health["GPU-1"].state == State.HEALTHY
        asked = it.nvml.asked
        await it.until(lambda: it.nvml.asked > asked + 2, "it is asked again")
        assert it.board.health["GPU-0"].state == State.UNHEALTHY
        it.nvml.lost = ""
        await it.becomes("GPU-0", State.HEALTHY)
        told = [line["state"] for line in it.said("a device is") if line["device"] == "GPU-0"]
        assert told == ["unhealthy", "recovering", "healthy"]


async def test_all_that_is_well_is_left_alone(config: Config) -> None:
    async with agent(config) as it:
        await it.until(lambda: it.nvml.asked > 0, "it is asked once")
        await anyio.sleep(0.3)
        assert it.nvml.asked == 1
        it.tell(31, pid=0)
        await it.until(lambda: bool(it.said("XID 31")), "it is said")
        assert it.board.health["GPU-0"].state == State.HEALTHY


async def test_the_other_source_names_the_instance_and_spares_the_rest(config: Config) -> None:
    config = changed(config, health_suspects=1, health_quiet=60.0)
    async with agent(config) as it:
        holdings = (held("a", "MIG-a", "GPU-1"), held("b", "MIG-b", "GPU-1"))
        it.board.post(ledger=Ledger(holdings=holdings))
        it.tell(94, "GPU-1", source="kernel")
        it.tell(94, "GPU-1", source="nvml", gpu_instance=2, compute_instance=0, is_more=True)
        await it.becomes("MIG-b", State.UNHEALTHY)
        assert it.board.health["MIG-a"].state == State.HEALTHY
        assert it.board.xids == {("GPU-1", 94, "research/train/b"): 1}
        # Nobody names one: it is everybody's.
        it.tell(94, "GPU-1", source="kernel")
        await it.becomes("MIG-a", State.UNHEALTHY)


async def test_a_process_is_blamed_for_the_error_of_its_own_instance(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "proc" / "7").mkdir()
    (tmp_path / "proc" / "7" / "stat").write_text(f"7 (train) S 1 {'0 ' * 30}")
    (tmp_path / "proc" / "7" / "cgroup").write_text("0::/kubepods/id-b\n")
    monkeypatch.setattr("integration.node.health.part.Procfs", lambda: Procfs(config.proc))
    async with agent(config) as it:
        holdings = (held("a", "MIG-a", "GPU-1"), held("b", "MIG-b", "GPU-1"))
        it.board.post(ledger=Ledger(holdings=holdings))
        for instance in (1, 2):
            it.tell(94, "GPU-1", gpu_instance=instance, compute_instance=0)
        it.tell(94, "GPU-1", source="kernel", gpu_instance=2, pid=7, is_more=True)
        await it.until(lambda: bool(it.board.xids), "one is counted")
        assert it.board.xids == {("GPU-1", 94, "research/train/b"): 1}
        blamed = {uuid: it.board.health[uuid].blamed for uuid in ("MIG-a", "MIG-b")}
        assert blamed == {"MIG-a": ("research/train/a",), "MIG-b": ("research/train/b",)}


async def test_the_kernel_names_the_process_after_nvml_has_told(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = f"{os.getpid()} (train) S 1 {'0 ' * 30}"
    (tmp_path / "proc" / str(os.getpid())).mkdir()
    (tmp_path / "proc" / str(os.getpid()) / "stat").write_text(status)
    (tmp_path / "proc" / str(os.getpid()) / "cgroup").write_text("0::/kubepods/id-me\n")
    monkeypatch.setattr("integration.node.health.part.Procfs", lambda: Procfs(config.proc))
    me = held("me", "GPU-0", "GPU-0")
    async with agent(config) as it:
        it.board.post(ledger=Ledger(holdings=(me, held("other", "GPU-0", "GPU-0"))))
        it.tell(119)
        await it.becomes("GPU-0", State.UNHEALTHY)
        assert it.board.health["GPU-0"].blamed == ()
        assert it.board.xids == {}  # until it is known whose it is
        it.tell(119, source="kernel", pid=os.getpid(), is_more=True)
        await it.until(lambda: bool(it.board.xids), "it is counted")
        assert it.board.xids == {("GPU-0", 119, "research/train/me"): 1}
        assert it.said("XID 119")[-1]["known"] == "by its process"


async def test_an_unhealthy_device_is_not_made_healthy_by_restarting(config: Config) -> None:
    async with agent(config) as it:
        it.tell(79, times=3)
        await it.becomes("GPU-0", State.UNHEALTHY)
        await it.until(lambda: store.read_devices(config) is not None, "it is written")
        await it.until(
            lambda: "unhealthy" in json.dumps(store.read_devices(config)), "it is written"
        )
    async with agent(config) as it:
        assert it.board.health["GPU-0"].state == State.UNHEALTHY
        await anyio.sleep(0.5)  # it answers, and was not reset
        assert it.board.health["GPU-0"].state == State.UNHEALTHY
    os.mkdir(f"{config.sys}/module/anew")
    os.rename(f"{config.sys}/module/anew", f"{config.sys}/module/nvidia")
    async with agent(config) as it:
        await it.becomes("GPU-0", State.HEALTHY)


async def test_a_damaged_file_is_said_and_written_anew(config: Config) -> None:
    store_path = anyio.Path(store.path_of(config))
    await store_path.write_text("{")
    async with agent(config) as it:
        assert it.lines[0][1].startswith(f"{store.path_of(config)}: it is damaged")
        await it.until(lambda: store.read_devices(config) is not None, "it is written")


async def test_a_person_puts_a_device_back(config: Config) -> None:
    async with agent(config) as it:
        it.tell(79)
        await it.becomes("GPU-0", State.UNHEALTHY)
        await anyio.to_thread.run_sync(requests.ask, config, "GPU-0", 10)
        assert it.board.health["GPU-0"].state == State.HEALTHY
        assert "put back by hand" in json.dumps(store.read_devices(config))


async def test_nvml_that_goes_on_failing_makes_unhealthy_and_what_cannot_be_watched_suspect(
    config: Config,
) -> None:
    async with agent(config) as it:
        it.board.post(unwatched={"": "NVML hangs"})
        await it.becomes("GPU-0", State.SUSPECT)
        it.nvml.failure = "it did not answer in 5 s"
        it.board.post(sample=await it.nvml.sample(max_age=0))
        await it.becomes("MIG-a", State.UNHEALTHY)
        it.nvml.failure = ""
        await it.becomes("MIG-a", State.SUSPECT)  # it answers, and is not watched
        it.board.post(unwatched={})
        it.board.post(sample=await it.nvml.sample(max_age=0))
        await it.becomes("MIG-a", State.HEALTHY)


async def test_nvml_that_was_let_go_of_makes_nothing_unhealthy(config: Config) -> None:
    async with agent(config) as it:
        await it.until(lambda: it.nvml.asked > 0, "it is asked once")
        it.nvml.failure = "let go: GPU 1 is reset"
        it.board.post(let_go=it.nvml.failure, unwatched={"": it.nvml.failure})
        await it.becomes("GPU-0", State.SUSPECT)
        for _ in range(5):
            it.board.post(sample=await it.nvml.sample(max_age=0))
            await anyio.sleep(0.1)  # longer in all than one is patient
        assert {health.state for health in it.board.health.values()} == {State.SUSPECT}
        it.nvml.failure = ""
        it.board.post(let_go="", unwatched={})
        await it.becomes("GPU-0", State.HEALTHY)


async def test_devices_that_go_and_the_driver_that_goes(config: Config) -> None:
    async with agent(config) as it:
        it.board.post(seen=Seen(inventory=inventory(mig=False)))
        await it.until(lambda: "MIG-a" not in it.board.health, "it is gone")
        it.board.post(seen=Seen(faults=("NVSHIM-E0102 no driver",)))
        await it.becomes("GPU-0", State.UNHEALTHY)
        assert it.board.health["GPU-0"].reason == "the driver is gone: NVSHIM-E0102 no driver"
        it.board.post(seen=Seen(inventory=inventory()))
        await it.becomes("GPU-0", State.HEALTHY)


async def test_what_is_not_to_be_judged_is_not(config: Config) -> None:
    with pytest.raises(XidListWrong):
        await run(Context(config, Options("", 1, ignored_xids="x"), print))
    async with agent(config) as it:
        it.tell(79)
        await it.becomes("GPU-0", State.UNHEALTHY)
        await it.until(lambda: "unhealthy" in json.dumps(store.read_devices(config)), "written")
    lines: list[str] = []
    context = Context(
        config, Options("", 1, ignored_xids="all"), lambda _, event, **__: lines.append(event)
    )
    with anyio.move_on_after(0.1):
        await run(context)
    assert lines == ["no device's health is judged"]
    assert store.read_devices(config) is None
    async with agent(config) as it:  # it was forgotten by nobody
        assert it.board.health["GPU-0"].state == State.UNHEALTHY
