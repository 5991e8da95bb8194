"""The agent's service that records causes; the test publishes in place of other services."""

from __future__ import annotations

import json
import os
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import pytest

from hooks.config import Config
from integration.node.faults import fault_log
from integration.node.holders.values import DeviceUse, Ledger
from integration.node.mps.clients import MpsDaemon
from integration.node.options import Options
from integration.node.service import Context
from integration.node.services.causes import service as component
from integration.node.services.causes.files import QUIET
from integration.node.services.causes.service import run
from integration.node.services.monitor.service import EventForwarder
from integration.nvml.snapshot import NodeSnapshot
from integration.nvml.values import GpuEvent, GpuSample, Sample, SwitchError
from shim.causes import exit_store, record
from shim.causes.record import Fault, Whose, read_causes, read_pod, write_causes
from shim.causes.xids import Action
from tests.harness.node_state import publish
from tests.harness.waiting import until
from tests.unit.node.causes.holders import holding
from tests.unit.node.inventories import inventory

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from integration.node.holders.values import Holding
    from integration.node.state.store import State

pytestmark = pytest.mark.anyio


@pytest.fixture
def config(tmp_path: Path) -> Config:
    for name in ("state", "sys/module/nvidia", "proc"):
        (tmp_path / name).mkdir(parents=True)
    return Config(
        state=str(tmp_path / "state"), sys=str(tmp_path / "sys"), proc=str(tmp_path / "proc")
    )


@dataclass
class Sampler:
    """A stand-in for NVML, which answers what a test sets."""

    sample_: Sample = field(default_factory=lambda: Sample(0.0))
    asked: int = 0
    state: State | None = None

    async def sample(self, *, max_age: float, profile: bool = False) -> Sample:
        del max_age
        self.asked += 1
        found = replace(self.sample_, when=now())
        assert self.state is not None
        publish(self.state.sample, found)
        return found


@dataclass
class World:
    """The service as a test sees it."""

    config: Config
    state: State
    sampler: Sampler
    forwarder: EventForwarder
    lines: list[str]

    def holds(self, *holdings: Holding, stopped: tuple[Holding, ...] = ()) -> None:
        containers = tuple(each.container for each in (*holdings, *stopped))
        publish(
            self.state.ledger, Ledger(holdings=holdings, stopped=stopped, containers=containers)
        )

    def tell(self, number: int, gpu: str = "GPU-0", **more: Any) -> None:
        event = GpuEvent(now(), "xid", gpu, xid=number, source="kernel")
        self.state.gpu_events.send(replace(event, **more))

    def faults(self, name: str) -> tuple[Fault, ...]:
        return read_causes(self.config.state, "k8s.io", f"id-{name}")

    def codes(self, name: str) -> list[int]:
        return [each.code for each in self.faults(name)]

    async def becomes(self, name: str, *codes: int) -> None:
        await until(lambda: self.codes(name) == list(codes), f"{name} has {codes}")


def now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@asynccontextmanager
async def world(config: Config) -> AsyncIterator[World]:
    lines: list[str] = []
    context = Context(config, Options("", 1), lambda _, line, **__: lines.append(line))
    state = context.state
    sampler = Sampler(state=state)
    publish(state.node, NodeSnapshot(inventory=inventory()))
    publish(state.sampler, sampler)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run, context)
        await until(lambda: state.gpu_events.has_listeners, "it listens")
        yield World(config, state, sampler, EventForwarder(state), lines)
        tasks.cancel_scope.cancel()


A, B = holding("a", pid=7), holding("b", pid=8)
IN_A = "0::/kubepods/id-a\n"


async def test_a_fault_is_where_the_shim_finds_it_with_its_pod(config: Config) -> None:
    async with world(config) as it:
        it.holds(A, B)
        before = time.time()
        it.tell(31, pid=7, cgroups=IN_A)
        await it.becomes("a", 31)
        (fault,) = it.faults("a")
        assert (fault.whose, fault.sure, fault.pid) == (Whose.APPLICATION, True, 7)
        assert before - 0.1 <= fault.at <= time.time()
        assert read_pod(config.state, "k8s.io", "id-a") == {
            "namespace": "research", "name": "pod-a", "uid": "uid-a", "container": "a",
        }  # fmt: skip
        await it.becomes("b", 31)
        assert it.faults("b")[0].whose == Whose.NEIGHBOUR
        text = Path(config.state, "causes/k8s.io/id-b.json").read_text()
        assert "pod-a" not in text
        assert '"pid": 7' not in text
        assert it.state.counters.faults == {
            ("xid", "31", "application"): 1, ("xid", "31", "neighbour"): 1,
        }  # fmt: skip


