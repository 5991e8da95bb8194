"""GPU activity by GPM: from a simulated NVML in its child, and from invalid answers."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace as Answer
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from hooks.config import load_config
from hooks.node.nvml_probe import GpuAsker
from integration.node.refresh import look
from integration.nvml import child_profiling, session
from integration.nvml.child_profiling import Profiler
from integration.nvml.child_samples import Asker
from integration.nvml.lock import exclusive
from integration.nvml.sampler import NvmlSampler
from integration.nvml.session import Children
from integration.nvml.values import Activity
from integration.simulated import Scenario, SimulatedNode
from integration.timeouts import PATIENCE
from tests.harness.waiting import until
from tests.unit.node.test_monitor_answering import nvml

if TYPE_CHECKING:
    from collections.abc import Iterator

    from integration.nvml.values import Sample

pytestmark = pytest.mark.anyio

MIB = 1 << 20
WINDOW = child_profiling._SHORTEST * 1.2


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimulatedNode]:
    """Make a node with two H100, one of them with MIG devices, and a GPU without GPM."""
    divided = {"index": 1, "mig": ["1g.10gb", "3g.40gb/1c+2c"]}
    table = {"gpus": 3, "model": "h100", "gpu": [divided, {"index": 2, "model": "a100"}]}
    directory = tmp_path_factory.mktemp("profiling") / "node"
    with SimulatedNode.create(str(directory), Scenario.parse(table)) as made:
        yield made


@pytest.fixture
def gpus(node: SimulatedNode, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedNode]:
    monkeypatch.setattr(session, "TO_DIE", 10.0 * PATIENCE)
    yield node
    for path in Path(node.state).glob("nvml-*"):
        path.unlink()


def write(node: SimulatedNode, name: str, text: str) -> None:
    Path(node.state, f"nvml-{name}").write_text(text, encoding="ascii")


def sampler_of(node: SimulatedNode, to_answer: float = 3.0) -> NvmlSampler:
    seen = look(load_config(node.config_path))
    children = Children(lambda *_, **__: None, node.state)
    return NvmlSampler(lambda: seen, children, to_answer=to_answer * PATIENCE)


async def test_activity_is_the_mean_since_the_sample_before(gpus: SimulatedNode) -> None:
    sampler = sampler_of(gpus)
    inventory = look(load_config(gpus.config_path)).inventory
    assert inventory is not None
    large = {part.gpu_instance for part in inventory.mig_devices if "3g.40gb" in part.profile}
    write(
        gpus, "facts",
        "0 gpm-1 90\n0 gpm-2 80\n0 gpm-3 70\n0 gpm-5 60\n0 gpm-10 50\n0 gpm-20 3\n0 gpm-61 4\n"
        f"1 gpm-5-{large.pop()} 30\n2 pcie-sent-kb 7\n",
    )  # fmt: skip

    async def sample(*, profile: bool = True) -> Sample:
        found = await sampler.sample(max_age=0, profile=profile)
        assert (found.failure, found.notes) == ("", ())
        return found

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sampler.serve)
        assert {gpu.activity for gpu in (await sample(profile=False)).gpus} == {Activity()}
        first = await sample()
        assert [gpu.activity for gpu in first.gpus] == [
            Activity(), Activity(), Activity(pcie_sent=7000, pcie_received=0),
        ]  # fmt: skip
        await anyio.sleep(WINDOW)
        whole, divided, old = (await sample()).gpus
        assert whole.activity == Activity(0.9, 0.8, 0.7, 0.6, 0.5, 0, 0, 0, 3 * MIB, 0, 4 * MIB, 0)
        assert old.activity == first.gpus[2].activity
        # Two are compute instances of one GPU instance.
        idle = Activity(*[0.0] * 8)
        assert len(divided.mig) == 3
        assert sorted((part.activity.tensor or 0) for part in divided.mig) == [0, 0.3, 0.3]
        assert idle in [part.activity for part in divided.mig]
        tasks.cancel_scope.cancel()


async def test_a_sample_without_activity_does_not_do_for_who_asks_for_it(
    gpus: SimulatedNode,
) -> None:
    sampler = sampler_of(gpus)
    answers: dict[bool, Sample] = {}
    write(gpus, "faults", "nvmlDeviceGetPowerUsage=sleep:200\n")

    async def ask(*, profile: bool) -> None:
        answers[profile] = await sampler.sample(max_age=60, profile=profile)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sampler.serve)
        async with anyio.create_task_group() as askers:
            askers.start_soon(lambda: ask(profile=False))
            await until(lambda: sampler._child is not None, "the first question is asked")
            askers.start_soon(lambda: ask(profile=True))
        assert answers[False].gpus[2].activity == Activity()
        assert answers[True].gpus[2].activity == Activity(pcie_sent=0, pcie_received=0)
        assert await sampler.sample(max_age=60) is answers[True]
        tasks.cancel_scope.cancel()


async def test_the_sample_before_does_not_do_for_activity_while_that_is_asked_for(
    gpus: SimulatedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, goes_on, answers = anyio.Event(), anyio.Event(), list[str]()

    async def answer(*_: Any, profile: bool = False, **__: Any) -> dict[str, Any]:
        if profile:
            begun.set()
            await goes_on.wait()
        lists = dict.fromkeys(("gpus", "processes", "notes", "uncounted"), ())
        return {"driver": "with" if profile else "without", "hanging": {}, **lists}

    async def ask() -> None:
        answers.append((await sampler.sample(max_age=60, profile=True)).driver)

    sampler = sampler_of(gpus)
    monkeypatch.setattr(sampler, "_answer", answer)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sampler.serve)
        await sampler.sample(max_age=0)
        async with anyio.create_task_group() as askers:
            askers.start_soon(ask)
            await begun.wait()
            askers.start_soon(ask)
            await anyio.wait_all_tasks_blocked()
            goes_on.set()
        assert answers == ["with", "with"]
        tasks.cancel_scope.cancel()


async def test_who_asks_while_a_question_is_answered_does_not_end_the_child(
    gpus: SimulatedNode,
) -> None:
    sampler = sampler_of(gpus)
    write(gpus, "faults", "nvmlDeviceGetPowerUsage=sleep:200\n")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sampler.serve)
        async with anyio.create_task_group() as askers:
            askers.start_soon(lambda: sampler.sample(max_age=60))
            await until(lambda: sampler._child is not None, "the first question is asked")
            askers.start_soon(lambda: sampler.sample(max_age=60))
            child = sampler._child
        await sampler.sample(max_age=0)
        assert sampler._child is child
        tasks.cancel_scope.cancel()


async def test_activity_is_asked_for_again_as_soon_as_nvml_is_no_longer_closed(
    gpus: SimulatedNode,
) -> None:
    sampler = sampler_of(gpus)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sampler.serve)
        with exclusive(gpus.state, 0) as lock:
            assert lock is not None
            assert (await sampler.sample(max_age=0, profile=True)).failure
        sampler._retry = -math.inf
        sample = await sampler.sample(max_age=0, profile=True)
        assert sample.gpus[2].activity == Activity(pcie_sent=0, pcie_received=0)
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("fault", ["crash", "hang"])
async def test_a_driver_that_fails_at_it_tells_the_rest(gpus: SimulatedNode, fault: str) -> None:
    sampler = sampler_of(gpus, 0.5)
    write(gpus, "faults", f"nvmlGpmSampleGet={fault}\n")
    inits = Path(gpus.state, "nvml-inits")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sampler.serve)
        for _ in range(2):
            sample = await sampler.sample(max_age=0, profile=True)
            assert not sample.failure
            assert [gpu.lost for gpu in sample.gpus] == ["", "", ""]
            assert sample.gpus[0].temperature_celsius == 30
            assert {gpu.activity for gpu in sample.gpus} == {Activity()}
            inits.touch()
        assert inits.read_bytes() == b""  # not tried again
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("fault", ["crash", "hang"])
async def test_a_gpu_that_is_given_up_takes_no_activity_from_the_others(
    gpus: SimulatedNode, fault: str
) -> None:
    sampler = sampler_of(gpus, 0.5)
    write(gpus, "faults", f"gpu0={fault}\n")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sampler.serve)
        for known in (Activity(), Activity(pcie_sent=0, pcie_received=0)):
            sample = await sampler.sample(max_age=0, profile=True)
            assert [bool(gpu.lost) for gpu in sample.gpus] == [True, False, False]
            assert sample.gpus[2].activity == known
        tasks.cancel_scope.cancel()


async def test_a_gpu_that_was_given_up_is_asked_again_with_its_activity(
    gpus: SimulatedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = sampler_of(gpus, 0.5)
    write(gpus, "faults", "gpu2=hang\n")

    async def lost() -> list[bool]:
        sample = await sampler.sample(max_age=0, profile=True)
        return [bool(gpu.lost) for gpu in sample.gpus]

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sampler.serve)
        assert await lost() == [False, False, True]
        write(gpus, "faults", "")
        assert await lost() == [False, False, True]
        monkeypatch.setattr(sampler, "_leave_until", 0.0)
        assert await lost() == [False, False, False]
        tasks.cancel_scope.cancel()


# -- odd answers -------------------------------------------------------------------------------


class NvmlError(Exception):
    def __init__(self, value: int) -> None:
        self.value = value


class Gpm:
    """An NVML with GPM.

    Attributes:
        fails: the error of each call, by the end of its name.
        told: the value and the error of each metric; by default 50 without an error.
        samples: the allocated samples.
        filled: the samples, in the order in which they were filled.
    """

    NVMLError = NvmlError
    NVML_GPM_METRICS_GET_VERSION = 1

    def __init__(self, told: dict[int, tuple[float, int]] | None = None) -> None:
        self.told = told or {}
        self.fails: dict[str, int] = {}
        self.samples: list[object] = []
        self.filled: list[object] = []

    def c_nvmlGpmMetricsGet_t(self) -> Answer:  # noqa: N802 - pynvml's name
        return Answer(metrics=[Answer() for _ in range(98)])

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvmlGpm"):
            raise AttributeError(name)
        call = getattr(self, f"_{name.removeprefix('nvmlGpm')}")

        def answer(*arguments: Any) -> Any:
            if error := self.fails.get(name.removeprefix("nvmlGpm")):
                raise NvmlError(error)
            return call(*arguments)

        return answer

    def _QueryDeviceSupport(self, _: Any) -> Answer:  # noqa: N802
        return Answer(isSupportedDevice=1)

    def _SampleAlloc(self) -> object:  # noqa: N802
        self.samples.append(object())
        return self.samples[-1]

    def _SampleFree(self, sample: object) -> None:  # noqa: N802
        self.samples.remove(sample)

    def _SampleGet(self, _: Any, sample: object) -> object:  # noqa: N802
        self.filled.append(sample)
        return sample

    def _MigSampleGet(self, gpu: Any, _: int, sample: object) -> object:  # noqa: N802
        return self._SampleGet(gpu, sample)

    def _MetricsGet(self, request: Answer) -> Answer:  # noqa: N802
        assert (request.version, [request.sample1, request.sample2]) == (1, self.filled[-2:])
        for metric in request.metrics[: request.numMetrics]:
            metric.value, metric.nvmlReturn = self.told.get(metric.metricId, (50.0, 0))
        return request


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return a list with the current time in seconds, which is mocked."""
    told = [1000.0]
    monkeypatch.setattr(child_profiling, "time", Answer(monotonic=lambda: told[0]))
    return told


