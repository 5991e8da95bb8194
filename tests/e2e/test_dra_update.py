"""Two agents in a rolling update: the newer one serves, and waits for the older one to stop."""

from __future__ import annotations

import json
import os
import threading
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Final

import pytest

from integration.node.options import DRA_DRIVER
from integration.node.services.dra.server import socket_paths
from tests.e2e.test_dra import error_of
from tests.e2e.test_dra import fresh as place
from tests.harness.claim_storm import Storm
from tests.harness.killing import killed_before
from tests.harness.kubelet_dra import Driver
from tests.harness.nvshim import nvshim
from tests.harness.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.harness.dra_node import Place
    from tests.harness.node_agent import NodeAgent

__all__ = ["place"]

OLD: Final = "0d5f3a4e-0000-4000-8000-00000000000a"
NEW: Final = "0d5f3a4e-0000-4000-8000-00000000000b"
# The system calls of a file's replacement.
MOVES: Final = "rename,renameat,renameat2"


def endpoints(place: Place) -> list[str]:
    """Return the sockets of the instances that the kubelet knows, the oldest first."""
    return [os.path.basename(each.info.endpoint) for each in place.kubelet.instances(DRA_DRIVER)]


def endpoint(place: Place, pod: str) -> str:
    """Return the socket of a pod's instance."""
    return os.path.basename(socket_paths(place.root, DRA_DRIVER, pod).endpoint)


def is_known(place: Place, pod: str) -> bool:
    """Whether the kubelet knows a pod's instance."""
    return endpoint(place, pod) in endpoints(place)


@contextmanager
def updating(place: Place, old: str = OLD, *flags: str) -> Iterator[NodeAgent]:
    """Run an update: the agent has a pod, and a second agent, which is yielded, waits for it."""
    place.agent.stop()
    first = place.agent = place.new_agent(*(("--pod-uid", old) if old else ()), *flags)
    place.cluster.close_watches()
    eventually(lambda: not place.cluster.watches, "nobody watches")
    waiter = place.new_agent("--pod-uid", NEW, *flags, log="second.log")
    with ExitStack() as running:
        first.start()
        running.callback(first.kill)
        eventually(lambda: len(endpoints(place)) == 1, "the first is registered")
        eventually(lambda: place.cluster.watches == 1, "the first publishes")
        waiter.start()
        running.callback(waiter.kill)
        eventually(lambda: endpoints(place)[1:] == [endpoint(place, NEW)], "the second is, too")
        yield waiter


def asked(driver: Driver, call: str, *claims: tuple[str, str, str]) -> list[str]:
    """Return the error of each claim in the driver's answer."""
    if call == "unprepare":
        return [*driver.unprepare(*claims).values()]
    return [each.error for each in driver.prepare(*claims).values()]


def left(place: Place) -> tuple[list[str], list[object]]:
    """Return what is left of claims: the specs, and the recorded state."""
    with open(f"{place.node.state}/dra.json", encoding="utf-8") as file:
        claims = json.load(file)["claims"]
    return [each for each in os.listdir(place.cdi) if DRA_DRIVER in each], claims


def test_both_instances_serve_and_what_one_prepares_the_other_takes_back(place: Place) -> None:
    claims = [place.claim(name, name) for name in place.gpus]
    with updating(place) as waiter:
        first, second = place.kubelet.instances(DRA_DRIVER)
        assert place.driver is second, "the kubelet calls the newer"
        written = len(place.cluster.writes)
        assert asked(first, "prepare", claims[0]) == [""]
        assert asked(second, "prepare", claims[1]) == [""]
        assert second.prepare(claims[0]) == first.prepare(claims[0])
        other = place.claim("other", place.gpus[0])
        assert "NVSHIM-E2774" in error_of(second, other), "it is the first's word"
        assert asked(second, "unprepare", claims[0]) == [""]
        assert asked(first, "unprepare", claims[1], other) == ["", ""]
        assert left(place) == ([], [])
        assert len(first.health) == 4
        eventually(lambda: second.health.keys() == first.health.keys(), "health is passed on")

        assert place.agent.stop() == 0
        eventually(lambda: waiter.said("node agent started"), "the second has the node")
        eventually(lambda: endpoints(place) == [endpoint(place, NEW)], "still only one instance")
        assert place.driver is second
        assert second.is_connected, "its stream is still open"
        assert len(place.cluster.writes) == written, "the published slices stay the same"
        told = second.told
        name = place.gpus[0]
        place.drain(name)
        eventually(lambda: second.told > told and second.health[name].health == 2, "it reports")
        assert asked(second, "prepare", claims[1]) == [""]
        eventually(place.cluster.taints, "the second publishes")
    assert sum("driver" in line for line in waiter.said("registered")) == 1


