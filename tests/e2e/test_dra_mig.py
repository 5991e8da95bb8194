"""MIG devices that the agent creates for claims, with a simulated node's nvidia-smi."""

from __future__ import annotations

import json
import os
import re
import tempfile
import threading
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import grpc  # type: ignore[import-untyped] # it ships no types
import pytest

from integration.node.options import DRA_DRIVER
from tests.e2e.test_dra import GPU
from tests.harness.cluster import Cluster
from tests.harness.dra_node import NODE, Place, dra_node_of
from tests.harness.kept import Kept
from tests.harness.nvidia_smi import nvidia_smi
from tests.harness.nvshim import nvshim
from tests.harness.waiting import at_once, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.harness.kubelet_dra import Reference


THERE: Final = "1g.10gb"
SCENARIO: Final[dict[str, Any]] = {
    "gpus": 3, "model": "h100", "gpu": [{"index": 1, "mig": [THERE]}, {"index": 2, "mig": []}],
}  # fmt: skip
# All of GPU 2, and of GPU 1 those that do not need its first instance's slice.
COULD_BE: Final = (6 + 6 + 3 + 2 + 1) + 25
# GPU 0 can be allocated whole or be partitioned.
EVERYTHING: Final = 1 + 25 + 1 + COULD_BE


ON, OFF = "Enabled, Enabled", "Disabled, Disabled"


class Cut(Place):
    """A node with GPUs that can be partitioned."""

    def part(self, shape: str, start: int, gpu: int = 2) -> str:
        """Return the name of a device that could be created."""
        uuid = self.node.scenario.gpus[gpu].uuid.lower()
        found = [
            name for name in self.cluster.published()
            if re.fullmatch(rf"{uuid}-mig-{shape}-\d+-{start}", name)
        ]  # fmt: skip
        (name,) = found
        return name

    def smi(self, *arguments: str) -> str:
        """Run the node's nvidia-smi, as an operator does."""
        return nvidia_smi(self.node, *arguments)

    def there(self) -> list[str]:
        """Return the profiles of the MIG devices that nvidia-smi lists, by GPU."""
        return re.findall(r"^  MIG (\S+)", self.smi("-L"), re.MULTILINE)

    def instances(self) -> int:
        """Return the number of GPU instances."""
        return len(re.findall(r"MIG \dg\.", self.smi("mig", "-lgi")))

    def noted(self) -> list[dict[str, Any]]:
        """Return the agent's records of devices that it creates."""
        try:
            with open(f"{self.node.state}/dra-mig.json", encoding="utf-8") as file:
                found: list[dict[str, Any]] = json.load(file)["made"]
        except FileNotFoundError:
            return []
        return found

    def is_clean(self) -> bool:
        return self.there() == [THERE] and self.instances() == 1 and self.noted() == []

    def mode(self) -> str:
        """Return the MIG mode of GPU 0, now and after a reset."""
        query = "--query-gpu=mig.mode.current,mig.mode.pending"
        return self.smi("-i", "0", query, "--format=csv,noheader").strip()

    def is_whole(self) -> bool:
        """Whether nothing is left of claims that used MIG devices of GPU 0."""
        with open(f"{self.node.state}/dra-mig-mode.json", encoding="utf-8") as file:
            switched = json.load(file)["gpus"]
        return self.is_clean() and self.mode() == OFF and switched == []

    def used(self, *lines: str) -> None:
        """Simulate processes on the GPUs."""
        self._put("processes", lines)

    def nvml(self, *faults: str) -> None:
        """Inject NVML faults."""
        self._put("faults", faults)

    def _put(self, name: str, lines: tuple[str, ...]) -> None:
        path = f"{self.node.state}/nvml-{name}"
        with open(f"{path}.new", "w", encoding="ascii") as file:
            file.write("".join(f"{line}\n" for line in lines))
        os.rename(f"{path}.new", path)


@contextmanager
def node_to_cut(*flags: str) -> Iterator[Cut]:
    flags = ("--dra-mig", *flags)
    with (
        tempfile.TemporaryDirectory(prefix="node-") as directory,
        tempfile.TemporaryDirectory(prefix="kubelet-") as root,  # socket addresses are limited
        dra_node_of(Cut, directory, root, SCENARIO, devices=EVERYTHING, flags=flags) as place,
    ):
        yield place


