"""What claims cost the agent: memory, connections, and wake-ups of its other services."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING, Final

import pytest

from tests.harness.dra_node import Place, dra_node
from tests.harness.processes import connections_to, rss_and_pss
from tests.harness.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_GPUS, _PARTS = 8, 7
_RESOURCE: Final = "nvidia.com/mig-1g.5gb"
_CLAIMS: Final = 100
_MOST_MEMORY: Final = 15 * 1024  # KiB


@pytest.fixture(
    params=[
        pytest.param((), id="plugin"),
        # It does less than with the device plugin.
        pytest.param(("--device-plugin", "no"), id="alone", marks=pytest.mark.thorough),
    ]
)
def flags(request: pytest.FixtureRequest) -> tuple[str, ...]:
    found: tuple[str, ...] = request.param
    return found


@pytest.fixture
def place(tmp_path: Path, flags: tuple[str, ...]) -> Iterator[Place]:
    cut = [{"index": n, "mig": ["1g.5gb"] * _PARTS} for n in range(_GPUS)]
    scenario = {"gpus": _GPUS, "model": "a100", "gpu": cut}
    with (
        tempfile.TemporaryDirectory(prefix="kubelet-") as root,
        dra_node(str(tmp_path), root, scenario, devices=_GPUS * _PARTS, flags=flags) as place,
    ):
        yield place


def lists(place: Place) -> int:
    """Return how many device lists the kubelet's device manager received."""
    return sum(len(plugin.lists) for plugin in place.plugins.plugins.values())


def test_many_claims_take_little_memory_one_connection_and_few_lists(
    place: Place, flags: tuple[str, ...]
) -> None:
    if not flags:
        place.agent.configure(flags={"migStrategy": "mixed"})
        place.plugins.wait_for(_RESOURCE, _GPUS * _PARTS)
    told, path = lists(place), str(place.plugins.pod_resources)
    claims = [place.claim(f"claim-{n}", place.parts[n % len(place.parts)]) for n in range(_CLAIMS)]
    connections = set()
    for claim in claims:
        assert place.driver.prepare(claim)[claim[1]].error == ""
        place.give_back(claim)
        connections |= connections_to(path)
    assert len(connections) == 1
    # One late list may cover two changes.
    assert lists(place) - told <= (0 if flags else 2 * _CLAIMS)
    for number, claim in enumerate(claims):
        admin = {"request": "gpu", "adminAccess": True}
        result = place.result(place.parts[number % len(place.parts)], **admin)
        uid = place.cluster.claim(f"held-{number}", [result], uid=claim[1])
        assert place.driver.prepare(("default", uid, f"held-{number}"))[uid].error == ""
    having = rss_and_pss(place.agent.pid)
    place.agent.stop()
    with place.new_agent(*flags, dra=False) as agent:
        eventually(lambda: connections_to(path), "it keeps its ledger")
        if not flags:
            place.plugins.wait_for(_RESOURCE, _GPUS * _PARTS)
        lacking = rss_and_pss(agent.pid)
    more = [one - other for one, other in zip(having, lacking, strict=True)]
    assert max(more) <= _MOST_MEMORY, more