def test_a_value_that_fails_or_cannot_be_true_is_absent(clock: list[float]) -> None:
    gpm = Gpm({1: (math.nan, 0), 2: (50.0, 3), 3: (-1.0, 0), 5: (250.0, 0), 10: (100.4, 0),
               20: (math.inf, 0), 21: (-0.5, 0), 60: (1e12, 0), 61: (2.0, 0)})  # fmt: skip
    profiler = Profiler(gpm)
    assert profiler.gpu(GpuAsker(gpm, 0), "GPU-a", "handle") == {}
    clock[0] += 1
    assert profiler.gpu(GpuAsker(gpm, 0), "GPU-a", "handle") == {
        "dram": 1.0, "fp64": 0.5, "fp32": 0.5, "fp16": 0.5, "nvlink_sent": 2 * MIB,
    }  # fmt: skip


def test_two_samples_are_filled_in_turn_and_seldom_and_freed(clock: list[float]) -> None:
    gpm = Gpm()
    profiler, asker = Profiler(gpm), GpuAsker(gpm, 0)
    for _ in range(6):
        before = profiler.gpu(asker, "GPU-a", "handle")
        assert profiler.gpu(asker, "GPU-a", "handle") == before  # without time passing
        clock[0] += 1
    first, second = gpm.samples
    assert gpm.filled == [first, second] * 3
    profiler.close()
    assert gpm.samples == []