def tidy(place: Cut) -> None:
    """Remove all claims and MIG devices from the node."""
    place.nvml()
    place.used()
    place.tidy(EVERYTHING)
    eventually(lambda: place.is_clean() and place.mode() == OFF, "nothing is left")


@pytest.fixture(scope="module")
def kept() -> Iterator[Kept[Cut]]:
    kept = Kept(node_to_cut, tidy)
    yield kept
    kept.close()


@pytest.fixture
def place(kept: Kept[Cut]) -> Iterator[Cut]:
    """Return a node that several tests use, one after another."""
    with kept.lent() as place:
        yield place


@pytest.fixture
def fresh() -> Iterator[Cut]:
    """Yield a node that the test may change."""
    with node_to_cut() as place:
        yield place


def test_a_claims_device_is_made_and_undone(place: Cut) -> None:
    claim = place.claim("one", place.part("3g40gb", 4))
    writes = len(place.cluster.writes)
    first = place.driver.prepare(claim)[claim[1]]
    assert not first.error
    assert place.there() == [THERE, "3g.40gb"]
    with open(place.spec(claim), encoding="utf-8") as file:
        (device,) = json.load(file)["devices"]
    nodes = {each["path"] for each in device["containerEdits"]["deviceNodes"]}
    caps = {path for path in nodes if "nvidia-cap" in path}
    assert "/dev/nvidia2" in nodes
    assert len(caps) == 2
    for path in caps:
        assert os.path.exists(place.node.dev + path.removeprefix("/dev"))
    assert place.driver.prepare(claim)[claim[1]] == first
    assert place.there() == [THERE, "3g.40gb"], "it is created once"

    place.give_back(claim)
    assert place.is_clean()
    assert not os.path.exists(place.spec(claim))
    place.give_back(claim)
    place.published(EVERYTHING)
    assert len(place.cluster.writes) == writes, "nothing that is published has changed"


def known_of(place: Cut, uuid: str) -> dict[str, Any]:
    """Return the agent's record of a device; empty if there is none."""
    with open(f"{place.node.state}/health.json", encoding="utf-8") as file:
        devices: list[dict[str, Any]] = json.load(file)["devices"]
    return next((each for each in devices if each["uuid"] == uuid and not each["gone"]), {})


def is_gone(place: Cut, uuid: str) -> bool:
    return not known_of(place, uuid)


def made_and_known(place: Cut, claim: Reference) -> str:
    """Prepare a claim, wait until the agent has seen its device, and return the UUID."""
    place.have(claim)
    (note,) = place.noted()
    uuid = str(note["uuid"])
    eventually(lambda: known_of(place, uuid), "it is seen")
    return uuid


def test_the_first_device_out_of_service_may_be_a_part(fresh: Cut) -> None:
    name = fresh.part("2g20gb", 2)
    uuid = made_and_known(fresh, fresh.claim("one", name))
    nvshim("drain", "--config", fresh.node.config_path, "2:0")
    taints = eventually(fresh.cluster.taints, "it has a taint")
    assert {each: [taint["key"] for taint in its] for each, its in taints.items()} == {
        name: [f"{DRA_DRIVER}/out-of-service"]
    }
    fresh.cluster.wipe()  # as a kubelet does when it starts
    fresh.published(EVERYTHING)
    assert fresh.cluster.taints().keys() == {name}
    nvshim("undrain", "--config", fresh.node.config_path, uuid)
    eventually(lambda: not fresh.cluster.taints(), "the taint is gone")
    assert not any("dra slices" in each for each in fresh.agent.faults())


@pytest.mark.parametrize("version", ["v1beta2", "v1beta1"])
def test_gpus_are_cut_where_the_api_is_older(fresh: Cut, tmp_path: Path, version: str) -> None:
    fresh.agent.stop()
    with Cluster(str(tmp_path / "older"), node=NODE, versions=(version,)) as cluster:
        fresh.cluster = cluster
        with fresh.new_agent("--dra-mig"):
            fresh.published(EVERYTHING)
            claim = fresh.claim("one", fresh.part("2g20gb", 2))
            fresh.have(claim)
            assert fresh.there() == [THERE, "2g.20gb"]
            fresh.give_back(claim)


