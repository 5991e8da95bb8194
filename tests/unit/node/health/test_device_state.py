"""The state of one device after any signals in any order."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from integration.node.device_health.device_state import (
    TRANSITIONS,
    Answer,
    Clear,
    Condition,
    Contained,
    Error,
    Lost,
    Moment,
    Need,
    Reset,
    Rules,
    Signal,
    Silence,
    Watch,
    due,
    step,
)
from integration.node.faults.xids import Severity
from integration.node.values.health import HealthState

if TYPE_CHECKING:
    from collections.abc import Sequence

RULES: Final = Rules(suspects=3, window=100, patience=20, quiet=10, longest=80)

SUSPECT: Final = Error(Severity.SUSPECT, "odd", xid=32)
UNHEALTHY: Final = Error(Severity.UNHEALTHY, "bad", xid=119)
FATAL: Final = Error(Severity.FATAL, "fell off", xid=79)
FAILED: Final = Answer(failed="row")


def after(*heard: tuple[float, Signal], condition: Condition | None = None) -> Condition:
    """Return the condition after signals, each at its time."""
    known = condition or Condition()
    for when, signal in heard:
        known = step(known, signal, Moment(when, 1000 + when), RULES)
    return known


@pytest.mark.parametrize(
    ("heard", "state"),
    [
        ([], HealthState.HEALTHY),
        ([(1, Error(Severity.IGNORE, "nothing"))], HealthState.HEALTHY),
        ([(1, SUSPECT)], HealthState.SUSPECT),
        ([(1, SUSPECT), (2, SUSPECT)], HealthState.SUSPECT),
        ([(1, SUSPECT), (2, SUSPECT), (3, SUSPECT)], HealthState.UNHEALTHY),
        ([(1, replace(SUSPECT, times=50))], HealthState.UNHEALTHY),
        ([(1, replace(SUSPECT, times=50, counts=False))], HealthState.SUSPECT),
        ([(1, SUSPECT), (90, SUSPECT), (102, SUSPECT)], HealthState.SUSPECT),
        ([(1, SUSPECT), (12, Answer())], HealthState.SUSPECT),
        ([(1, SUSPECT), (102, Answer())], HealthState.HEALTHY),
        ([(1, UNHEALTHY)], HealthState.UNHEALTHY),
        ([(1, UNHEALTHY), (2, Answer())], HealthState.RECOVERING),
        ([(1, UNHEALTHY), (2, Answer()), (11, Answer())], HealthState.RECOVERING),
        ([(1, UNHEALTHY), (2, Answer()), (12, Answer())], HealthState.HEALTHY),
        ([(1, UNHEALTHY), (2, Answer()), (5, SUSPECT)], HealthState.UNHEALTHY),
        ([(1, UNHEALTHY), (2, Answer(pending="row"))], HealthState.UNHEALTHY),
        ([(1, UNHEALTHY), (2, Answer()), (12, Answer(pending="row"))], HealthState.RECOVERING),
        ([(1, FATAL), (2, Answer()), (500, Answer())], HealthState.UNHEALTHY),
        ([(1, Answer(asks="reset the GPU"))], HealthState.UNHEALTHY),
        ([(1, Answer(asks="reset the GPU")), (500, Answer())], HealthState.UNHEALTHY),
        ([(1, Answer(asks="reset the GPU")), (2, Answer(asks=""))], HealthState.RECOVERING),
        ([(1, FATAL), (2, Answer(asks="")), (500, Answer(asks=""))], HealthState.UNHEALTHY),
        ([(1, FATAL), (2, Reset()), (3, Answer())], HealthState.RECOVERING),
        ([(1, FATAL), (2, Lost("gone")), (3, Answer())], HealthState.RECOVERING),
        ([(1, FATAL), (2, Clear())], HealthState.HEALTHY),
        ([(1, Lost("gone")), (2, Clear())], HealthState.UNHEALTHY),
        ([(1, Lost("gone")), (2, Reset())], HealthState.UNHEALTHY),
        ([(1, Answer(pending="row"))], HealthState.SUSPECT),
        ([(1, Answer(pending="row")), (500, Answer(pending="row"))], HealthState.SUSPECT),
        ([(1, Answer(pending="row")), (500, Answer())], HealthState.HEALTHY),
        ([(1, FAILED)], HealthState.UNHEALTHY),
        ([(1, FAILED), (2, Clear()), (3, FAILED)], HealthState.HEALTHY),
        ([(1, FAILED), (2, Reset()), (3, FAILED)], HealthState.UNHEALTHY),
        ([(1, Silence("hangs"))], HealthState.SUSPECT),
        ([(1, Silence("hangs")), (22, Silence("hangs"))], HealthState.UNHEALTHY),
        ([(1, Silence("hangs")), (12, Answer())], HealthState.HEALTHY),
        ([(1, Silence("a")), (5, Answer()), (22, Silence("b"))], HealthState.SUSPECT),
        ([(1, Watch("old")), (500, Answer())], HealthState.SUSPECT),
        ([(1, Watch("old")), (2, Watch()), (500, Answer())], HealthState.HEALTHY),
        ([(1, UNHEALTHY), (2, Watch("old")), (3, Answer()), (20, Answer())], HealthState.SUSPECT),
    ],
)  # fmt: skip
def test_what_is_thought_of_a_device(
    heard: Sequence[tuple[float, Signal]], state: HealthState
) -> None:
    assert after(*heard).state == state


def test_of_two_reasons_the_one_that_is_harder_to_be_rid_of_stays() -> None:
    known = after((1, FATAL), (2, UNHEALTHY))
    assert (known.reason, known.xid, known.need) == ("fell off", 79, Need.RESET)
    known = after((1, UNHEALTHY), (2, FATAL))
    assert (known.reason, known.xid, known.need) == ("fell off", 79, Need.RESET)


def test_a_memory_error_that_was_contained_needs_no_reset() -> None:
    known = after((1, Error(Severity.FATAL, "ECC", xid=48)), (2, Contained(48)), (3, Answer()))
    assert known.state == HealthState.RECOVERING
    known = after((1, FATAL), (2, Contained(48)), (3, Answer()))
    assert known.state == HealthState.UNHEALTHY


def test_a_device_that_fails_again_and_again_has_to_be_quiet_for_longer() -> None:
    now, known, waits = 0.0, Condition(), []
    for _ in range(6):
        known = after((now, UNHEALTHY), (now + 1, Answer()), condition=known)
        begun = now = now + 1
        while known.state == HealthState.RECOVERING:
            now += 1
            known = after((now, Answer()), condition=known)
        waits.append(now - begun)
    assert waits == [10, 20, 40, 80, 80, 80]
    known = after((now + 1000, UNHEALTHY), (now + 1001, Answer()), condition=known)
    assert due(known, RULES) == now + 1011  # it has been healthy for long


def test_who_is_blamed_and_why_is_forgotten_when_it_is_well() -> None:
    error = replace(UNHEALTHY, blamed=("a/b/c",), remedy="reset it")
    known = after((1, error))
    assert (known.blamed, known.remedy, known.since) == (("a/b/c",), "reset it", 1001)
    known = after((2, replace(error, blamed=("x",))), condition=known)
    assert known.blamed == ("a/b/c", "x")
    known = after((3, Answer()), (30, Answer()), condition=known)
    assert (known.state, known.blamed, known.reason, known.since) == (
        HealthState.HEALTHY,
        (),
        "",
        1030,
    )


def test_every_state_is_reached_by_the_table_and_left_by_it() -> None:
    assert {state for state, _ in TRANSITIONS} == set(HealthState)
    assert set(TRANSITIONS.values()) == set(HealthState)


signals: st.SearchStrategy[Signal] = st.one_of(
    st.builds(
        Error,
        st.sampled_from(Severity),
        st.just("why"),
        xid=st.sampled_from([0, 31, 48, 79, 94]),
        counts=st.booleans(),
        times=st.integers(1, 5),
    ),
    st.builds(Contained, st.just(48)),
    st.builds(Lost, st.just("gone")),
    st.builds(Answer, pending=st.sampled_from(["", "row"]), failed=st.sampled_from(["", "row"])),
    st.builds(Silence, st.just("hangs")),
    st.builds(Watch, st.just("old")),
    st.just(Watch()),
    st.just(Reset()),
    st.just(Clear()),
)
histories = st.lists(st.tuples(st.floats(0, 60), signals), max_size=30)


@given(histories)
def test_nothing_is_given_that_is_lost_or_has_something_to_prove(
    history: list[tuple[float, Signal]],
) -> None:
    now, known, lost = 0.0, Condition(), False
    for passed, signal in history:
        now += passed
        before = known
        known = after((now, signal), condition=known)
        if isinstance(signal, Lost):
            lost = True
        elif isinstance(signal, Answer):
            lost = False
        assert bool(known.lost) == lost
        if lost:
            assert known.state == HealthState.UNHEALTHY
        assert known.state.is_allocatable == (known.need == Need.NOTHING)
        assert known.state == HealthState.HEALTHY or known.reason
        # Only transitions of the table, and only an answer or a user leads back.
        if known.state != before.state:
            reached = {to for (state, _), to in TRANSITIONS.items() if state == before.state}
            through = {to for (state, _), to in TRANSITIONS.items() if state in reached}
            assert known.state in reached | through
            assert known.since == 1000 + now
        if not before.state.is_allocatable and known.state.is_allocatable:
            assert isinstance(signal, Answer | Clear)
        if isinstance(signal, Error) and signal.severity in {Severity.FATAL, Severity.UNHEALTHY}:
            assert not known.state.is_allocatable


@given(histories)
def test_what_answers_long_enough_without_an_error_is_well_again(
    history: list[tuple[float, Signal]],
) -> None:
    now, known = 0.0, Condition()
    for passed, signal in history:
        now += passed
        known = after((now, signal), condition=known)
    known = after((now + 1, Watch()), (now + 1, Reset()), condition=known)
    for _ in range(20):
        now += 20
        known = after((now, Answer()), condition=known)
    assert known.state == HealthState.HEALTHY


def test_an_error_that_does_not_count_yet_acts_and_is_not_counted_twice() -> None:
    early = step(Condition(), replace(FATAL, times=0), Moment(10.0, 10.0), Rules())
    assert (early.state, early.errors) == (HealthState.UNHEALTHY, ())
    whole = step(early, replace(FATAL, blamed=("a",)), Moment(10.5, 10.5), Rules())
    assert (whole.errors, whole.falls, whole.blamed) == ((10.5,), 1, ("a",))
