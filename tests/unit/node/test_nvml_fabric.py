"""What newer drivers report of a GPU: its NVLink fabric and the repairs that it needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hooks.config import load_config
from integration.cli.app import main
from integration.nvml import fabric
from integration.nvml.inventory import inventory_of
from integration.nvml.sampler import sampling
from integration.nvml.snapshot import NodeSnapshot
from integration.nvml.values import Fabric
from integration.simulated import Scenario, SimulatedNode
from tests.harness.pynvml_calls import needs

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.anyio, needs("nvmlDeviceGetUnrepairableMemoryFlag_v1")]

PLACE = Fabric("completed", "00000000-0000-0000-0000-0000000000ab", 5, "healthy")
FACTS = """
0 memory-unrepairable 1
0 channel-repair 0
0 tpc-repair 1
1 fabric-state 3
1 fabric-cluster 171
1 fabric-clique 5
1 fabric-health 1
"""


@pytest.fixture
def node(tmp_path: Path) -> Iterator[SimulatedNode]:
    with SimulatedNode.create(str(tmp_path / "node"), Scenario.load("two")) as node:
        Path(node.state, "nvml-facts").write_text(FACTS, encoding="ascii")
        yield node


async def test_a_sample_has_both(node: SimulatedNode) -> None:
    config = load_config(node.config_path)
    seen = NodeSnapshot(inventory=inventory_of(config))
    async with sampling(lambda: seen, lambda *_, **__: None, config) as sampler:
        sample = await sampler.sample(max_age=0)
    assert [gpu.fabric for gpu in sample.gpus] == [None, PLACE]
    names = ("unrepairable_memory", "channel_repair_pending", "tpc_repair_pending")
    repairs = [[getattr(gpu, name) for name in names] for gpu in sample.gpus]
    assert repairs == [[True, False, True], [None] * 3]
    assert PLACE.name == "00000000-0000-0000-0000-0000000000ab.5"


def test_list_shows_the_fabric(node: SimulatedNode, capsys: pytest.CaptureFixture[str]) -> None:
    def shown(form: str) -> str:
        where = ["--config", node.config_path, "--containerd-state", node.state]
        main(["list", *where, "-o", form])
        return capsys.readouterr().out

    items: list[dict[str, Any]] = json.loads(shown("json"))["items"]
    assert [each["fabric"] for each in items] == [
        None,
        {"state": "completed", "cluster_uuid": PLACE.cluster_uuid, "clique": 5,
         "health": "healthy", "failure": ""},
    ]  # fmt: skip
    assert PLACE.name in shown("wide")
    assert "FABRIC" not in shown("table")


@pytest.mark.parametrize(
    "answer", [b"", b"{", b"[]", b'{"gpus": [1]}', b'{"gpus": {"a": {"x": 1}}}']
)
def test_an_answer_that_makes_no_sense_is_no_fabric(
    node: SimulatedNode, monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    config = load_config(node.config_path)
    inventory = inventory_of(config)
    monkeypatch.setattr(fabric, "ask_nvml", lambda *_: answer)
    assert fabric.fabrics_of(config, inventory) == {}
