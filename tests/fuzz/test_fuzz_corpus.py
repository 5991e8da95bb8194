"""Run each fuzz target on its corpus and on some thousand blind mutations, in seconds."""

from __future__ import annotations

import itertools
import os
import time
import tracemalloc
from typing import Final

import pytest

from tests.fuzz.mutations import mutants
from tests.fuzz.targets import CORPUS, LONGEST_INPUT, SECONDS, TARGETS, attempt
from tests.harness.examples import CHOICE, FIXED, seeds

# Of each target's corpus: a second's work for the slowest.
MUTATIONS: Final = 2000 if CHOICE == FIXED else 20_000


def corpus(name: str) -> list[bytes]:
    directory = os.path.join(CORPUS, name)
    inputs = []
    for entry in sorted(os.listdir(directory)):
        with open(os.path.join(directory, entry), "rb") as file:
            inputs.append(file.read())
    return inputs


@pytest.mark.parametrize("name", TARGETS)
def test_what_is_in_the_corpus_is_taken_or_refused(name: str) -> None:
    outcomes = [attempt(TARGETS[name], data) for data in corpus(name)]
    if name != "criu-log":  # whose meaning is an error
        assert None in outcomes, "nothing in it is valid: its mutations would test little"


@pytest.mark.parametrize("seed", seeds(1))
@pytest.mark.parametrize("name", TARGETS)
def test_mutations_of_the_corpus_are_taken_or_refused(name: str, seed: int) -> None:
    mutations = mutants(corpus(name), TARGETS[name].words, seed)
    for number, data in enumerate(itertools.islice(mutations, MUTATIONS)):
        began = time.process_time()
        try:
            attempt(TARGETS[name], data[:LONGEST_INPUT])
        except Exception as error:
            error.add_note(f"mutation {number} of {name}: {data[:LONGEST_INPUT]!r}")
            raise
        assert time.process_time() - began < SECONDS, f"mutation {number} of {name}"


@pytest.mark.parametrize("name", TARGETS)
def test_what_repeats_itself_costs_no_more_than_its_length(name: str) -> None:
    """Try inputs of the maximum length that repeat one seed or one token."""
    inputs = [data for data in corpus(name) if data][:6]
    for piece in (*inputs, *TARGETS[name].words):
        data = (piece * (LONGEST_INPUT // len(piece) + 1))[:LONGEST_INPUT]
        began = time.process_time()
        attempt(TARGETS[name], data)
        assert time.process_time() - began < SECONDS, piece[:40]
    tracemalloc.start()
    try:
        attempt(TARGETS[name], data)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
