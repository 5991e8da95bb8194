"""Marks of devices out of service: their writers, the order of steps, and leftovers."""

from __future__ import annotations

import multiprocessing
import os
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

import pytest

from hooks.config import Config
from hooks.node.drained import DRIVER, Drain, path_of, read_drains
from integration.devices import drain_marks as marks
from integration.devices.drain_errors import MarkUnwritten, NotDrained, ResetRunning
from integration.devices.targets import drained_of
from integration.drain.serving import undrain
from tests.harness.raising import raises
from tests.unit.node.inventories import inventory

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

GPU: Final = "GPU-0"
PERSON: Final = Drain(GPU, reason="fan", since=5.0)
RESET: Final = Drain(GPU, reason="reset", since=9.0, reset="waits")


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(state=str(tmp_path / "state"), drained=str(tmp_path / "lib" / "drained"))


def known(config: Config) -> Drain:
    found = marks.find(config, GPU)
    assert found is not None
    return found


def test_a_mark_leaves_nothing_behind(config: Config) -> None:
    marks.put(config, PERSON)
    assert read_drains(config) == (PERSON,)
    # A partial file that a killed writer left.
    left = os.path.join(config.drained, f".{GPU}.abcdefgh.new")
    with open(left, "w", encoding="ascii"):
        assert marks.take(config, GPU) == PERSON
    assert not os.path.exists(config.drained)
    with raises(NotDrained):
        marks.take(config, GPU)


def test_the_first_word_stays_unless_somebody_has_another(config: Config) -> None:
    marks.put(config, PERSON)
    marks.put(config, Drain(GPU, bus_id="0000:10:00.0", lets_go=True))
    assert known(config) == replace(PERSON, bus_id="0000:10:00.0", lets_go=True)
    marks.put(config, Drain(GPU, reason="memory"))
    assert known(config).reason == "memory"
    assert known(config).since == PERSON.since


def test_what_is_refused_for_one_returns_no_other_to_service(config: Config) -> None:
    marks.put(config, PERSON)
    with raises(NotDrained):
        undrain(config, [GPU], driver=True)
    assert read_drains(config) == (PERSON,)
    driver = marks.put(config, Drain(DRIVER, reason="update"))
    assert {each["device"] for each in undrain(config, [GPU], driver=True)} == {GPU, driver.device}
    assert read_drains(config) == ()


@pytest.mark.parametrize("interruptions", [0, 1, 2])
def test_a_reset_gives_back_what_it_has_taken_alone(config: Config, interruptions: int) -> None:
    for _ in range(interruptions + 1):
        marks.put(config, RESET)
        marks.step(config, GPU, "it failed: no")
    assert known(config) == replace(RESET, reset="it failed: no")
    assert marks.finish(config, GPU)
    assert read_drains(config) == ()


@pytest.mark.parametrize("lets_go", [False, True])
@pytest.mark.parametrize("interruptions", [0, 1, 2])
def test_what_a_person_took_stays_out_after_a_reset(
    config: Config, interruptions: int, lets_go: bool
) -> None:
    person = replace(PERSON, lets_go=lets_go)
    marks.put(config, person)
    for _ in range(interruptions + 1):
        marks.put(config, RESET)
        marks.step(config, GPU, "nvidia-smi resets it", closed=True)
        marks.step(config, GPU, "it failed: no")
    assert known(config) == replace(person, reset="it failed: no", stays=True)
    assert not marks.finish(config, GPU)
    assert known(config) == person


def test_what_a_person_takes_while_it_is_reset_stays_out(config: Config) -> None:
    with marks.resetting(config):
        marks.put(config, RESET)
        marks.put(config, Drain(GPU, reason="fan"))
        assert known(config) == replace(RESET, reason="fan", stays=True)
        marks.step(config, GPU, "proves")
        with raises(ResetRunning):
            marks.take(config, GPU)
        with raises(ResetRunning), marks.resetting(config):
            pass
        assert not marks.finish(config, GPU)
    assert (known(config).reset, known(config).reason) == ("", "fan")
    # It also owns the marks that it takes over from an interrupted run.
    marks.put(config, RESET)
    marks.put(config, Drain(GPU, reason="fan"))
    assert (known(config).reset, known(config).stays) == ("", False)
    marks.take(config, GPU)


def _put_and_take(config: Config, device: str, begin: Callable[[], object]) -> None:
    begin()
    for _ in range(20):
        marks.put(config, Drain(device, reason="x"))
        assert os.path.exists(path_of(config, device))
        marks.take(config, device)
    marks.put(config, Drain(device))


def test_many_at_once_lose_nothing(config: Config) -> None:
    context = multiprocessing.get_context("fork")
    reading, writing = os.pipe()
    processes = [
        context.Process(
            target=_put_and_take, args=(config, f"GPU-{n}", partial(os.read, reading, 1))
        )
        for n in range(4)
    ]
    for process in processes:
        process.start()
    os.write(writing, b"1234")
    os.close(reading)
    os.close(writing)
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    assert [each.device for each in read_drains(config)] == [f"GPU-{n}" for n in range(4)]


def test_what_cannot_be_written_is_said(config: Config, tmp_path: Path) -> None:
    (tmp_path / "lib").write_text("")
    with raises(MarkUnwritten, match="Not a directory"):
        marks.put(config, PERSON)
    (tmp_path / "state").rename(tmp_path / "away")
    (tmp_path / "state").write_text("")
    with raises(MarkUnwritten, match="File exists"):
        marks.put(config, PERSON)


@pytest.mark.parametrize(
    ("before", "in_service"),
    [(Drain("", reason="fan"), False), (Drain("", reset="it failed: GPU is lost"), True)],
)
def test_a_mark_of_a_gpu_without_a_uuid_is_the_gpus_when_it_has_one(
    config: Config, before: Drain, in_service: bool
) -> None:
    address = inventory().gpus[0].bus_id
    marks.put(config, replace(before, device=address, bus_id=address, since=5.0))
    marks.put(config, Drain("MIG-a", bus_id=address, since=7.0))
    marks.put(config, replace(RESET, bus_id=address))
    assert {each.device for each in read_drains(config)} == {GPU, "MIG-a"}
    assert known(config).since == 5.0
    assert marks.finish(config, GPU) is in_service
    assert (marks.find(config, GPU) is None) is in_service


def test_a_gpu_that_was_drained_without_a_uuid_is_returned_by_its_names(config: Config) -> None:
    gpus = inventory().gpus
    first, second = (marks.put(config, Drain(gpu.bus_id, bus_id=gpu.bus_id)) for gpu in gpus)
    for name in ("1", "GPU-1", gpus[1].bus_id):
        assert drained_of([name], inventory(), config) == (second,), name
    assert drained_of(["0"], inventory(), config) == (first,)
