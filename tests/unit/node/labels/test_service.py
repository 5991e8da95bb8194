"""The labels of a simulated node follow its GPUs and the device plugin's settings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import anyio
import pytest

from hooks.config import Config, load_config
from hooks.errors import NvmlFailed
from hooks.node.inventory import Inventory
from integration.node import reporter
from integration.node.options import FILE, NO, NODE, Options
from integration.node.reporter import api_server_of
from integration.node.service import Context
from integration.node.services.labels.service import Labeller, run
from integration.node.state.store import State
from integration.node.values.resources import Mig, Settings
from integration.nvml.inventory import inventory_of
from integration.nvml.snapshot import NodeSnapshot
from integration.simulated import Scenario, SimulatedNode
from tests.harness.node_state import publish
from tests.harness.pynvml_calls import needs
from tests.harness.raising import raises
from tests.harness.waiting import until
from tests.unit.node.labels.label_cluster import FOREIGN, Cluster

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.anyio

NO_ANSWER: Final = "nvmlDeviceGetCount=error:999"
MIXED: Final = Settings(mig_strategy=Mig.MIXED)
SEVEN: Final = [{"index": index, "mig": ["1g.10gb"] * 7} for index in range(8)]
# The labels of GFD 0.20 on the same simulated node.
PROFILE: Final = {
    "count": "56", "memory": "9984", "multiprocessors": "16", "replicas": "1",
    "product": "NVIDIA-H100-80GB-HBM3-MIG-1g.10gb", "sharing-strategy": "none",
    "engines.copy": "1", "engines.decoder": "1", "engines.encoder": "0", "engines.jpeg": "1",
    "engines.ofa": "0", "slices.ci": "1", "slices.gi": "1",
}  # fmt: skip


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimulatedNode]:
    scenario = Scenario.parse({"gpus": 8, "model": "h100", "gpu": SEVEN})
    directory = tmp_path_factory.mktemp("labels") / "node"
    with SimulatedNode.create(str(directory), scenario) as node:
        yield node


@pytest.fixture(scope="module")
def config(node: SimulatedNode) -> Config:
    return load_config(node.config_path)


@pytest.fixture(scope="module")
def there(config: Config) -> Inventory:
    return inventory_of(config, fresh=True)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(str(tmp_path_factory.mktemp("cluster") / "account")) as cluster:
        yield cluster


@pytest.fixture
def cluster(server: Cluster) -> Cluster:
    server.reset()
    return server


@pytest.fixture
def faults(node: SimulatedNode) -> Iterator[Path]:
    """Return the file of NVML's faults, and empty it at the end."""
    path = Path(node.state, "nvml-faults")
    yield path
    path.write_text("")


class Agent:
    """The label service; the test publishes in place of the other services."""

    def __init__(self, config: Config, options: Options) -> None:
        self.state, self.lines = State(), list[str]()
        self.context = Context(config, options, self._say, self.state)

    def _say(self, _: str, line: str, **__: Any) -> None:
        self.lines.append(line)

    def sees(self, inventory: Inventory | None) -> None:
        publish(self.state.node, NodeSnapshot(inventory))

    def reads(self, settings: Settings) -> None:
        publish(self.state.settings, settings)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run, self.context)
            yield
            tasks.cancel_scope.cancel()


@pytest.fixture
def agent(config: Config, cluster: Cluster) -> Agent:
    return Agent(config, cluster.options(node_labels=NODE))


async def labelled(cluster: Cluster, name: str, value: str | None) -> None:
    await until(lambda: cluster.labels.get(f"nvidia.com/{name}") == value, f"{name} is {value}")


async def test_the_node_is_labelled_as_gpu_feature_discovery_does_it(
    cluster: Cluster, agent: Agent, there: Inventory
) -> None:
    cluster.labels["nvidia.com/mig-7g.80gb.count"] = "8"
    agent.sees(there)
    agent.reads(MIXED)
    async with agent.running():
        await labelled(cluster, "gpu.count", "8")
    start = "nvidia.com/mig-1g.10gb."
    told = {n.removeprefix(start): v for n, v in cluster.labels.items() if n.startswith(start)}
    assert told == PROFILE
    assert cluster.labels["nvidia.com/mig.capable"] == "true"
    assert cluster.labels["nvidia.com/gpu.mode"] == "compute"
    assert cluster.labels.items() >= FOREIGN.items()
    assert "nvidia.com/mig-7g.80gb.count" not in cluster.labels
    assert agent.lines == []