def test_a_part_that_is_made_again_and_again_is_healthy(place: Cut) -> None:
    claim = place.claim("one", place.part("2g20gb", 2))
    for _ in range(3):
        uuid = made_and_known(place, claim)
        known = known_of(place, uuid)
        assert (known["state"], known["lost"]) == ("healthy", ""), known
        assert not place.cluster.taints()
        place.give_back(claim)
        eventually(partial(is_gone, place, uuid), "the agent has seen the removal")


def test_what_overlaps_is_refused_and_what_does_not_is_made(place: Cut) -> None:
    half, inside = place.part("3g40gb", 0), place.part("1g10gb", 2)
    one, other = place.claim("one", half), place.claim("other", inside)
    beside = place.claim("beside", place.part("2g20gb", 4), place.part("1g10gb", 6))
    there = next(each for each in place.cluster.published() if each.startswith("mig-"))
    old = place.claim("old", there, place.part("1g10gb", 3, gpu=1))
    for claim in (one, beside, old):
        place.have(claim)
    error = place.refusal(other)
    assert "NVSHIM-E2774" in error
    assert "claim default/one has" in error
    assert sorted(place.there()) == sorted([THERE, "1g.10gb", "3g.40gb", "2g.20gb", "1g.10gb"])
    place.driver.unprepare(one)
    place.have(other)
    place.driver.unprepare(other, beside, old)
    assert place.is_clean()


def test_two_claims_at_once_for_one_place_make_one_device(place: Cut) -> None:
    names = [place.part("4g40gb", 0), place.part("3g40gb", 0), place.part("2g20gb", 2)]
    claims = [place.claim(f"claim-{n}", name) for n, name in enumerate([*names, names[0]])]
    errors = at_once(place.refusal, claims)
    assert sorted(bool(error) for error in errors) == [False, True, True, True]
    assert all("E2774" in error for error in errors if error)
    assert len(place.there()) == 2
    place.driver.unprepare(*claims)
    assert place.is_clean()


def test_what_cannot_be_made_is_an_error_and_leaves_nothing(place: Cut) -> None:
    claim = place.claim("one", place.part("2g20gb", 2))
    for fault in (
        "nvmlDeviceCreateGpuInstanceWithPlacement=error:999",
        "nvmlGpuInstanceCreateComputeInstance=error:999",
    ):
        place.nvml(fault)
        error = place.refusal(claim)
        assert "NVSHIM-E2780" in error
        assert "Unknown Error" in error, "nvidia-smi's own words"
        assert not os.path.exists(place.spec(claim))
        eventually(place.is_clean, "nothing is left")
    place.nvml()
    place.have(claim)


def test_a_place_that_somebody_has_taken_is_said(fresh: Cut) -> None:
    claim = fresh.claim("one", fresh.part("2g20gb", 2))
    assert fresh.smi("mig", "-i", "2", "-cgi", "19:3", "-C")
    error = fresh.refusal(claim)
    # Whether or not the agent has noticed that already.
    assert "NVSHIM-E2780" in error or "NVSHIM-E2773" in error
    gone = {"1g10gb-19-3", "1g10gb-me-20-3", "1g20gb-15-2", "2g20gb-14-2", "3g40gb-9-0",
            "4g40gb-5-0", "7g80gb-0-0"}  # fmt: skip
    published = fresh.published(EVERYTHING - len(gone) + 1)
    assert not any(each.endswith(f"-mig-{name}") for each in published for name in gone
                   if each.startswith(fresh.node.scenario.gpus[2].uuid.lower()))  # fmt: skip


