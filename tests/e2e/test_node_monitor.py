"""Busy GPUs, monitored by child processes that hang, crash, fail and are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from hooks.config import load_config
from integration import backoff
from integration.node.options import Options
from integration.node.refresh import look
from integration.node.service import Context
from integration.node.services.monitor import events
from integration.node.services.monitor import service as component
from integration.node.services.monitor.events import Watch
from integration.nvml import sampler as sampling
from integration.nvml import session
from integration.nvml.sampler import NvmlSampler
from integration.nvml.session import Children, library_of
from integration.nvml.snapshot import NodeSnapshot
from integration.simulated import Scenario, SimulatedNode
from integration.timeouts import PATIENCE
from tests.harness.node_agent import agent_process
from tests.harness.node_state import publish
from tests.harness.processes import family
from tests.harness.runtime import is_alive
from tests.harness.waiting import eventually, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from integration.nvml.values import GpuEvent

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimulatedNode]:
    """Return a node with four GPUs: the first three in MIG mode, the third without instances."""
    directory = tmp_path_factory.mktemp("monitor") / "node"
    with SimulatedNode.create(str(directory), Scenario.load("mig")) as made:
        yield made


@pytest.fixture(autouse=True)
def _not_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a killed child time to exit on a busy machine, too."""
    monkeypatch.setattr(session, "TO_DIE", 10.0 * PATIENCE)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry soon after a failure."""
    monkeypatch.setattr(backoff, "_FIRST_PAUSE", 0.2)


@pytest.fixture
def gpus(node: SimulatedNode) -> Iterator[SimulatedNode]:
    """Return the node, idle and healthy."""
    yield node
    for path in Path(node.state).glob("nvml-*"):
        path.unlink()


def children_of(pid: int) -> list[int]:
    """Return the children that use NVML, started by this process or forked by a server."""
    found = []
    for entry in family(pid)[1:]:
        try:
            parent = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1]
            words = Path(f"/proc/{entry}/cmdline").read_bytes()
        except OSError:
            continue
        is_forked = b"/nvml/fork_server.py" in words and int(parent) != pid
        if (b"/nvml/child.py" in words or is_forked) and is_alive(entry):
            found.append(entry)
    return found


def write(node: SimulatedNode, name: str, text: str, *, mode: str = "w") -> None:
    with open(f"{node.state}/nvml-{name}", mode, encoding="utf-8") as file:
        file.write(text)


class Monitored:
    """A node whose monitor runs in this process."""

    def __init__(self, node: SimulatedNode, log: str) -> None:
        self.node, self.said, self.heard = node, [""], list["GpuEvent"]()
        self.config = load_config(node.config_path)
        self.context = Context(self.config, Options("", 60, kernel_log=log), self._say)
        self.state = self.context.state
        publish(self.state.node, look(self.config))

    def _say(self, level: str, event: str, **fields: Any) -> None:
        self.said.append(f"{level} {event} {fields}")

    def unheard(self) -> list[str]:
        """Return each GPU that was logged as one without events."""
        return [line for line in self.said if "NVML does not deliver its events" in line]

    async def listen(self) -> None:
        with self.state.gpu_events.listen() as stream:
            async for event in stream:
                self.heard.append(event)


@asynccontextmanager
async def monitored(node: SimulatedNode, log: str = "") -> AsyncIterator[Monitored]:
    it = Monitored(node, log)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(it.listen)
        tasks.start_soon(component.run, it.context)
        await until(lambda: children_of(os.getpid()), "a child that watches")
        yield it
        tasks.cancel_scope.cancel()
    assert children_of(os.getpid()) == []
    # A later request does not wait.
    assert (await it.state.sampler.value.sample(max_age=0)).failure


async def begun(it: Monitored, xid: int) -> GpuEvent:
    """Create events until one arrives: events before the child has registered are lost."""
    while not (found := [event for event in it.heard if event.xid == xid]):
        write(it.node, "events", f"1 8 {xid}\n", mode="a")
        await anyio.sleep(0.05)
    return found[0]


async def test_an_xid_has_the_mig_device_of_nvml_and_the_process_of_the_kernel(
    gpus: SimulatedNode, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "kmsg")
    log = os.open(tmp_path / "kmsg", os.O_RDWR)
    try:
        async with monitored(gpus, str(tmp_path / "kmsg")) as it:
            gpu = it.state.node.value.gpus[1]
            first = await begun(it, 13)
            assert (first.gpu, first.pid) == (gpu, 0)
            bus = gpus.scenario.gpus[1].pci.rpartition(".")[0]
            os.write(
                log, f"4,1,2,-;NVRM: Xid (PCI:{bus}): 31, pid=8, name=python3, Ch 1\n".encode()
            )
            write(gpus, "events", "1 8 31 2 1\n", mode="a")
            await until(lambda: [each for each in it.heard if each.xid == 31], "the Xid")
            [event] = [event for event in it.heard if event.xid == 31]
            assert (event.gpu, event.gpu_instance, event.compute_instance) == (gpu, 2, 1)
            assert (event.pid, event.process, event.text) == (8, "python3", "Ch 1")

            write(gpus, "processes", "1 8 1048576 2 1\n0 5 7 60 1 2 3\n3 6 9 60 1 2 3\n")
            fabric = "2 fabric-state 3\n2 fabric-cluster 171\n2 fabric-clique 5\n"
            write(gpus, "facts", f"3 ecc-uncorrected 2\n{fabric}")
            found = await it.state.sampler.value.sample(max_age=0)
            assert it.state.sample.value is found
            assert not found.failure
            assert [each.uuid for each in found.gpus] == list(it.state.node.value.gpus)
            assert found.gpus[3].ecc_uncorrected == 2
            assert it.state.cliques.value == frozenset({"00000000-0000-0000-0000-0000000000ab.5"})
            device = next(
                each for each in it.state.node.value.inventory.mig_devices  # type: ignore[union-attr]
                if (each.gpu_instance, each.compute_instance) == (2, 1)
            )  # fmt: skip
            uses = {use.pid: (use.device, use.sm_percent) for use in found.processes}
            assert uses[8] == (device.uuid, None)
            assert uses[6] == (it.state.node.value.gpus[3], 60)
    finally:
        os.close(log)


async def test_a_gpu_that_is_lost_is_told_of_and_the_others_are_watched(
    gpus: SimulatedNode,
) -> None:
    async with monitored(gpus) as it:
        await begun(it, 13)
        write(gpus, "faults", "gpu0=error:15")
        lost = it.state.node.value.gpus[0]
        await until(it.unheard, "it is not watched")
        assert it.state.unwatched.value == {lost: "GPU is lost"}
        assert [lost in line for line in it.unheard()] == [True]
        assert it.state.look_requested.version
        await begun(it, 45)
        found = await it.state.sampler.value.sample(max_age=0)
        assert [gpu.lost for gpu in found.gpus] == ["GPU is lost", "", "", ""]
        write(gpus, "faults", "")
        found = await it.state.sampler.value.sample(max_age=0)
        assert not any(gpu.lost for gpu in found.gpus)
        await until(lambda: not it.state.unwatched.value, "it is watched again")
        assert not it.state.lost_gpus.value
        before = children_of(os.getpid())
        await begun(it, 46)
        assert children_of(os.getpid()) == before  # by a child that keeps running


@pytest.mark.usefixtures("soon")
async def test_a_child_that_crashes_or_is_killed_is_begun_again(gpus: SimulatedNode) -> None:
    async with monitored(gpus) as it:
        await begun(it, 13)
        [child] = children_of(os.getpid())
        os.kill(child, signal.SIGKILL)
        await until(it.unheard, "it is reported")
        assert "NVML crashed: SIGKILL" in it.state.unwatched.value[""]
        assert "NVSHIM-E2745" in it.state.faults.lines["monitor.events"]
        await until(lambda: not it.state.unwatched.value, "another child")
        assert "monitor.events" not in it.state.faults.lines
        await begun(it, 45)
        write(gpus, "faults", "nvmlDeviceGetCount=crash")
        assert "SIGSEGV" in (await it.state.sampler.value.sample(max_age=0)).failure
        write(gpus, "faults", "nvmlDeviceGetTemperature=error:3 count=2")
        found = await it.state.sampler.value.sample(max_age=0)
        assert "SIGSEGV" in found.failure  # the monitor does not retry for a while
        with anyio.fail_after(60 * PATIENCE):
            while (found := await it.state.sampler.value.sample(max_age=0)).failure:  # noqa: ASYNC110
                await anyio.sleep(0.05)
        assert [gpu.temperature_celsius for gpu in found.gpus] == [None, None]
        assert found.gpus[0].power_watts == 40
        assert len([note for note in found.notes if "does not list" in note]) == 2


@pytest.mark.parametrize("profile", [False, True])
async def test_a_child_stays_for_frequent_questions_and_not_for_one_alone(
    gpus: SimulatedNode, monkeypatch: pytest.MonkeyPatch, profile: bool
) -> None:
    monkeypatch.setattr(sampling, "_ALONE", 0.05)
    it = Monitored(gpus, "")
    children = Children(lambda *_, **__: None, gpus.state)
    sampler = NvmlSampler(lambda: it.state.node.value, children, to_answer=3)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sampler.serve)
        await sampler.sample(max_age=0, profile=profile)
        if not profile:
            await until(lambda: not children_of(os.getpid()), "it was alone")
            await sampler.sample(max_age=0)
        [child] = children_of(os.getpid())
        await anyio.sleep(0.2)
        await sampler.sample(max_age=0)
        assert children_of(os.getpid()) == [child]
        tasks.cancel_scope.cancel()


@pytest.mark.usefixtures("soon")
async def test_a_driver_that_hangs_is_left_and_found_again(
    gpus: SimulatedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in ((events, "_TO_START"), (events, "_LATE"), (sampling, "_TO_START")):
        monkeypatch.setattr(module, name, 3.0 * PATIENCE)
    said: list[str] = []
    it = Monitored(gpus, "")
    children = Children(lambda *words, **_: said.append(words[1]), gpus.state)
    watch = Watch(it.state, children, it.heard.append, it._say, to_answer=0.2, beat=0.2)
    sampler = NvmlSampler(lambda: it.state.node.value, children, to_answer=3, idle=0.3)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch.keep)
        tasks.start_soon(sampler.serve)
        await begun(it, 13)
        answers: list[Any] = []

        async def ask() -> None:
            answers.append(await sampler.sample(max_age=0))

        async with anyio.create_task_group() as askers:
            for _ in range(20):
                askers.start_soon(ask)
        assert len({id(answer) for answer in answers}) == 1
        assert not answers[0].failure
        assert await sampler.sample(max_age=1000) is answers[0]
        await until(lambda: len(children_of(os.getpid())) == 1, "the child exits without requests")

        write(gpus, "faults", "any=hang")
        failed = await sampler.sample(max_age=0)
        assert "NVML hangs" in failed.failure
        assert await sampler.sample(max_age=0) is failed  # the failure is not repeated
        await until(lambda: "" in it.state.unwatched.value, "it is reported")
        assert "NVML hangs" in it.state.unwatched.value[""]
        os.unlink(f"{gpus.state}/nvml-faults")
        await until(lambda: not it.state.unwatched.value, "it is watched again")
        await begun(it, 45)
        tasks.cancel_scope.cancel()
    assert children_of(os.getpid()) == []
    assert children.abandoned == 0
    assert not said


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("gpu1=hang", "it does not answer, and others do"),
        ("gpu1.nvmlDeviceGetTemperature=crash", "NVML crashed: SIGSEGV, whenever it is asked"),
    ],
)
async def test_one_gpu_takes_no_other_with_it(
    gpus: SimulatedNode, monkeypatch: pytest.MonkeyPatch, fault: str, why: str
) -> None:
    monkeypatch.setattr(sampling, "_GIVEN_UP", 3600.0)
    seen, said = look(load_config(gpus.config_path)), list[str]()
    children = Children(lambda _, event, **__: said.append(event), gpus.state)
    sampler = NvmlSampler(lambda: seen, children, to_answer=3.0 * PATIENCE)
    inits = Path(gpus.state, "nvml-inits")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sampler.serve)
        write(gpus, "faults", fault)
        lost = {seen.gpus[1]: why}

        async def sample() -> dict[str, str]:
            answer = await sampler.sample(max_age=0)
            assert not answer.failure
            assert len(answer.gpus) == 4
            return {gpu.uuid: gpu.lost for gpu in answer.gpus if gpu.lost}

        assert await sample() == lost
        inits.touch()
        for _ in range(3):
            assert await sample() == lost
        # The monitor skips what has failed, so nothing crashes or hangs again.
        assert len(inits.read_bytes()) <= 1
        write(gpus, "faults", "")
        assert await sample() == lost
        monkeypatch.setattr(sampler, "_leave_until", 0.0)
        assert await sample() == {}
        tasks.cancel_scope.cancel()
    assert children_of(os.getpid()) == []
    assert not said


async def test_what_crashes_on_every_gpu_is_nvml(gpus: SimulatedNode) -> None:
    seen = look(load_config(gpus.config_path))
    sampler = NvmlSampler(
        lambda: seen, Children(lambda *_, **__: None, gpus.state), to_answer=3.0 * PATIENCE
    )
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sampler.serve)
        write(gpus, "faults", "nvmlDeviceGetTemperature=crash")
        answer = await sampler.sample(max_age=0)
        assert answer.failure == "NVML crashed: SIGSEGV"
        assert not answer.gpus
        tasks.cancel_scope.cancel()


async def test_a_child_lets_go_when_the_driver_goes(gpus: SimulatedNode) -> None:
    async with monitored(gpus) as it:
        await begun(it, 13)
        await it.state.sampler.value.sample(max_age=0)
        before = children_of(os.getpid())
        assert len(before) == 2
        publish(it.state.node, look(it.config))
        assert all(map(is_alive, before))
        root = Path(gpus.driver_root)
        away = root.rename(root.with_name("away"))
        try:
            publish(it.state.node, look(it.config, changed=True))
            await until(lambda: not children_of(os.getpid()), "no child keeps the driver open")
            assert not it.state.unwatched.value
            assert "driver" in (await it.state.sampler.value.sample(max_age=0)).failure
        finally:
            away.rename(root)
        publish(it.state.node, look(it.config, changed=True))
        assert not (await it.state.sampler.value.sample(max_age=0)).failure  # at once
        await begun(it, 45)


async def test_it_lets_go_of_the_gpus_when_it_is_asked_to(gpus: SimulatedNode) -> None:
    async with monitored(gpus) as it:
        await begun(it, 13)
        write(gpus, "faults", "nvmlDeviceGetName=error:15 nvmlDeviceGetTemperature=hang")
        answers: list[Any] = []

        async def ask() -> None:
            answers.append(await it.state.sampler.value.sample(max_age=0))

        async with anyio.create_task_group() as askers:
            askers.start_soon(ask)
            await until(lambda: len(children_of(os.getpid())) == 2, "one hangs with a question")
            file = Path(gpus.state, "let-go")
            file.write_text("GPU 1 is reset\n")
            await until(lambda: not children_of(os.getpid()), "no child holds a GPU")
        assert answers[0].failure
        await until(lambda: it.state.unwatched.value == {"": "GPU 1 is reset"}, "it is reported")
        assert (await it.state.sampler.value.sample(max_age=0)).failure == "GPU 1 is reset"
        assert not children_of(os.getpid())
        write(gpus, "faults", "")
        file.unlink()
        wanted = it.state.look_requested.version
        await until(lambda: not it.state.unwatched.value, "it is watched again")
        assert it.state.look_requested.version == wanted + 1
        assert not (await it.state.sampler.value.sample(max_age=0)).failure
        assert not it.state.faults.lines


async def test_a_child_that_is_not_ready_yet_lets_go_too(gpus: SimulatedNode) -> None:
    it, answers = Monitored(gpus, ""), list[Any]()
    children = Children(it._say, gpus.state)
    sampler = NvmlSampler(
        lambda: it.state.node.value, children, to_answer=1000, post=answers.append
    )
    write(gpus, "faults", "any=hang")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sampler.serve)
        tasks.start_soon(partial(sampler.sample, max_age=0))
        await until(lambda: children_of(os.getpid()), "one hangs before it is ready")
        publish(it.state.node, NodeSnapshot(faults=("GPU 1 is reset",)))
        sampler.look_again()
        await until(lambda: not children_of(os.getpid()), "no child holds a GPU")
        await until(lambda: answers, "the request is answered")
        tasks.cancel_scope.cancel()
    assert answers[0].failure


@pytest.mark.parametrize(
    ("function", "error", "why"),
    [
        ("nvmlDeviceRegisterEvents", 3, "Not Supported"),
        # pynvml's error if it is missing
        pytest.param("nvmlEventSetWait", 13, "Function Not Found", marks=pytest.mark.thorough),
        ("nvmlEventSetCreate", 13, "Function Not Found"),
    ],
)
async def test_gpus_without_events_are_told_of_once_and_asked_all_the_same(
    gpus: SimulatedNode, function: str, error: int, why: str
) -> None:
    write(gpus, "faults", f"{function}=error:{error}")
    async with monitored(gpus) as it:
        await until(lambda: it.state.unwatched.value, "it is reported")
        lost = it.state.node.value.gpus[0]
        write(gpus, "faults", f"{function}=error:{error} gpu0=error:15")
        await until(lambda: it.state.lost_gpus.value == {lost: "GPU is lost"}, "one is lost")
        assert it.state.unwatched.value.keys() == set(it.state.node.value.gpus)
        assert it.state.unwatched.value[it.state.node.value.gpus[1]] == why
        assert len(it.unheard()) == 4
        assert not [line for line in it.said if "delivers its events again" in line]
        assert "NVML delivers events of no GPU" in it.state.faults.lines["monitor.events"]
        assert len([line for line in it.said if "NVSHIM-E2745" in line]) == 1


async def test_a_child_that_no_signal_reaches_is_left_alone(
    gpus: SimulatedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "TO_DIE", 0.1)
    freezer = Path("/sys/fs/cgroup/freezer")
    if not (freezer / "tasks").exists():
        pytest.skip("no freezer of cgroup v1, whose processes no signal reaches")
    said: list[str] = []
    children = Children(lambda *words, **_: said.append(words[1]), gpus.state)
    child = children.start("samples", library_of(look(load_config(gpus.config_path))))
    cgroup = freezer / f"nvshim-monitor-{os.getpid()}"
    cgroup.mkdir()
    try:
        (cgroup / "cgroup.procs").write_text(str(child.process.pid))
        (cgroup / "freezer.state").write_text("FROZEN")
        frozen = cgroup / "freezer.state"
        await until(lambda: frozen.read_text() == "FROZEN\n", "it hangs")
        await children.end(child)
        assert children.abandoned == 1
        assert "cannot be killed" in said[0]
        frozen.write_text("THAWED")
        await until(lambda: not children.abandoned, "it is reaped once it exits")
    finally:
        (cgroup / "freezer.state").write_text("THAWED")
        child.process.kill()
        await until(lambda: child.process.poll() is not None, "it has exited")
        cgroup.rmdir()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_keeps_the_driver_once_the_agent_ends(gpus: SimulatedNode, number: int) -> None:
    words = ("--config", gpus.config_path, "--cdi-spec", "none", "--kernel-log", "/nowhere")
    with agent_process(*words) as process:
        eventually(lambda: children_of(process.pid), "a child that watches")
        if number == signal.SIGTERM:
            assert process.stderr is not None
            line = ""
            while "NVSHIM-E2746" not in line:
                line = process.stderr.readline()
                assert line
            # It exits at once, whatever NVML does.
            write(gpus, "faults", "any=hang")
        children: list[int] = []

        def are_on_their_own() -> bool:
            """Whether all children have left the server's session, in which they are forked."""
            children[:] = children_of(process.pid)
            with suppress(ProcessLookupError):
                return all(os.getsid(child) == child for child in children)
            return False

        eventually(are_on_their_own, "each child has its own session")
        process.send_signal(number)
        process.wait(timeout=60)
        eventually(lambda: not any(map(is_alive, children)), "they end with the agent")


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimulatedNode]:
    directory = tmp_path_factory.mktemp("eight") / "node"
    with SimulatedNode.create(str(directory), Scenario.load("eight")) as made:
        config = Path(made.config_path)
        # For a busy machine; querying all values of eight GPUs takes twice as long.
        config.write_text(config.read_text().replace("[node]\n", "[node]\nnvml-timeout = 10\n"))
        look(load_config(made.config_path))  # fill the inventory's cache
        yield made


def top(node: SimulatedNode) -> tuple[dict[str, Any], str]:
    """Return one output of `nvshim top`, as JSON and as text."""
    line = [sys.executable, "-m", "integration.cli", "top", "--once", "--config", node.config_path]
    told = subprocess.run([*line, "-o", "json"], stdout=subprocess.PIPE, check=True).stdout
    wide = [*line, "-o", "wide"]
    shown = subprocess.run(wide, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=True)
    frame: dict[str, Any] = json.loads(told)
    return frame, shown.stdout.decode()


def test_a_slow_driver_of_many_gpus_tells_of_all_of_them(eight: SimulatedNode) -> None:
    """A driver that takes a tenth of a second for each query does not hang."""
    write(eight, "faults", "any=sleep:100")
    try:
        frame, _ = top(eight)
    finally:
        write(eight, "faults", "")
    assert frame["failure"] is None, "it took all the time that one question may take"
    assert [each["temperature_celsius"] for each in frame["devices"]] == [30] * 8
    assert all(each["power_watts"] for each in frame["devices"])
