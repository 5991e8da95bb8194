"""A driver whose API server is unreachable for a while, in each way that networks fail."""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import grpc  # type: ignore[import-untyped] # it ships no types
import pytest

from integration.containers.procfs import Procfs
from integration.node.options import DRA_DRIVER
from tests.e2e.test_dra import error_of
from tests.e2e.test_dra import fresh as place
from tests.harness.front import Front
from tests.harness.fuse import fuse
from tests.harness.waiting import at_once, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.harness.dra_node import Place

__all__ = ["place"]

WAYS: Final = ("hold", "drop", "reset")
# Threads of a driver that waits for a server: a watch, a write, and claim readers.
FEW: Final = 12


def one_of_the_ways(way: str) -> list[Any]:
    """Return the ways to fail; make test tries one, and each test another one."""
    marks = [pytest.mark.thorough]
    return [pytest.param(each, marks=[] if each == way else marks) for each in WAYS]


@contextmanager
def behind_front(place: Place, timeout: float, **more: Any) -> Iterator[Front]:
    """Replace the agent by one that reaches the API server only through a proxy."""
    place.agent.stop()
    with Front(place.cluster.port) as front:
        flags = ("--api-port", str(front.port), "--api-timeout", str(timeout))
        place.agent = place.new_agent(*flags, "--dra-unhealthy", "omit", **more)
        place.cluster.close_watches()
        eventually(lambda: not place.cluster.watches, "nobody watches")
        with place.agent:
            eventually(lambda: place.cluster.watches, "it publishes")
            eventually(lambda: DRA_DRIVER in place.kubelet.drivers, "it is registered")
            yield front


def held(pid: int) -> tuple[int, int]:
    """Return how many threads and descriptors a process has."""
    return len(os.listdir(f"/proc/{pid}/task")), len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.parametrize("way", one_of_the_ways("hold"))
def test_what_is_prepared_does_not_wait_for_the_server(place: Place, way: str) -> None:
    claims = [place.claim(name, name) for name in place.gpus]
    with behind_front(place, timeout=15) as front:
        driver = place.driver
        first = driver.prepare(*claims)
        front.be(way)
        os.unlink(place.spec(claims[0]))
        for _ in range(3):
            # Less than the agent's timeout for one call.
            assert driver.prepare(*claims, patience=10) == first
        assert os.path.exists(place.spec(claims[0]))
        assert driver.unprepare(claims[0], patience=10) == {claims[0][1]: ""}
        assert driver.prepare(claims[1], patience=10)[claims[1][1]] == first[claims[1][1]]


@pytest.mark.parametrize("way", one_of_the_ways("drop"))
def test_new_claims_are_refused_in_words_and_had_afterwards(place: Place, way: str) -> None:
    new = [place.claim(f"new-{n}", place.gpus[0]) for n in range(8)]
    with behind_front(place, timeout=0.5) as front:
        driver = place.driver
        front.be(way)

        def ask_all() -> None:
            answers = at_once(partial(error_of, driver), new)
            assert len(answers) == len(new), "within a kubelet's limit"
            assert all("NVSHIM-E2770" in each for each in answers), answers

        ask_all()
        before = held(place.agent.pid)
        for _ in range(4):
            ask_all()
        eventually(lambda: held(place.agent.pid)[0] <= before[0] + 2, "no thread is left")
        assert held(place.agent.pid)[1] <= before[1] + FEW
        assert before[0] < FEW + held(place.agent.pid)[0]
        assert driver.prepare(*new, patience=40).keys() == {each[1] for each in new}
        front.be("passes")
        eventually(lambda: not error_of(driver, new[0]), "it is prepared once the server is back")
        assert driver.unprepare(*new) == dict.fromkeys((each[1] for each in new), "")


@pytest.mark.parametrize("way", one_of_the_ways("reset"))
def test_what_has_changed_meanwhile_is_published_by_one_write(place: Place, way: str) -> None:
    with behind_front(place, timeout=0.5) as front:
        written = len(place.cluster.writes)
        front.be(way)
        place.drain(place.gpus[0])
        eventually(lambda: any("E2770" in each for each in place.agent.faults()), "it is reported")
        place.undrain(place.gpus[0])
        place.drain(place.gpus[1])
        driver, name = place.driver, place.gpus[1]
        eventually(lambda: driver.health[name].health == 2, "it is known")
        before = front.accepted
        if way != "drop":  # no connection is accepted there
            eventually(lambda: front.accepted >= before + 2, "it is tried again and again")
        assert len(place.cluster.writes) == written
        front.be("passes")
        assert place.published(3) == {place.gpus[0], *place.parts}
        assert len(place.cluster.writes) == written + 1
        eventually(lambda: not place.agent.faults(), "it is over")
        place.cluster.wipe()
        assert place.published(3), "the watch of slices works again"
        assert len(place.cluster.writes) == written + 2


def test_an_agent_ends_in_time_whatever_the_server_does(place: Place) -> None:
    with behind_front(place, timeout=15) as front:
        front.be("hold")
        driver, claim = place.driver, place.claim("new", place.gpus[0])
        before = front.accepted

        def ask() -> None:
            with pytest.raises(grpc.RpcError):
                driver.prepare(claim)

        call = threading.Thread(target=ask)
        call.start()
        eventually(lambda: front.accepted > before, "the server gets the request")
        assert place.agent.process is not None
        place.agent.process.terminate()
        assert place.agent.process.wait(13) == 0, "a pod has 15 seconds"
        call.join()


def test_while_the_directory_of_specs_hangs_calls_are_answered_and_the_agent_ends(
    place: Place, tmp_path: Path
) -> None:
    given, new = place.claim("given", place.gpus[0]), place.claim("new", place.gpus[1])
    place.have(given)
    with fuse(f"{tmp_path}/silent") as server:
        os.symlink(server.mount_point, f"{place.cdi}.silent")
        # One after the other, because the agent makes a directory that is missing.
        os.rename(place.cdi, f"{place.cdi}.before")
        os.rename(f"{place.cdi}.silent", place.cdi)
        server.hang()
        driver = place.driver
        errors = driver.prepare(new, patience=20)[new[1]].error, driver.unprepare(given)[given[1]]
        for error in errors:
            assert "NVSHIM-E2798" in error, error
            assert f"{place.cdi} does not answer" in error, error
        assert f"{given[1]}.json" in errors[1]
        agent = place.agent.process
        assert agent is not None
        agent.terminate()
        # The kernel lets no thread end that waits for an answer.
        what = "all other threads have ended, within the 15 seconds of a pod"
        eventually(lambda: _has_ended(agent.pid), what, timeout=13)
    assert agent.wait(20) == 0
    os.unlink(place.cdi)
    os.rename(f"{place.cdi}.before", place.cdi)
    place.start_again()
    place.have(given, new)
    place.give_back(given, new)


def _has_ended(pid: int) -> bool:
    status = Procfs().status(pid)
    return status is not None and status.state == "Z"