def test_a_device_in_use_keeps_its_claim(place: Cut) -> None:
    claim = place.claim("one", place.part("2g20gb", 2))
    place.have(claim)
    (note,) = place.noted()
    assert note["uuid"].startswith("MIG-")
    instance = re.findall(r"\|   2  MIG 2g\.20gb +14 +(\d+)", place.smi("mig", "-lgi"))[0]
    with open(f"{place.node.state}/nvml-processes", "w", encoding="ascii") as file:
        file.write(f"2 {os.getpid()} 1048576 {instance} 0\n")
    error = place.driver.unprepare(claim)[claim[1]]
    assert "NVSHIM-E2781" in error
    assert "In use by another client" in error
    other = place.claim("other", place.part("1g10gb", 3))
    assert "NVSHIM-E2774" in place.refusal(other)
    os.unlink(f"{place.node.state}/nvml-processes")
    place.give_back(claim)
    assert place.is_clean()


def test_a_nvidia_smi_that_hangs_is_ended_and_holds_nobody_else_up(place: Cut) -> None:
    place.nvml("gpu2.nvmlDeviceCreateGpuInstanceWithPlacement=hang")
    claim = place.claim("one", place.part("2g20gb", 2))
    whole = place.node.scenario.gpus[0].uuid.lower()
    other = place.claim("other", whole, place.part("1g10gb", 3, gpu=1))
    errors: list[str] = []
    thread = threading.Thread(target=lambda: errors.append(place.refusal(claim)))
    thread.start()
    eventually(lambda: hanging(place), "it has started")
    place.have(other)
    assert errors == []
    thread.join()
    (error,) = errors
    assert "NVSHIM-E2780" in error
    assert "nvidia-smi did not exit within" in error
    place.driver.unprepare(other)
    eventually(place.is_clean, "nothing is left")


STEPS: Final = (
    "nvmlDeviceCreateGpuInstanceWithPlacement", "nvmlGpuInstanceCreateComputeInstance",
    "nvmlComputeInstanceDestroy", "nvmlGpuInstanceDestroy",
)  # fmt: skip

KILLED: Final = {(STEPS[0], False), (STEPS[1], True), (STEPS[2], True)}
"""The steps at which an agent is killed by default, and whether its claims are lost."""


def kill_at(step: str, claim: tuple[str, str, str], place: Cut) -> bool:
    """Kill the agent while nvidia-smi hangs in an NVML call for a claim.

    Returns:
        Whether nvidia-smi was removing the claim's devices, and not creating them.
    """
    is_to_go = step.endswith("Destroy")
    if is_to_go:
        place.have(claim)
    place.nvml(f"{step}=hang")
    do = place.driver.unprepare if is_to_go else place.driver.prepare

    def ask() -> None:
        with pytest.raises(grpc.RpcError):
            do(claim)

    thread = threading.Thread(target=ask)
    thread.start()
    eventually(lambda: hanging(place), "nvidia-smi hangs")
    place.agent.kill()
    thread.join()
    eventually(lambda: not hanging(place), "it exits with the agent")
    place.nvml()
    return is_to_go


# make test covers each step once: here, or where a whole GPU is partitioned (below).
@pytest.mark.parametrize(
    ("step", "loss"),
    [
        pytest.param(step, loss, marks=[] if (step, loss) in KILLED else pytest.mark.thorough)
        for step in STEPS
        for loss in (False, True)
    ],
)
def test_an_agent_that_is_killed_leaves_nothing(place: Cut, step: str, loss: bool) -> None:
    claim = place.claim("one", place.part("2g20gb", 2))
    is_to_go = kill_at(step, claim, place)
    if loss:
        os.unlink(f"{place.node.state}/dra.json")
    place.start_again()
    if is_to_go:
        place.give_back(claim)
    eventually(place.is_clean, "nothing is left")
    place.have(claim)
    assert place.there() == [THERE, "2g.20gb"]
    place.give_back(claim)
    assert place.is_clean()


def hanging(place: Cut) -> list[str]:
    """Return the nvidia-smi processes that run with the node's driver."""
    found = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            target = os.readlink(f"/proc/{pid}/exe")
        except OSError:
            continue
        if target.startswith(place.node.directory) and target.endswith("nvidia-smi"):
            found.append(pid)
    return found


