"""The agent's counters: one per thing, with a limited number of label values."""

from __future__ import annotations

from integration.node.state.store import State
from integration.node.values.counters import (
    FAILED,
    MOST,
    OK,
    OTHERS,
    REFUSED,
    SECONDS,
    Counters,
    Durations,
)  # fmt: skip
from integration.nvml.values import GpuEvent


def test_an_answer_is_counted_by_its_result_and_its_time() -> None:
    counters = Counters()
    counters.allocated("nvidia.com/gpu", 0.0004, OK)
    counters.allocated("nvidia.com/gpu", 0.003, OK)
    counters.allocated("nvidia.com/gpu", 60.0, REFUSED)
    assert counters.allocations == {("nvidia.com/gpu", OK): 2, ("nvidia.com/gpu", REFUSED): 1}
    taken = counters.allocation_durations["nvidia.com/gpu",]
    assert taken.counts == [1, 0, 0, 1, *[0] * 9, 1]
    assert round(taken.total, 4) == 60.0034


def test_a_bound_belongs_to_what_is_below_it() -> None:
    durations = Durations()
    durations.add(SECONDS[3])
    assert durations.counts.index(1) == 3


def test_more_names_than_anybody_needs_are_counted_together() -> None:
    counters = Counters()
    for number in range(2 * MOST):
        counters.registered(f"nvidia.com/{number}", OK)
        counters.allocated(f"nvidia.com/{number}", 0.1, OK)
    assert len(counters.registrations) == MOST + 1
    assert counters.registrations[OTHERS, OTHERS] == MOST
    assert sum(counters.allocation_durations[OTHERS,].counts) == MOST
    counters.registered("nvidia.com/1", OK)
    assert counters.registrations["nvidia.com/1", OK] == 2


def test_what_happens_is_counted_although_nobody_listens() -> None:
    state = State()
    state.gpu_events.send(GpuEvent(1.0, "xid", "GPU-a", xid=79))
    state.gpu_events.send(GpuEvent(2.0, "xid", "GPU-a", xid=79))
    state.gpu_events.send(GpuEvent(3.0, "ecc-double", "GPU-a"))
    assert state.counters.last_xids == {("GPU-a", "79"): 2.0}


def test_a_look_that_found_something_wrong_is_not_the_last_good_one() -> None:
    counters = Counters()
    counters.checked(0.1, faults=True)
    never = counters.last_good_check
    counters.checked(0.1, faults=False)
    counters.updated("nvidia.com/gpu")
    counters.restarted("plugin")
    assert never is None
    assert counters.last_good_check is not None
    assert counters.checks == {(OK,): 1, (FAILED,): 1}
    assert sum(counters.check_durations.counts) == 2
    assert (counters.updates, counters.restarts) == ({("nvidia.com/gpu",): 1}, {("plugin",): 1})
