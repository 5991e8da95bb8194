"""An agent that is killed at a step of a claim, and claims that are deleted while none runs.

``python -m tests.chaos.claims`` tries all steps; here are those that leave most behind.
"""

from __future__ import annotations

import json
import os
import signal
from typing import Final

import grpc  # type: ignore[import-untyped] # it ships no types
import pytest

from api.proto import podresources_pb2 as podresources
from integration.node.options import DRA_DRIVER
from tests.e2e.test_dra import fresh as place
from tests.harness.dra_node import Place
from tests.harness.killing import killed_before
from tests.harness.kubelet_dra import Reference
from tests.harness.waiting import eventually

__all__ = ["place"]

# The system calls of a file's replacement and of its removal.
MOVES: Final = "rename,renameat,renameat2"
REMOVES: Final = "unlink,unlinkat"


def left(place: Place) -> tuple[list[str], list[object]]:
    """Return what is left of claims: the specs, and the recorded state."""
    with open(f"{place.node.state}/dra.json", encoding="utf-8") as file:
        claims = json.load(file)["claims"]
    return [each for each in os.listdir(place.cdi) if DRA_DRIVER in each], claims


@pytest.mark.parametrize("what", [pytest.param("state", marks=pytest.mark.thorough), "spec"])
def test_a_claim_that_was_half_prepared_is_prepared_by_the_next_agent(
    place: Place, what: str
) -> None:
    """The state is written before the spec."""
    claim, other = place.claim("one", place.gpus[0]), place.claim("other", place.gpus[0])
    with killed_before(place.agent.pid, MOVES, place.file(what, claim)):
        with pytest.raises(grpc.RpcError):
            place.driver.prepare(claim)
        place.agent.kill()
    assert not os.path.exists(place.spec(claim)), "it was killed before that"
    place.start_again()
    if what == "spec":
        assert "NVSHIM-E2774" in place.refusal(other), "the kubelet will ask again"
    place.have(claim)
    assert os.path.exists(place.spec(claim))
    place.give_back(claim)
    assert left(place) == ([], [])
    place.have(other)


@pytest.mark.parametrize(
    ("calls", "what"),
    [
        # Spec and state are left, as for a prepared claim.
        pytest.param(REMOVES, "spec", id="spec", marks=pytest.mark.thorough),
        pytest.param(MOVES, "state", id="state"),
    ],
)
def test_a_claim_that_was_half_taken_back_is_taken_back_by_the_next_agent(
    place: Place, calls: str, what: str
) -> None:
    claim, other = place.claim("one", place.gpus[0]), place.claim("other", place.gpus[0])
    place.have(claim)
    with killed_before(place.agent.pid, calls, place.file(what, claim)):
        with pytest.raises(grpc.RpcError):
            place.driver.unprepare(claim)
        place.agent.kill()
    place.start_again()
    assert "NVSHIM-E2774" in place.refusal(other), "it is still prepared"
    place.give_back(claim)
    assert left(place) == ([], [])
    place.have(other)


def test_what_cannot_be_removed_of_an_agent_before_keeps_nobody_from_claims(place: Place) -> None:
    place.agent.kill()
    os.mkdir(place.spec(("", "an unknown claim", "")))
    place.start_again()
    place.have(place.claim("one", place.gpus[0]))
    eventually(lambda: any("E2777" in each for each in place.agent.faults()), "it is reported")
    os.rmdir(place.spec(("", "an unknown claim", "")))


# -- a claim deleted while no agent ran, which no kubelet unprepares ------------


def look(place: Place, claim: Reference) -> None:
    """Make the agent look for deleted claims, and wait until it has asked for one."""
    path = f"/apis/resource.k8s.io/v1/namespaces/default/resourceclaims/{claim[2]}"
    before = place.cluster.asked.count(("GET", path))
    os.kill(place.agent.pid, signal.SIGHUP)
    eventually(lambda: place.cluster.asked.count(("GET", path)) > before, "it has looked")


def test_what_nobody_has_any_more_is_free_again(place: Place) -> None:
    gone, runs, stays = (
        place.claim(name, device)
        for name, device in zip(
            ("gone", "runs", "stays"), (*place.gpus, place.parts[0]), strict=True
        )
    )
    place.driver.prepare(gone, runs, stays)
    place.agent.kill()
    place.cluster.remove_claim("gone")
    place.cluster.remove_claim("runs")
    device = podresources.CDIDevice(name=f"k8s.{DRA_DRIVER}/claim={runs[1]}-{place.gpus[1]}")
    place.plugins.claimed["pod", "default"] = [
        podresources.DynamicResource(
            claim_name="runs",
            claim_namespace="default",
            claim_resources=[
                podresources.ClaimResource(driver_name=DRA_DRIVER, cdi_devices=[device])
            ],
        )
    ]
    place.start_again()
    other = place.claim("other", place.gpus[0])
    assert "NVSHIM-E2774" in place.refusal(other)
    look(place, stays)
    look(place, stays)
    eventually(lambda: place.agent.said("unprepared a stale claim"), "it is unprepared")
    assert not os.path.exists(place.spec(gone))
    place.have(other)
    assert os.path.exists(place.spec(runs))
    assert os.path.exists(place.spec(stays))
    (line,) = place.agent.said("unprepared a stale claim")
    assert (line["claim"], line["devices"]) == ("default/gone", [place.gpus[0]])
