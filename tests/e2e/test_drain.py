"""Devices out of service: containerd's errors, and the containers that drain waits for or stops."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import pytest

from integration.simulated import Scenario, SimulatedNode
from tests.harness.nvshim import Answer, nvshim, start_nvshim
from tests.harness.openable import make_openable
from tests.harness.runtime import Runtime, new_name
from tests.harness.waiting import eventually
from tools.images import GLIBC

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tools.containerd import Completed

# No other node uses these minors: every process with a node open is a holder.
_MINORS: Final = 28

ON_GPU_0: Final = ("--env", "NVIDIA_VISIBLE_DEVICES=0")
ON_GPU_1: Final = ("--env", "NVIDIA_VISIBLE_DEVICES=1")
ON_ALL: Final = ("--env", "NVIDIA_VISIBLE_DEVICES=all")
POLITE: Final = "trap 'exit 7' TERM; while true; do sleep 0.1; done"


class Place:
    """A node with two GPUs, its containerd, and the commands on it."""

    def __init__(self, runtime: Runtime, node: SimulatedNode) -> None:
        self.runtime, self.node = runtime, node
        state = os.path.dirname(os.path.dirname(os.path.dirname(runtime.containerd.bundle("x"))))
        self.config = ("--config", node.config_path)
        # Only this containerd's containers: other nodes' GPUs have the same names.
        self.where = (*self.config, "--containerd-state", state)

    def drain(self, *words: str) -> dict[str, Any]:
        answer = nvshim("drain", *words, *self.where, "-o", "json", check=False)
        assert answer.code in {0, 3}, answer.stderr
        document: dict[str, Any] = answer.document
        assert answer.code == (3 if not document["free"] and _waits(words) else 0)
        return document

    def undrain(self, *words: str) -> Answer:
        return nvshim("undrain", *words, *self.config)

    def spawn_drain(self, *words: str) -> subprocess.Popen[str]:
        """Start the command in the background."""
        pipe = subprocess.PIPE
        where = (*self.where, "-o", "json")
        return start_nvshim("drain", *words, *where, stdout=pipe, stderr=pipe, text=True)

    def is_marked(self, index: int) -> bool:
        uuid = self.node.scenario.gpus[index].uuid
        return os.path.exists(f"{self.node.directory}/drained/{uuid}")

    def try_one(self, *flags: str, name: str | None = None) -> Completed:
        """Try to start a container that keeps running."""
        container = self.runtime.expect(name)
        words = ("--detach", *flags)
        words = self.runtime.words("sleep", "1000", image=GLIBC, name=container.name, flags=words)  # type: ignore[assignment]
        done: Completed = self.runtime.containerd.ctr(*words, check=False)
        if done.code:
            self.runtime.containerd.ctr("containers", "rm", container.name, check=False)
        return done

    def holders(self, document: dict[str, Any]) -> list[str]:
        namespace = self.runtime.containerd.namespace
        return [each["name"].removeprefix(f"{namespace}/") for each in document["holders"]]


def _waits(words: tuple[str, ...]) -> bool:
    return any(word.startswith(("--wait", "--force")) for word in words)


@pytest.fixture(scope="module")
def node(workshop: str) -> Iterator[SimulatedNode]:
    scenario = Scenario.load("two")
    gpus = tuple(replace(gpu, minor=_MINORS + gpu.index) for gpu in scenario.gpus)
    with SimulatedNode.create(f"{workshop}/drained", replace(scenario, gpus=gpus)) as node:
        yield node


@pytest.fixture
def place(ours: Runtime, node: SimulatedNode, configure: Callable[..., None]) -> Iterator[Place]:
    configure(node=node)
    place = Place(ours, node)
    yield place
    ours.close()
    with suppress(AssertionError):  # where nothing is out of service
        place.undrain("all")
    with suppress(AssertionError):
        place.undrain("--driver")
    assert not os.path.exists(f"{node.directory}/drained")


def test_a_gpu_out_of_service_is_refused_to_who_names_it_and_all_is_the_rest(place: Place) -> None:
    assert place.drain("1", "--reason", "the fan\n is replaced")["free"]
    refused = place.try_one(*ON_GPU_1)
    assert refused.code == 1
    assert "NVSHIM-E0231 out-of-service: GPU 1 (GPU-" in refused.stderr
    assert "is out of service since 20" in refused.stderr
    assert "the fan is replaced" in refused.stderr
    assert "nvshim undrain 1" in refused.stderr
    seen = place.runtime.run("sh", "-c", "echo /dev/nvidia[0-9]*", image=GLIBC, flags=ON_ALL)
    assert seen.lines == [f"/dev/nvidia{_MINORS}"]
    listed = nvshim("list", *place.where, "-o", "json").items
    assert [bool(row["out_of_service"]) for row in listed] == [False, True]
    assert "out of service since" in nvshim("list", *place.where).stdout
    place.undrain("1")
    assert place.try_one(*ON_GPU_1).code == 0


def test_holders_are_listed_by_name_and_waited_for(place: Place) -> None:
    one = place.runtime.start_idle(image=GLIBC, flags=ON_GPU_1)
    both = place.runtime.start_idle(image=GLIBC, flags=ON_ALL)
    place.runtime.start_idle(image=GLIBC, flags=ON_GPU_0)
    document = place.drain("1")
    assert sorted(place.holders(document)) == sorted([one.name, both.name])
    assert not document["free"]
    assert {each["pid"] for each in document["holders"]} == {one.pid, both.pid}
    assert place.holders(place.drain("1", "--wait=1s")) == place.holders(document)
    waiting = place.spawn_drain("1", "--wait")
    both.remove()
    assert waiting.poll() is None, "one still holds it"
    # Its task still exists, but a stopped container holds nothing.
    one.kill()
    out, _ = waiting.communicate(timeout=60)
    assert waiting.returncode == 0
    assert json.loads(out)["free"]
    assert json.loads(out)["holders"] == []


def test_forced_containers_are_told_to_end_and_killed_after_their_grace(place: Place) -> None:
    polite = place.runtime.start("sh", "-c", POLITE, image=GLIBC, flags=ON_GPU_1)
    eventually(lambda: _catches(polite.pid, signal.SIGTERM), "its trap is set")
    # The kernel drops signals without a handler for init of a pid namespace.
    stubborn = place.runtime.start_idle(image=GLIBC, flags=ON_GPU_1)
    other = place.runtime.start_idle(image=GLIBC, flags=ON_GPU_0)
    done = nvshim("drain", "1", "--force", "--grace=2s", *place.where)
    said = [line.split() for line in done.stderr.splitlines() if line.startswith("SIG")]
    namespace = place.runtime.containerd.namespace
    names = [f"{namespace}/{each.name}" for each in (polite, stubborn)]
    assert sorted(said[:2]) == [["SIGTERM", "to", name] for name in sorted(names)]
    assert said[2:] == [["SIGKILL", "to", names[1]]]
    assert done.stdout.splitlines()[-1] == "free"
    assert polite.exit_code() == 7
    assert stubborn.exit_code() == 128 + signal.SIGKILL
    assert other.status == "RUNNING"


def _catches(pid: int, number: signal.Signals) -> bool:
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        (caught,) = (line.split()[1] for line in file if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (number - 1) & 1)


@pytest.mark.serial  # every process with an NVIDIA node open holds the driver
def test_the_driver_out_of_service_has_everybody_as_a_holder(place: Place) -> None:
    files = place.runtime.start_idle(image=GLIBC, flags=("--env", "NVIDIA_VISIBLE_DEVICES=none"))
    one = place.runtime.start_idle(image=GLIBC, flags=ON_GPU_1)
    place.runtime.start_idle(image=GLIBC)
    document = place.drain("--driver", "--reason", "570 comes")
    assert sorted(place.holders(document)) == sorted([files.name, one.name])
    refused = place.try_one("--env", "NVIDIA_VISIBLE_DEVICES=none")
    assert "NVSHIM-E0231" in refused.stderr
    assert "the driver is out of service since" in refused.stderr
    assert place.try_one().code == 0, "a container without GPUs starts"
    assert place.drain("--driver", "--force", "--grace=1s")["free"]
    place.undrain("--driver")
    assert place.try_one(*ON_ALL).code == 0


def test_none_slips_through_between_the_mark_and_the_list(place: Place) -> None:
    """Each container that is created while a GPU is drained is either refused or listed."""
    starting: list[tuple[str, int]] = []
    stop = threading.Event()

    def start() -> None:
        while not stop.is_set():
            name = new_name()
            starting.append((name, place.try_one(*ON_GPU_1, name=name).code))

    threads = [threading.Thread(target=start) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        eventually(lambda: len([1 for _, code in starting if code == 0]) >= 3, "some are created")
        document = place.drain("1")
        made = len(starting)
        eventually(lambda: len(starting) >= made + 6, "others are tried")
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    held = set(place.holders(document))
    assert {name for name, code in starting if code == 0} <= held
    # A refused container may be listed: its bundle exists until the refusal is answered.
    assert held <= {name for name, _ in starting}
    assert starting[-1][1] != 0


def test_two_drains_and_an_undrain(place: Place) -> None:
    first = place.drain("1", "--reason", "one")["devices"][0]
    again = place.drain("1")["devices"][0]
    assert again == first, "time and reason are kept"
    assert place.drain("1", "--reason", "two")["devices"][0]["why"].endswith(": two")
    others = [place.spawn_drain(str(n % 2), "--reason", f"r{n}") for n in range(6)]
    for other in others:
        other.communicate(timeout=60)
        assert other.returncode == 0
    assert place.is_marked(0)
    assert place.is_marked(1)
    assert nvshim("undrain", "all", *place.config).stdout.count("back in service") == 2
    refused = nvshim("undrain", "1", *place.config, check=False)
    assert refused.code == 1
    assert refused.stderr.startswith("NVSHIM-E2643 not-drained")


def test_a_process_of_the_host_that_has_the_node_open_is_a_holder(place: Place) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDS, make_openable(place.node, 1)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        process.stdout.readline()
        document = place.drain("1")
        (holder,) = document["holders"]
        assert (holder["kind"], holder["pid"]) == ("process", process.pid)
        assert holder["do"] == "end it"
        assert not document["free"]
        assert not place.drain("1", "--force", "--wait=1s")["free"], "it is not ours to end"
        assert process.poll() is None
        assert place.drain("0")["free"]
        waiting = place.spawn_drain("1", "--wait")
        process.stdin.close()
        assert json.loads(waiting.communicate(timeout=60)[0])["free"]


_HOLDS: Final = (
    "import os, sys; fd = os.open(sys.argv[1], os.O_RDWR); print(flush=True); sys.stdin.read()"
)


def test_what_is_no_device_is_not_taken_out_of_service(place: Place) -> None:
    for name in ("9", "GPU-", "0:0", "../../etc", "void"):
        refused = nvshim("drain", name, *place.where, check=False)
        assert refused.code == 1, name
        assert refused.stderr.startswith("NVSHIM-E2641")
        assert not os.path.exists(f"{place.node.directory}/drained")


def test_a_mig_layout_waits_for_containers_of_what_it_changes_alone(
    place: Place, tmp_path: Path
) -> None:
    layouts = tmp_path / "layouts.yaml"
    layouts.write_text(LAYOUTS)

    def mig(*words: str) -> Answer:
        return nvshim("mig", "apply", str(layouts), *words, *place.where, check=False)

    other = place.runtime.start_idle(image=GLIBC, flags=ON_GPU_0)
    whole = place.runtime.start_idle(image=GLIBC, flags=ON_GPU_1)
    refused = mig("cut")
    assert refused.code == 1
    assert "NVSHIM-E2684 layout-held" in refused.stderr
    assert whole.name in refused.stderr
    assert not place.is_marked(1)

    done = mig("cut", "--force", "--grace=0s")
    assert done.code == 0, done.stderr
    assert whole.status != "RUNNING"
    stays = place.runtime.start_idle(image=GLIBC, flags=("--env", "NVIDIA_VISIBLE_DEVICES=1:0"))
    # The larger instance and its container stay; the smaller one is removed.
    assert mig("other").code == 0
    caps = stays.exec("sh", "-c", "ls /dev/nvidia-caps").stdout.split()
    assert len(caps) == 2
    assert stays.status == "RUNNING"
    assert mig("off", "--force", "--grace=0s").code == 0
    assert other.status == "RUNNING"


LAYOUTS: Final = """
version: v1
mig-configs:
  cut: [{devices: [1], mig-enabled: true, mig-devices: {3g.40gb: 1, 1g.10gb: 1}}]
  other: [{devices: [1], mig-enabled: true, mig-devices: {3g.40gb: 1, 2g.20gb: 1}}]
  "off": [{devices: [1], mig-enabled: false}]
"""