@pytest.mark.parametrize(
    "lost",
    [
        (),
        # Recovery that needs one of the two also works when both are lost.
        pytest.param(("dra.json",), marks=pytest.mark.thorough),
        pytest.param(("dra-mig.json",), marks=pytest.mark.thorough),
        ("dra.json", "dra-mig.json"),
    ],
)
def test_what_a_pod_has_outlives_the_agent_and_its_notes(fresh: Cut, lost: tuple[str, ...]) -> None:
    name, inside = fresh.part("2g20gb", 2), fresh.part("1g10gb", 3)
    claim, other = fresh.claim("one", name), fresh.claim("other", inside)
    first = fresh.driver.prepare(claim)[claim[1]]
    assert not first.error
    fresh.note(claim, name)
    fresh.agent.kill()
    for file in lost:
        os.unlink(f"{fresh.node.state}/{file}")
    fresh.start_again()
    assert fresh.driver.prepare(claim)[claim[1]] == first
    assert "E2774" in fresh.refusal(other)
    assert fresh.there() == [THERE, "2g.20gb"]
    fresh.published(EVERYTHING)
    fresh.give_back(claim)
    assert fresh.is_clean()


def test_an_agent_that_makes_none_any_more_undoes_what_was_made(fresh: Cut) -> None:
    claim = fresh.claim("one", fresh.part("2g20gb", 2))
    fresh.have(claim)
    fresh.agent.kill()
    fresh.agent = fresh.new_agent()
    with fresh.agent:
        eventually(
            lambda: len(fresh.cluster.published()) == 3, "possible devices are not published"
        )
        eventually(lambda: fresh.refusal(claim) == "", "it has it still")
        fresh.give_back(claim)
        assert fresh.is_clean()


def test_the_device_plugin_does_not_give_what_was_made_for_a_claim() -> None:
    with node_to_cut("--mig-strategy", "mixed") as place:
        resource = f"{GPU.partition('/')[0]}/mig-1g.10gb"
        place.plugins.wait_for(resource, 1)
        claim = place.claim("one", place.part("1g10gb", 2))
        place.have(claim)
        (note,) = place.noted()
        eventually(lambda: len(place.plugins.plugins[resource].devices) == 2, "it is seen")
        eventually(lambda: note["uuid"] not in place.plugins.healthy(resource), "it is not offered")
        with pytest.raises(grpc.RpcError, match="NVSHIM-E2774"):
            place.plugins.plugins[resource].allocate(note["uuid"])
        place.driver.unprepare(claim)


# -- MIG mode ----------------------------------------------------------------------------------


def test_a_gpu_is_cut_for_its_first_part_and_whole_after_the_last(place: Cut) -> None:
    (gpu,) = (each for each in place.gpus if each == place.node.scenario.gpus[0].uuid.lower())
    told = place.cluster.devices()
    (taken,) = told[gpu]["consumesCounters"]
    (sets,) = (
        one for each in place.cluster.slices() for one in each["spec"].get("sharedCounters", ())
        if one["name"] == taken["counterSet"]
    )  # fmt: skip
    assert taken["counters"] == sets["counters"], "it takes all that there is"
    writes = len(place.cluster.writes)
    whole = place.claim("whole", gpu)
    one, two = (place.claim(f"part-{n}", place.part("1g10gb", n, gpu=0)) for n in (2, 3))
    place.have(whole)
    assert "claim default/whole has it" in place.refusal(one)
    assert place.mode() == OFF
    place.driver.unprepare(whole)

    place.have(one)
    assert place.mode() == ON
    place.have(two)
    assert place.there() == ["1g.10gb", "1g.10gb", THERE]
    assert "NVSHIM-E2774" in place.refusal(whole)
    place.driver.unprepare(one)
    assert place.mode() == ON
    place.driver.unprepare(two)
    assert place.is_whole()
    place.have(whole)
    assert len(place.cluster.writes) == writes, "nothing that is published has changed"