def test_slices_are_the_firsts_to_write_until_it_ends(place: Place) -> None:
    with updating(place) as waiter:
        written = len(place.cluster.writes)
        for _ in range(3):
            place.cluster.wipe()
            place.published(4)
        assert len(place.cluster.writes) == written + 3, "each is written once"
        assert place.cluster.watches == 1
        place.agent.stop()
        eventually(
            lambda: place.cluster.watches == 1 and waiter.said("node agent started"),
            "the second has",
        )
        place.cluster.wipe()
        place.published(4)
        assert len(place.cluster.writes) == written + 4


@pytest.mark.parametrize("end", ["killed", "stopped"])
def test_a_call_that_meets_the_change_of_hands_waits_for_it(place: Place, end: str) -> None:
    claims = [place.claim("before", place.gpus[0]), place.claim("meets", place.gpus[1])]
    with updating(place) as waiter:
        (_, driver) = place.kubelet.instances(DRA_DRIVER)
        assert asked(driver, "prepare", claims[0]) == [""]
        goes_on, reads = threading.Event(), threading.Event()

        def slowly(_method: str, path: str) -> None:
            if path.endswith("resourceclaims/meets") and not reads.is_set():
                reads.set()
                goes_on.wait(60)

        place.cluster.refuse = slowly
        answers: list[list[str]] = []
        call = threading.Thread(
            target=lambda: answers.append(asked(driver, "prepare", claims[1], claims[0]))
        )
        call.start()
        assert reads.wait(60)
        if end == "killed":
            place.agent.kill()
        else:
            assert place.agent.stop() == 0, "it does not wait for the API server for ever"
        call.join(60)
        goes_on.set()
        assert answers == [["", ""]]
        eventually(lambda: waiter.said("node agent started"), "the second has the node")
        other = place.claim("other", place.gpus[1])
        assert "NVSHIM-E2774" in error_of(driver, other)
        assert asked(driver, "unprepare", *claims) == ["", ""]
        assert left(place) == ([], [])


@pytest.mark.parametrize("what", [pytest.param("state", marks=pytest.mark.thorough), "spec"])
def test_the_first_is_killed_in_the_middle_of_a_prepare(place: Place, what: str) -> None:
    claim = place.claim("one", place.gpus[0], place.parts[0])
    with updating(place) as waiter:
        driver = place.driver
        with killed_before(place.agent.pid, MOVES, place.file(what, claim)):
            assert asked(driver, "prepare", claim) == [""]
            place.agent.kill()
        assert waiter.said("node agent started")
        assert os.path.exists(place.spec(claim))
        assert "NVSHIM-E2774" in error_of(driver, place.claim("other", place.gpus[0]))
        assert asked(driver, "unprepare", claim) == [""]
        assert left(place) == ([], [])


def test_what_a_killed_instance_has_left_of_sockets_is_removed(place: Place) -> None:
    registry, directory = f"{place.root}/plugins_registry", f"{place.root}/plugins/{DRA_DRIVER}"
    stranger = f"{registry}/{DRA_DRIVER}-two-{OLD}"
    with open(stranger, "w", encoding="ascii"):
        pass
    with updating(place):
        assert len(os.listdir(directory)) == 3
        place.agent.kill()
        eventually(lambda: endpoints(place) == [endpoint(place, NEW)], "the first is deregistered")
        eventually(lambda: len(os.listdir(directory)) == 2, "the sockets of the first are gone")
        assert sorted(os.listdir(registry)) == [
            os.path.basename(socket_paths(place.root, DRA_DRIVER, NEW).registration),
            os.path.basename(stranger),
        ]
        place.kubelet.restart()
        place.have(place.claim("one", place.gpus[0]))


