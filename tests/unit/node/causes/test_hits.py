"""Which containers a fault affects, and who is responsible for it, for each."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any, Final

import pytest

from integration.node.faults.fault_attribution import Attribution, How
from integration.node.faults.hits import GPU_LOST, Hit, hits_of, lost
from integration.node.faults.policy import Verdict
from integration.node.faults.xids import Severity, about
from shim.causes.record import Whose
from shim.causes.xids import Action
from tests.unit.node.causes.holders import event, holding

A, B = holding("a", pid=7), holding("b", pid=8)
BOTH: Final = (A, B)
BY: Final = Attribution(A.container, How.PROCESS)
NOBODY: Final = Attribution()
ONLY: Final = Attribution(A.container, How.HOLDER)
OUTSIDE: Final = Attribution(None, How.OUTSIDE)

D, N, P, U = Whose.DEVICE, Whose.NEIGHBOUR, Whose.APPLICATION, Whose.UNCLEAR


def verdict(number: int, *devices: str, **more: Any) -> Verdict:
    return Verdict("GPU-0", about(number), Severity.SUSPECT, devices or ("GPU-0",), **more)


def hit(number: int, whose: Attribution, holders: Any = BOTH, **more: Any) -> tuple[Hit, ...]:
    return hits_of(event(number, 7), verdict(number), whose, holders, at=5.0, **more)


def told(hits: tuple[Hit, ...]) -> dict[str, tuple[Whose, bool, int]]:
    """Return for each container who is responsible, whether that is certain, and which process."""
    return {h.container.name: (h.fault.whose, h.fault.sure, h.fault.pid) for h in hits}


@pytest.mark.parametrize(
    ("number", "whose", "expected"),
    [
        # A device fault affects all holders; the container of the process gets its pid.
        (79, BY, {"a": (D, True, 7), "b": (D, True, 0)}),
        (79, NOBODY, {"a": (D, True, 0), "b": (D, True, 0)}),
        (79, OUTSIDE, {"a": (D, True, 0), "b": (D, True, 0)}),
        # It was contained in one application, if that is known.
        (94, BY, {"a": (D, True, 7)}),
        (94, NOBODY, {"a": (D, True, 0), "b": (D, True, 0)}),
        # For other containers, an application's fault is a neighbour's.
        (31, BY, {"a": (P, True, 7), "b": (N, False, 0)}),
        (43, OUTSIDE, {"a": (N, False, 0), "b": (N, False, 0)}),
        (13, NOBODY, {"a": (U, False, 0), "b": (U, False, 0)}),
        # Faults of the application or the device.
        (32, BY, {"a": (U, True, 7), "b": (N, False, 0)}),
        (99999, NOBODY, {"a": (U, False, 0), "b": (U, False, 0)}),
        # Faults that end no container.
        (45, BY, {}),
        (63, NOBODY, {}),
    ],
)
def test_whose_an_error_is_to_each_holder(
    number: int, whose: Attribution, expected: object
) -> None:
    assert told(hit(number, whose)) == expected


def test_the_only_holder_is_likely_to_blame_and_one_that_has_ended_is_known() -> None:
    assert told(hit(31, ONLY, (A,))) == {"a": (P, False, 0)}
    assert told(hit(31, Attribution(A.container, How.ENDED), (B,))) == {
        "a": (P, True, 7), "b": (N, False, 0),
    }  # fmt: skip


@pytest.mark.parametrize(("word", "count"), [("Nonfatal", 0), ("Fatal", 2)])
def test_an_error_of_nvlink_that_is_not_fatal_hits_nobody(word: str, count: int) -> None:
    text = f"RLW_SRC_TRACK {word} XC1 i0 Link 17 (0x04084507 0x00000004 0x00000000)"
    hits = hits_of(event(145, text=text), verdict(145), NOBODY, BOTH, at=5.0)
    assert len(hits) == count


def test_the_driver_s_word_comes_before_the_table() -> None:
    reset = hit(31, BY, action=Action.RESET)
    assert {h.container.name: (h.fault.whose, h.fault.action) for h in reset} == {
        "a": (D, Action.RESET), "b": (D, Action.RESET),
    }  # fmt: skip
    nothing = hit(48, BY, action=Action.NOTHING)
    assert {h.fault.action for h in nothing} == {Action.NOTHING}


def test_clients_of_one_mps_server_are_hit_by_each_other() -> None:
    assert told(hit(31, BY, mps={"GPU-0"}))["b"] == (N, True, 0)
    assert told(hit(31, BY, mps={"GPU-1"}))["b"] == (N, False, 0)


def test_no_word_of_a_neighbour_is_told() -> None:
    """A tenant learns no name, process or remedy that concerns another's container."""
    (theirs,) = [each for each in hit(31, BY) if each.container == B.container]
    words = str(asdict(theirs.fault))
    assert "pod-a" not in words
    assert "id-a" not in words
    assert theirs.fault.pid == 0
    assert theirs.fault.action == ""


def test_an_error_of_a_mig_device_is_told_with_it() -> None:
    part, whole = holding("part", "MIG-a"), holding("whole", "GPU-0")
    of_part = verdict(31, "MIG-a")
    hits = hits_of(
        event(31, 7), of_part, Attribution(part.container, How.PROCESS), (part, whole), at=5.0
    )  # fmt: skip
    assert [(h.container.name, h.fault.mig, h.fault.gpu) for h in hits] == [
        ("part", "MIG-a", "GPU-0"), ("whole", "", "GPU-0"),
    ]  # fmt: skip


def test_an_error_of_a_gpu_that_nobody_knows_hits_its_own_process_only() -> None:
    unknown = replace(verdict(79), gpu="", certain=False)
    hits = hits_of(event(79, 7, gpu="", bus_id="0000:18:00"), unknown, BY, BOTH, at=5.0)
    assert told(hits) == {"a": (D, False, 7)}
    assert hits[0].fault.gpu == "0000:18:00"
    assert hits_of(event(79), unknown, NOBODY, BOTH, at=5.0) == ()


def test_what_is_gone_hits_each_holder_once() -> None:
    hits = lost(GPU_LOST, "the GPU stopped answering", (A, A, B), at=5.0, gpu="GPU-0")
    assert told(hits) == {"a": (D, True, 0), "b": (D, True, 0)}
