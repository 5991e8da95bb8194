"""The table of a process's states, all of it."""

from __future__ import annotations

import itertools

import pytest

from shim.errors import WrongProcessState
from shim.pod import process as process_module
from shim.pod.process import TRANSITIONS, Event, Process, State
from shim.stdio.uris import StdioUris


def _process(state: State) -> Process:
    process = Process("c1", "", StdioUris("", "", "", terminal=False))
    process.state = state
    return process


@pytest.mark.parametrize(("state", "event"), sorted(TRANSITIONS, key=str))
def test_what_the_table_lists_happens(state: State, event: Event) -> None:
    process = _process(state)
    process.advance(event)
    assert process.state is TRANSITIONS[state, event]


@pytest.mark.parametrize(
    ("state", "event"),
    [pair for pair in itertools.product(State, Event) if pair not in TRANSITIONS],
)
def test_what_the_table_does_not_list_is_refused(state: State, event: Event) -> None:
    process = _process(state)
    with pytest.raises(WrongProcessState, match=f"it is {state.name.lower()}"):
        process.advance(event)
    assert process.state is state


def test_the_table_in_the_docstring_is_the_table() -> None:
    rows = [line.split() for line in (process_module.__doc__ or "").splitlines()]
    drawn = {
        (State[row[0]], Event[row[1]]): State[row[2]]
        for row in rows
        if len(row) >= 3 and row[0] in State.__members__ and row[1] in Event.__members__
    }
    assert drawn == TRANSITIONS