async def test_labels_follow_the_settings_and_are_written_again_on_sighup(
    cluster: Cluster, agent: Agent, there: Inventory
) -> None:
    async with agent.running():
        agent.sees(there)
        agent.reads(MIXED)
        await labelled(cluster, "mig.strategy", "mixed")
        agent.reads(Settings(mig_strategy=Mig.SINGLE))
        await labelled(cluster, "gpu.count", "56")
        assert "nvidia.com/mig-1g.10gb.count" not in cluster.labels
        cluster.labels.pop("nvidia.com/gpu.count")
        publish(agent.state.reloads, 1)
        await labelled(cluster, "gpu.count", "56")
    assert cluster.labels["nvidia.com/gpu.count"] == "56", "they stay when the agent stops"


async def test_labels_that_were_removed_or_went_with_the_node_are_written_again(
    cluster: Cluster, agent: Agent, there: Inventory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporter, "_CHECK_AFTER", 0.05)
    agent.sees(there)
    agent.reads(MIXED)
    async with agent.running():
        await labelled(cluster, "gpu.count", "8")
        cluster.reset()
        await labelled(cluster, "gpu.count", "8")


@needs("nvmlDeviceGetGpuFabricInfoV")
async def test_the_clique_is_that_of_all_gpus_in_a_fabric(
    cluster: Cluster, agent: Agent, there: Inventory
) -> None:
    facts = Path(agent.context.config.state, "nvml-facts")
    facts.write_text("0 fabric-state 3\n0 fabric-cluster 171\n0 fabric-clique 5\n")
    try:
        async with agent.running():
            agent.sees(there)
            agent.reads(MIXED)
            # Until the monitor's first sample, the service queries NVML; then it uses samples.
            await labelled(cluster, "gpu.clique", "00000000-0000-0000-0000-0000000000ab.5")
            publish(agent.state.cliques, frozenset({"a.1"}))
            await labelled(cluster, "gpu.clique", "a.1")
            publish(agent.state.cliques, frozenset({"a.1", "a.2"}))
            await labelled(cluster, "gpu.clique", None)
    finally:
        facts.unlink()


def test_the_same_labels_are_not_written_again(
    cluster: Cluster, agent: Agent, there: Inventory, faults: Path
) -> None:
    labeller = Labeller(agent.context)
    with closing(api_server_of(agent.context.options)) as api:
        labeller.write(api)
        assert cluster.asked == 0, "nothing is known"
        agent.sees(there)
        agent.reads(MIXED)
        labeller.write(api)
        publish(agent.state.node, NodeSnapshot(there, faults=("another fault",)))
        faults.write_text(NO_ANSWER)  # NVML is queried once
        labeller.write(api)
        assert (cluster.asked, len(cluster.writes)) == (2, 1)


def test_labels_stay_while_a_gpu_is_lost_and_go_with_the_last_one(
    cluster: Cluster, agent: Agent, there: Inventory
) -> None:
    labeller = Labeller(agent.context)
    agent.reads(MIXED)
    lost = replace(there.gpus[0], lost="it is lost", memory=None)
    parts = tuple(each for each in there.mig_devices if each.gpu)
    with closing(api_server_of(agent.context.options)) as api:

        def write(inventory: Inventory | None, **changes: Any) -> dict[str, str]:
            agent.sees(replace(inventory, **changes) if inventory is not None else None)
            labeller.write(api)
            return dict(cluster.labels)

        first = write(there)
        assert first["nvidia.com/mig-1g.10gb.count"] == "56"
        assert write(there, gpus=(lost, *there.gpus[1:]), mig_devices=parts) == first
        assert write(there, nvml_failure="it hangs", mig_devices=()) == first
        assert write(None) == first
        assert len(cluster.writes) == 1
        gone = write(there, gpus=there.gpus[1:], mig_devices=parts)
        assert gone["nvidia.com/mig-1g.10gb.count"] == "49"
        assert gone["nvidia.com/gpu.count"] == "7"
        assert write(there, gpus=(), mig_devices=()) == FOREIGN


def test_after_a_restart_a_lost_gpu_counts_and_the_others_say_the_rest(
    cluster: Cluster, agent: Agent, there: Inventory
) -> None:
    lost = replace(there.gpus[0], lost="it is lost", memory=None, compute_capability="")
    parts = tuple(each for each in there.mig_devices if each.gpu)
    agent.sees(replace(there, gpus=(lost, *there.gpus[1:]), mig_devices=parts))
    agent.reads(MIXED)
    with closing(api_server_of(agent.context.options)) as api:
        Labeller(agent.context).write(api)
    told = {name: cluster.labels[f"nvidia.com/gpu.{name}"] for name in ("count", "memory")}
    assert told == {"count": "8", "memory": "81559"}