@pytest.mark.parametrize("call", ["QueryDeviceSupport", "SampleAlloc", "SampleGet", "MetricsGet"])
@pytest.mark.parametrize("error", [3, 4, 999])
def test_a_call_that_fails_leaves_values_out_until_it_works(
    clock: list[float], call: str, error: int
) -> None:
    gpm = Gpm()
    profiler, asker = Profiler(gpm), GpuAsker(gpm, 0)
    found = []
    for fails in ((), (call,), (call,), (), ()):
        gpm.fails = dict.fromkeys(fails, error)
        found.append(bool(profiler.gpu(asker, "GPU-a", "handle")))
        clock[0] += 1
    # The first query has no result, because a metric needs an earlier sample.
    assert (found[:3], found[-1]) == ([False, False, False], True)
    assert len(gpm.samples) == 2


def test_an_instance_has_no_activity_of_another_that_had_its_id(clock: list[float]) -> None:
    gpm = Gpm()
    there: dict[str, Any] = {"GetMemoryInfo": lambda _: Answer(total=10, used=4)}
    profiler = Profiler(gpm)

    def activity() -> list[bool]:
        """Ask again; return of each MIG device whether its activity is known."""
        clock[0] += 1
        library = nvml(**there)
        for call in ("SampleAlloc", "MigSampleGet", "MetricsGet"):  # not of the GPU as a whole
            setattr(library, f"nvmlGpm{call}", getattr(gpm, f"nvmlGpm{call}"))
        [gpu] = Asker(library, {}, {}, profiler).all(5.0)["gpus"]
        return [bool(device["activity"]) for device in gpu["mig"]]

    assert [activity(), activity()] == [[False], [True]]
    # The UUID depends on the GPU and the ids only.
    there["GetMemoryInfo"] = lambda _: Answer(total=20, used=4)
    assert [activity(), activity()] == [[False], [True]]
    there["GetMaxMigDeviceCount"] = 0
    assert activity() == []
    assert gpm.samples == []
    del there["GetMaxMigDeviceCount"]
    assert [activity(), activity()] == [[False], [True]]