def test_an_agent_without_a_pod_of_its_own_can_be_the_first(place: Place) -> None:
    """An agent that was started on the host, or by older manifests."""
    claim = place.claim("one", place.gpus[0])
    with updating(place, "") as waiter:
        assert endpoints(place) == ["dra.sock", endpoint(place, NEW)]
        place.have(claim)
        place.agent.kill()
        eventually(lambda: waiter.said("node agent started"), "the second has the node")
        assert asked(place.driver, "unprepare", claim) == [""]
        assert left(place) == ([], [])
        config = ("--config", place.node.config_path, "--api-server", "127.0.0.1", "--dra")
        refused = nvshim("node", *config, "--poll", "1000", check=False)
        assert "NVSHIM-E2701" in refused.stderr, "an agent without a pod does not wait"


def test_a_pod_is_ready_once_its_agent_serves(place: Place) -> None:
    ready = ("node", "--ready", "--config", place.node.config_path)
    assert nvshim(*ready, "--pod-uid", NEW, check=False).code != 0
    with updating(place) as waiter:
        eventually(lambda: nvshim(*ready, "--pod-uid", NEW, check=False).code == 0, "it is ready")
        assert nvshim(*ready, "--pod-uid", OLD, check=False).code == 0
        waiter.kill()
        assert nvshim(*ready, "--pod-uid", NEW, check=False).code != 0
        assert nvshim(*ready, "--pod-uid", OLD, check=False).code == 0
        waiter.start()
        place.agent.stop()
        eventually(lambda: waiter.said("node agent started"), "the second has the node")
        assert nvshim(*ready, "--pod-uid", OLD, check=False).code != 0
        eventually(lambda: nvshim(*ready, "--pod-uid", NEW, check=False).code == 0, "it is ready")
        assert os.listdir(f"{place.node.state}/pods") == [NEW]


def test_streams_that_a_kubelet_opens_again_and_again_leave_nothing(place: Place) -> None:
    with updating(place) as waiter:
        second = place.kubelet.instances(DRA_DRIVER)[1]

        def stream() -> None:
            again = Driver(second.info, second.version)
            eventually(lambda: again.health, "health is reported")
            again.close()

        def held() -> int:
            pids = (place.agent.pid, waiter.pid)
            return sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids)

        stream()
        before = held()
        for _ in range(20):
            stream()
        eventually(lambda: held() <= before + 4, "the connections are closed")


@pytest.mark.serial  # the agent has a few seconds for it
def test_what_was_begun_is_finished_before_an_agent_ends(place: Place) -> None:
    claim = place.claim("slow", place.gpus[0])
    goes_on, reads = threading.Event(), threading.Event()

    def slowly(_method: str, path: str) -> None:
        if path.endswith("resourceclaims/slow"):
            reads.set()
            goes_on.wait(60)

    place.cluster.refuse = slowly
    driver, answers = place.driver, list[list[str]]()
    call = threading.Thread(target=lambda: answers.append(asked(driver, "prepare", claim)))
    call.start()
    assert reads.wait(60)
    assert place.agent.process is not None
    place.agent.process.terminate()
    eventually(lambda: place.agent.said("node agent stops"), "the agent is stopping")
    goes_on.set()
    call.join(60)
    assert answers == [[""]]
    assert os.path.exists(place.spec(claim))
    assert place.agent.process.wait(30) == 0


def test_nothing_fails_in_updates_while_pods_come_and_go(place: Place) -> None:
    with updating(place) as waiter:
        storm = Storm(place, [*place.gpus, *place.parts])
        agents = [place.agent, waiter]
        try:
            for turn, how in enumerate(("kill", "stop", "kill")):
                pods = [
                    threading.Thread(target=storm.pods, args=(10 * turn + number, 8))
                    for number in range(4)
                ]
                for thread in pods:
                    thread.start()
                eventually(partial(storm.is_past, storm.prepared + 2), "some more are prepared")
                getattr(agents[-2], how)()
                for thread in pods:
                    thread.join(120)
                pod = f"{NEW[:-1]}{turn}"
                agents.append(place.new_agent("--pod-uid", pod, log=f"{turn}.log"))
                agents[-1].start()
                eventually(partial(is_known, place, pod), "the next one is registered")
        finally:
            for agent in agents[2:]:
                agent.kill()
        assert storm.failed == []
        assert storm.twice == []
        assert storm.unanswered == 0
        assert left(place) == ([], [])