def test_a_gpu_that_is_in_use_is_not_cut_and_that_is_said(place: Cut) -> None:
    claim = place.claim("one", place.part("3g40gb", 4, gpu=0))
    place.used(f"0 {os.getpid()} 1048576")
    error = place.refusal(claim)
    assert "NVSHIM-E2782" in error
    assert f"of {place.node.scenario.gpus[0].uuid} on for claim default/one" in error
    assert "In use by another client" in error
    assert not os.path.exists(place.spec(claim))
    place.used()
    eventually(place.is_whole, "no mode is pending")
    place.have(claim)
    # A process that has the GPU open does not keep a claim from ending either.
    place.used(f"0 {os.getpid()} 1048576 9 0", f"0 {os.getpid()} 1048576")
    place.driver.unprepare(claim)
    place.used(f"0 {os.getpid()} 1048576")
    place.give_back(claim)
    assert place.mode().startswith("Enabled")
    whole = place.claim("whole", place.node.scenario.gpus[0].uuid.lower())
    assert "NVSHIM-E2782" in place.refusal(whole)
    place.used()
    place.have(whole)
    assert place.is_whole()


def test_a_gpu_that_a_person_cuts_stays_that_persons(fresh: Cut) -> None:
    claim = fresh.claim("one", fresh.part("1g10gb", 2, gpu=0))
    fresh.have(claim)
    assert fresh.smi("mig", "-i", "0", "-cgi", "19:5", "-C")
    fresh.give_back(claim)
    assert fresh.mode() == ON
    gpu = fresh.node.scenario.gpus[0].uuid.lower()
    eventually(lambda: gpu not in fresh.cluster.published(), "it is not offered as a whole")


def test_a_mode_of_which_the_note_is_lost_is_said(fresh: Cut) -> None:
    claim = fresh.claim("one", fresh.part("1g10gb", 2, gpu=0))
    fresh.have(claim)
    fresh.agent.kill()
    os.unlink(f"{fresh.node.state}/dra-mig-mode.json")
    fresh.start_again()
    fresh.give_back(claim)
    assert fresh.is_clean()
    assert fresh.mode() == ON, "it may be a person's"
    line = f"GPU 0 ({fresh.node.scenario.gpus[0].uuid}) is in MIG mode, and has no instances"
    eventually(lambda: line in fresh.agent.faults(), "it is reported")


def test_a_mode_that_a_person_has_just_set_is_left_to_that_person(fresh: Cut) -> None:
    claim = fresh.claim("one", fresh.part("1g10gb", 2, gpu=0))
    assert fresh.smi("-i", "0", "-mig", "1")  # before the agent scans the node again
    fresh.have(claim)
    fresh.give_back(claim)
    gpu = fresh.node.scenario.gpus[0].uuid.lower()
    eventually(lambda: gpu not in fresh.cluster.published(), "it is not offered as a whole")
    assert fresh.mode() == ON


def test_a_mode_that_a_person_has_just_switched_off_is_switched_on_for_a_claim(fresh: Cut) -> None:
    claim = fresh.claim("one", fresh.part("1g10gb", 2, gpu=0))
    assert fresh.smi("-i", "0", "-mig", "1")
    gpu = fresh.node.scenario.gpus[0].uuid.lower()
    other = fresh.claim("other", fresh.part("1g10gb", 3, gpu=1))
    fresh.have(other)  # afterwards the agent asks NVML about all GPUs
    eventually(lambda: gpu not in fresh.cluster.published(), "the agent has seen it")
    assert fresh.smi("-i", "0", "-mig", "0")  # before the agent scans the node again
    fresh.have(claim)
    fresh.give_back(claim, other)
    eventually(fresh.is_whole, "nothing is left")


@pytest.mark.parametrize(
    "step",
    [
        "nvmlDeviceSetMigMode",
        # The test above covers GPUs that are already partitioned.
        *(pytest.param(step, marks=pytest.mark.thorough) for step in STEPS[:-1]),
        STEPS[-1],
    ],
)
def test_an_agent_that_is_killed_leaves_gpus_whole(place: Cut, step: str) -> None:
    claim = place.claim("one", place.part("2g20gb", 2, gpu=0))
    is_to_go = kill_at(step, claim, place)
    place.start_again()
    if is_to_go:
        place.give_back(claim)
    eventually(place.is_whole, "nothing is left")