async def test_a_fault_that_is_told_after_the_exit_reaches_its_container(config: Config) -> None:
    async with world(config) as it:
        it.holds(A, B)
        it.holds(B, stopped=(A,))
        it.tell(31, pid=7)  # its process has exited
        await it.becomes("a", 31)
        assert it.faults("a")[0].whose == Whose.APPLICATION
        it.holds(B)
        it.tell(79)
        await it.becomes("a", 31, 79)
        await it.becomes("b", 31, 79)


async def test_a_fault_that_is_told_after_the_exit_is_added_to_what_is_kept_of_the_end(
    config: Config,
) -> None:
    def kept() -> tuple[list[int], str]:
        document = exit_store.read_ended(config.state, "k8s.io", "id-a")
        assert document is not None
        return [each.code for each in record.faults_of(document)], document["cause"]

    async with world(config) as it:
        it.holds(A)
        own = Fault(time.time(), "xid", 31, whose=Whose.APPLICATION)
        end = {
            "id": "id-a", "namespace": "k8s.io", "name": "a", "pod": None, "gpus": ["GPU-0"],
            "ended": time.time(), "exit_status": 134, "told_status": 134,
        }  # fmt: skip
        exit_store.write_ended(config.state, end, [own], "a line")
        it.holds(stopped=(A,))
        it.tell(79)
        await until(lambda: kept()[0] == [31, 79], "it is added")
        assert kept()[1].startswith("GPU failure: Xid 79")
        assert "s after exit" in kept()[1]
        # It is unrelated to another container of that name, which exited long before.
        exit_store.write_ended(config.state, {**end, "ended": time.time() - 100}, [own], "a line")
        it.tell(48)
        await it.becomes("a", 79, 48)
        assert kept() == ([31], "a line")


async def test_a_container_that_the_ledger_learns_of_later_is_hit_if_it_was_there(
    config: Config, tmp_path: Path
) -> None:
    def made(name: str, ago: float) -> Holding:
        (tmp_path / name).mkdir()
        file = tmp_path / name / "init.pid"
        file.write_text("1")
        os.utime(file, (time.time() - ago,) * 2)
        return holding(name, pid=0, bundle=str(tmp_path / name))

    async with world(config) as it:
        it.tell(79, pid=7, cgroups="0::/kubepods/id-before\n")
        it.holds(made("before", 1.0), made("after", -5.0))
        await it.becomes("before", 79)
        assert it.faults("before")[0].pid == 7
        it.holds(made("much-before", 2.0))
        await it.becomes("much-before", 79)
        assert it.codes("after") == []
        assert it.codes("before") == [79]


async def test_a_container_is_hit_though_the_clock_was_set_back_since_it_was_made(
    config: Config, tmp_path: Path
) -> None:
    (tmp_path / "init.pid").write_text("1")
    os.utime(tmp_path / "init.pid", (time.time() + 3600,) * 2)
    async with world(config) as it:
        it.holds(holding("a", pid=os.getpid(), bundle=str(tmp_path)))
        it.tell(79)
        await it.becomes("a", 79)