def test_nothing_is_written_while_nvml_leaves_out_a_gpu(
    cluster: Cluster, agent: Agent, there: Inventory, faults: Path
) -> None:
    agent.sees(there)
    agent.reads(MIXED)
    with closing(api_server_of(agent.context.options)) as api:
        labeller = Labeller(agent.context)
        faults.write_text("gpu4.nvmlDeviceGetGpuInstances=error:999")
        with raises(NvmlFailed, match=f"its answer lacks {there.gpus[4].uuid}"):
            labeller.write(api)
        assert cluster.labels == FOREIGN
        faults.write_text("")
        labeller.write(api)
    assert cluster.labels["nvidia.com/mig-1g.10gb.count"] == "56"


def test_after_a_restart_labels_stay_if_no_gpu_answers(
    cluster: Cluster, agent: Agent, there: Inventory
) -> None:
    agent.reads(MIXED)
    lost = [
        replace(gpu, lost="it is lost", memory=None, compute_capability="", architecture="")
        for gpu in there.gpus
    ]
    with closing(api_server_of(agent.context.options)) as api:
        agent.sees(there)
        Labeller(agent.context).write(api)
        before = dict(cluster.labels)
        agent.sees(replace(there, gpus=tuple(lost), mig_devices=()))
        Labeller(agent.context).write(api)
    assert cluster.labels == before


def test_without_a_driver_labels_go_only_if_the_gpus_are_gone_as_well(
    tmp_path: Path, cluster: Cluster, agent: Agent, config: Config
) -> None:
    cluster.labels["nvidia.com/gpu.count"] = "8"
    bare = Agent(replace(config, sys=str(tmp_path / "sys")), agent.context.options)
    for each, count in ((agent, "8"), (bare, None)):
        each.reads(MIXED)
        with closing(api_server_of(each.context.options)) as api:
            Labeller(each.context).write(api)
        assert cluster.labels.get("nvidia.com/gpu.count") == count


def test_while_nvml_is_paused_it_is_not_asked(
    cluster: Cluster, agent: Agent, there: Inventory, faults: Path
) -> None:
    faults.write_text(NO_ANSWER)
    publish(agent.state.nvml_pause, "a reset")
    agent.sees(there)
    agent.reads(MIXED)
    labeller = Labeller(agent.context)
    with closing(api_server_of(agent.context.options)) as api:
        labeller.write(api)
        publish(agent.state.nvml_pause, "")
        with raises(NvmlFailed, match="for the node's labels"):
            labeller.write(api)
    assert cluster.asked == 0


def test_nothing_is_written_after_the_removal(
    cluster: Cluster, agent: Agent, there: Inventory
) -> None:
    """A thread that still queries NVML when the agent stops would write afterwards."""
    agent.sees(there)
    agent.reads(MIXED)
    labeller = Labeller(agent.context)
    labeller.remove()
    with closing(api_server_of(agent.context.options)) as api:
        labeller.write(api)
    assert cluster.writes == []


async def test_nvml_is_asked_again_after_it_has_failed(
    cluster: Cluster, agent: Agent, there: Inventory, faults: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(reporter, "_RETRY_AFTER", 0.05)
    faults.write_text(NO_ANSWER)
    agent.sees(there)
    agent.reads(MIXED)
    async with agent.running():
        await until(lambda: agent.lines, "the failure is logged")
        faults.write_text("")
        await labelled(cluster, "gpu.count", "8")
    assert len(agent.lines) == 1


@pytest.mark.parametrize("way", [NODE, FILE])
async def test_labels_are_removed_at_the_end_if_that_is_wanted(
    tmp_path: Path, cluster: Cluster, config: Config, there: Inventory, way: str
) -> None:
    """Without the device plugin, the label service reads the settings itself."""
    path = tmp_path / "features.d" / "nvshim"
    options = cluster.options(
        node_labels=way, node_labels_remove=True, node_labels_file=str(path), device_plugin=NO
    )
    agent = Agent(config, options)
    agent.sees(there)
    async with agent.running():
        if way == NODE:
            await labelled(cluster, "gpu.count", "8")
        else:
            await until(path.exists, "the file is there")
            assert "nvidia.com/gpu.count=8" in path.read_text().splitlines()
    assert cluster.labels == FOREIGN
    assert not path.exists()
