"""The agent is killed at a step of preparing a claim, or of taking one back; another one goes on.

All steps are tried by ``python -m tests.chaos.claims``; here those that leave most behind.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Final

import grpc  # type: ignore[import-untyped] # it ships no types
import pytest

from integration.node.options import DRA_DRIVER
from tests.e2e.test_dra import fresh as place
from tests.harness.killing import killed_at
from tests.harness.waiting import eventually

if TYPE_CHECKING:
    from tests.harness.dra_node import Place

__all__ = ["place"]

# The system calls of a file's replacement and of its removal.
MOVES: Final = "rename,renameat,renameat2"
REMOVES: Final = "unlink,unlinkat"


def left(place: Place) -> tuple[list[str], list[object]]:
    """What is there for claims: specs, and what is written down."""
    with open(f"{place.node.state}/dra.json", encoding="utf-8") as file:
        claims = json.load(file)["claims"]
    return [each for each in os.listdir(place.cdi) if DRA_DRIVER in each], claims


@pytest.mark.parametrize(
    "nth",
    [
        # Less is left: nothing but the state has been written.
        pytest.param(1, id="state", marks=pytest.mark.thorough),
        pytest.param(2, id="spec"),
    ],
)
def test_a_claim_that_was_half_prepared_is_prepared_by_the_next_agent(
    place: Place, nth: int
) -> None:
    claim, other = place.claim("one", place.gpus[0]), place.claim("other", place.gpus[0])
    with killed_at(place.agent.pid, MOVES, nth=nth):
        with pytest.raises(grpc.RpcError):
            place.driver.prepare(claim)
        place.agent.kill()
    assert not os.path.exists(place.spec(claim)), "it was killed before that"
    place.start_again()
    if nth > 1:
        assert "NVSHIM-E2774" in place.refusal(other), "the kubelet will ask again"
    place.have(claim)
    assert os.path.exists(place.spec(claim))
    place.give_back(claim)
    assert left(place) == ([], [])
    place.have(other)


@pytest.mark.parametrize(
    "calls",
    [
        # More is left, as of a claim that was prepared.
        pytest.param(REMOVES, id="spec", marks=pytest.mark.thorough),
        pytest.param(MOVES, id="state"),
    ],
)
def test_a_claim_that_was_half_taken_back_is_taken_back_by_the_next_agent(
    place: Place, calls: str
) -> None:
    claim, other = place.claim("one", place.gpus[0]), place.claim("other", place.gpus[0])
    place.have(claim)
    with killed_at(place.agent.pid, calls):
        with pytest.raises(grpc.RpcError):
            place.driver.unprepare(claim)
        place.agent.kill()
    place.start_again()
    assert "NVSHIM-E2774" in place.refusal(other), "it is not taken back yet"
    place.give_back(claim)
    assert left(place) == ([], [])
    place.have(other)


def test_what_cannot_be_removed_of_an_agent_before_keeps_nobody_from_claims(place: Place) -> None:
    place.agent.kill()
    os.mkdir(place.spec(("", "a claim of nobody", "")))
    place.start_again()
    place.have(place.claim("one", place.gpus[0]))
    eventually(lambda: any("E2777" in each for each in place.agent.faults()), "it is said")
    os.rmdir(place.spec(("", "a claim of nobody", "")))