async def test_a_thousand_faults_a_second_lose_neither_the_first_nor_fill_the_disk(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    write = record.write_causes

    def counted(*words: Any, **more: Any) -> None:
        written.append(words[2])
        write(*words, **more)

    monkeypatch.setattr(record, "write_causes", counted)
    async with world(config) as it:
        it.holds(A)
        begun = time.monotonic()
        it.tell(48)
        for n in range(1000):
            event = GpuEvent(now(), "xid", "GPU-0", xid=31, pid=100_000 + n, source="kernel")
            it.forwarder.add(replace(event, cgroups=IN_A))
            if n % 50 == 0:
                await anyio.sleep(0.01)
        await until(lambda: len(it.codes("a")) == 16, "its file is full")
        took = time.monotonic() - begun
        assert it.codes("a")[0] == 48
        assert os.stat(f"{config.state}/causes/k8s.io/id-a.json").st_size <= 16 << 10
        assert len(written) <= took / QUIET + 2
        # Except the one that may be in the middle of a write.
        files = [each for each in os.listdir(f"{config.state}/causes/k8s.io") if each[0] != "."]
        assert files == ["id-a.json"]


async def test_what_was_not_written_yet_is_when_it_ends_and_the_next_one_goes_on(
    config: Config,
) -> None:
    async with world(config) as it:
        it.holds(A)
        it.tell(13, pid=7, cgroups=IN_A)
        await it.becomes("a", 13)
        it.tell(43, pid=7, cgroups=IN_A)
        await until(
            lambda: len(it.state.causes.value["k8s.io", "id-a"].faults) == 2, "both are known"
        )
    assert [each.code for each in read_causes(config.state, "k8s.io", "id-a")] == [13, 43]
    async with world(config) as it:
        it.holds(A)
        it.tell(79)
        await it.becomes("a", 13, 43, 79)
        assert read_pod(config.state, "k8s.io", "id-a")["name"] == "pod-a"


async def test_a_file_that_cannot_be_written_is_said_and_tried_again(config: Config) -> None:
    Path(config.state, "causes").write_text("no directory")
    async with world(config) as it:
        it.holds(A)
        it.tell(79)
        await until(lambda: "causes" in it.state.faults.lines, "it is said")
        os.unlink(f"{config.state}/causes")
        await it.becomes("a", 79)
        await until(lambda: "causes" not in it.state.faults.lines, "it is over")
        assert len(it.lines) == 1


async def test_files_of_containers_that_are_gone_are_removed(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fault_log, "KEPT", 0.0)
    monkeypatch.setattr(component, "_SLACK", 0.0)
    write_causes(config.state, "k8s.io", "id-old", [Fault(1.0, "xid", 13)])
    Path(config.state, "causes/k8s.io/.hidden.tmp").write_text("of nobody")
    async with world(config) as it:
        it.holds(A)
        it.tell(79)
        await it.becomes("a", 79)
        await it.becomes("old")
        it.holds()
        await it.becomes("a")


async def test_what_the_driver_asks_for_is_obeyed(config: Config) -> None:
    text = "GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)"
    async with world(config) as it:
        it.holds(A, B)
        it.tell(109, pid=7, cgroups=IN_A)
        await it.becomes("a", 109)
        assert it.faults("a")[0].whose == Whose.UNCLEAR
        it.tell(154, text=text)
        await until(
            lambda: (
                [(f.whose, f.action) for f in it.faults("a")] == [(Whose.DEVICE, Action.REBOOT)]
            ),
            "the driver's word",
        )
        # It stays until the driver reports otherwise.
        it.tell(31, pid=7, cgroups=IN_A)
        await it.becomes("a", 109, 31)
        assert it.faults("a")[1].whose == Whose.DEVICE
        it.tell(154, text=text.replace("0x2 (Node Reboot Required)", "0x0 (None)"))
        it.tell(13, pid=7, cgroups=IN_A)
        await it.becomes("a", 109, 31, 13)
        assert it.faults("a")[2].whose == Whose.APPLICATION


async def test_nvmls_event_says_what_a_gpu_needs_as_the_log_does(config: Config) -> None:
    async with world(config) as it:
        it.holds(A, B)
        it.tell(109, pid=7, cgroups=IN_A)
        await it.becomes("a", 109)
        it.tell(0, kind="recovery-action", action=2)
        await until(lambda: it.faults("a")[0].action == Action.REBOOT, "the driver's word")
        await it.becomes("a", 109)
        await it.becomes("b", 109)


@pytest.mark.parametrize(("gpu", "action"), [("GPU-0", Action.RESET), ("", Action.SWITCHES)])
async def test_a_fatal_error_of_a_switch_hits_who_holds_the_gpu(
    config: Config, gpu: str, action: Action
) -> None:
    async with world(config) as it:
        it.holds(A)
        error = SwitchError("nvidia-nvswitch0", 20034, "fatal", 28)
        for severity in ("non-fatal", "fatal"):
            switch = replace(error, severity=severity)
            it.tell(0, gpu, kind="sxid", switch=switch, text="LTSSM Fault Up")
        await until(lambda: it.faults("a"), "it is recorded")
        (fault,) = it.faults("a")
        assert (fault.kind, fault.whose, fault.action, fault.sure) == (
            "sxid", Whose.DEVICE, action, bool(gpu),
        )  # fmt: skip
        assert fault.name.startswith("SXid 20034 of nvidia-nvswitch0, link 28: LTSSM Fault Up")
        assert it.state.counters.switch_errors == {
            ("nvidia-nvswitch0", "", "20034", severity): 1 for severity in ("fatal", "non-fatal")
        }


async def test_nvml_is_asked_once_what_a_gpu_needs(config: Config) -> None:
    async with world(config) as it:
        it.holds(A)
        it.sampler.sample_ = Sample(0.0, gpus=(GpuSample("GPU-0", recovery_action=4),))
        for _ in range(20):
            it.tell(48)
        await until(
            lambda: [f.action for f in it.faults("a")] and it.faults("a")[0].action
            == Action.DRAIN_AND_RESET, "it is obeyed",
        )  # fmt: skip
        assert it.sampler.asked == 1
        it.sampler.sample_ = Sample(0.0, failure="NVML hangs")
        it.tell(79)
        await until(lambda: it.sampler.asked == 2, "it is asked again")
        await until(lambda: it.faults("a")[-1].code == 79, "that it hangs delays nothing")


async def test_what_is_gone_is_told_to_all_who_use_it(config: Config) -> None:
    async with world(config) as it:
        it.holds(A, B, holding("other", gpu="GPU-1"))
        it.tell(13, "GPU-1")
        await it.becomes("other", 13)  # after everything that was published
        daemon = MpsDaemon("nvidia.com/gpu", ("GPU-0",), pid=5)
        publish(it.state.mps_daemons, {"nvidia.com/gpu": daemon})
        await anyio.wait_all_tasks_blocked()
        gone = MpsDaemon("nvidia.com/gpu", (), unready="it ended", restarts=1)
        publish(it.state.mps_daemons, {"nvidia.com/gpu": gone})
        await until(lambda: [f.kind for f in it.faults("a")] == ["mps"], "MPS has ended")
        publish(it.state.lost_gpus, {"GPU-0": "GPU is lost"})
        await until(lambda: [f.kind for f in it.faults("b")] == ["mps", "gpu-lost"], "b is told")
        assert it.codes("other") == [13]
        it.tell(79)  # why it is lost
        await until(lambda: [f.code for f in it.faults("a")] == [0, 79], "the reason")
        os.rmdir(f"{config.sys}/module/nvidia")
        publish(it.state.node, NodeSnapshot(faults=("no driver",)))
        await until(lambda: [f.kind for f in it.faults("other")][1:] == ["driver-lost"], "all are")
        assert it.faults("other")[1].whose == Whose.HOST


async def test_a_gpu_that_is_still_lost_is_not_told_anew_by_the_next_agent(config: Config) -> None:
    for _ in range(2):
        async with world(config) as it:
            it.holds(A)
            publish(it.state.lost_gpus, {"GPU-0": "GPU is lost"})
            await until(lambda: [f.kind for f in it.faults("a")] == ["gpu-lost"], "it is told")
    assert it.state.counters.faults == {}


async def test_a_full_memory_is_told_as_long_as_it_is(config: Config) -> None:
    total = 1 << 36

    def sample(used: int) -> Sample:
        gpu = GpuSample("GPU-0", memory_total_bytes=total, memory_used_bytes=used)
        return Sample(now(), gpus=(gpu,))

    async with world(config) as it:
        it.holds(A, B)
        for used, expected in ((total, ["gpu-memory"]), (total // 2, []), (total, ["gpu-memory"])):
            uses = (DeviceUse(A, "GPU-0", (7,), memory_bytes=used),)
            publish(it.state.sample, sample(used))
            publish(it.state.usage, uses)
            await until(lambda: [f.kind for f in it.faults("a")] == expected, "so it is")  # noqa: B023
        (fault,) = it.faults("a")
        assert (fault.whose, fault.sure) == (Whose.APPLICATION, False)
        assert json.loads(Path(config.state, "causes/k8s.io/id-a.json").read_text())["version"] == 1
