"""Sharing settings of claims, with a kubelet's calls on a simulated node: time slices, MPS."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import grpc  # type: ignore[import-untyped] # it ships no types
import pytest

from integration.node.options import DRA_DRIVER
from tests.harness.dra_sharing import Sharing, sharing_node, tidy
from tests.harness.front import Front
from tests.harness.kept import Kept
from tests.harness.mps_agent import PROGRAM
from tests.harness.nvshim import nvshim
from tests.harness.runtime import is_alive
from tests.harness.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator


GPU: Final = "nvidia.com/gpu"
IN_PARTS: Final = pytest.mark.parametrize("place", [4], indirect=True)


@pytest.fixture(scope="module")
def kept() -> Iterator[dict[int, Kept[Sharing]]]:
    kept = {shares: Kept(partial(sharing_node, shares), tidy) for shares in (0, 4)}
    yield kept
    for each in kept.values():
        each.close()


@pytest.fixture
def place(kept: dict[int, Kept[Sharing]], request: pytest.FixtureRequest) -> Iterator[Sharing]:
    """Return a node that tests use one after another; the parameter is the number of shares."""
    with kept[getattr(request, "param", 0)].lent() as place:
        yield place


# -- time slices -------------------------------------------------------------------------------


def call(uuid: str, number: int) -> str:
    return f"compute-policy -i {uuid} --set-timeslice={number}"


def test_a_time_slice_is_set_for_a_claim_and_set_back_after_it(place: Sharing) -> None:
    one, other = place.gpus
    claim = place.shared("one", one, timeSlice="Long")
    place.have(claim)
    place.have(claim)
    assert place.called() == [call(place.uuid(one), 3)]
    # The default time slice changes nothing.
    place.have(place.shared("other", other, timeSlice="Default"))
    assert len(place.called()) == 1
    # The next agent knows the time slice, and sets it once more: was the driver loaded again?
    place.agent.kill()
    place.start_again()
    place.have(claim)
    place.give_back(claim)
    assert place.called() == [
        call(place.uuid(one), 3), call(place.uuid(one), 3), call(place.uuid(one), 0),
    ]  # fmt: skip


def test_an_nvidia_smi_that_hangs_keeps_no_agent_from_ending(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The agent's timeout for nvidia-smi is longer than the time it gets to stop.
    monkeypatch.setenv("NVSHIM_PATIENCE", "20")
    with sharing_node(0) as place, ThreadPoolExecutor(1) as executor:
        pid = Path(place.node.state, "smi-pid")
        smi = Path(place.node.driver_root, "usr/bin/nvidia-smi")
        smi.write_text(f"#!/bin/sh\necho $$ > {pid}\nexec sleep 1000\n", encoding="ascii")
        claim = place.shared("one", place.gpus[0], timeSlice="Long")
        call = executor.submit(place.driver.prepare, claim)
        hangs = int(eventually(lambda: pid.exists() and pid.read_text("ascii"), "it hangs"))
        assert place.agent.process is not None
        place.agent.process.terminate()
        assert place.agent.process.wait(13) == 0, "a pod has 15 seconds"
        assert isinstance(call.exception(), grpc.RpcError)
        eventually(lambda: not is_alive(hangs), "it has exited, too")


def test_a_time_slice_that_cannot_be_set_is_said_and_nothing_is_prepared(place: Sharing) -> None:
    one, other = place.gpus
    Path(place.node.state, "smi-refuses").write_text(place.uuid(other), encoding="ascii")
    claim = place.shared("one", one, other, timeSlice="Short")
    error = place.refusal(claim)
    assert "NVSHIM-E2788" in error
    assert f"the time slice Short of {place.uuid(other)} for claim default/one" in error
    assert "exited with status 3: Not Supported" in error
    assert not os.path.exists(place.spec(claim))
    assert sorted(place.called()) == sorted(
        [call(place.uuid(one), 1), call(place.uuid(other), 1), call(place.uuid(one), 0)]
    )
    place.have(place.claim("plain", one))
    assert "a MIG device" in place.refusal(place.shared("part", place.parts[0], timeSlice="Long"))


# -- MPS ---------------------------------------------------------------------------------------


def test_a_claim_has_a_daemon_with_its_limits_until_it_is_taken_back(place: Sharing) -> None:
    limits = {place.uuid(place.gpus[0]): "3Gi"}
    mps = {"threadPercentage": 40, "memoryLimit": "2Gi", "memoryLimitOf": limits}
    claim = place.shared("one", *place.gpus, mps=mps)
    place.have(claim)
    ((name, pid),) = place.daemons().items()
    assert name.startswith(f"claims/{claim[1]}-")
    assert place.modes() == {place.uuid(each) for each in place.gpus}
    uuids = Path(f"/proc/{pid}/environ").read_text("utf-8").split("CUDA_VISIBLE_DEVICES=")[1]
    order = uuids.partition("\0")[0].split(",")
    said = place.log(name)
    assert "Cmd:set_default_active_thread_percentage 40" in said
    for number, uuid in enumerate(order):
        size = 3072 if uuid in limits else 2048
        assert f"Cmd:set_default_device_pinned_mem_limit {number} {size}M" in said
    pipe = f"CUDA_MPS_PIPE_DIRECTORY=/mps/{name}/pipe"
    assert pipe in place.environment(claim)
    place.have(claim)
    assert place.daemons() == {name: pid}

    # The daemon outlives its agent, even without clients, and the next agent adopts it.
    place.end_agent()
    assert place.daemons() == {name: pid}
    place.agent.start()
    place.have(claim)
    assert place.daemons() == {name: pid}

    place.give_back(claim)
    assert place.daemons() == {}
    assert place.modes() == set()
    assert not list(place.mps.glob("claims/*")), "its directory and its log are removed"
    place.have(place.claim("plain", place.gpus[0]))


def test_the_directories_of_a_daemon_stay_as_long_as_its_claim(place: Sharing) -> None:
    claim = place.shared("one", place.gpus[0], mps={"threadPercentage": 40})
    place.have(claim)
    (name,) = place.daemons()
    pipe = os.stat(place.mps / name / "pipe").st_ino
    nvshim("drain", "--config", place.node.config_path, "--let-go", place.uuid(place.gpus[1]))
    eventually(lambda: not (place.mps / name / ".lock").exists(), "the daemon has exited")
    place.undrain(place.gpus[1])
    eventually(lambda: name in place.daemons(), "it is started again")
    assert os.stat(place.mps / name / "pipe").st_ino == pipe, "containers have it mounted"
    place.give_back(claim)
    assert not (place.mps / name).exists()


def test_a_daemon_of_pods_outlives_the_agents_notes_and_an_api_server_that_is_away() -> None:
    with sharing_node(0) as place:
        claim = place.shared("one", place.gpus[0], mps={"threadPercentage": 50})
        place.have(claim)
        before = place.daemons()
        spec = Path(place.spec(claim)).read_text("ascii")
        place.note(claim, place.gpus[0])
        place.agent.kill()
        os.unlink(f"{place.node.state}/dra.json")
        with Front(place.cluster.port) as front:
            front.be("reset")
            place.agent = place.new_agent("--api-port", str(front.port), "--api-timeout", "1")
            with place.agent:
                awaited = "shares its devices is not known"
                eventually(
                    lambda: any(awaited in each for each in place.agent.faults()),
                    "the agent reports what it waits for",
                )
                assert place.daemons() == before
                old = place.kubelet.drivers.get(DRA_DRIVER)
                front.be("passes")
                eventually(
                    lambda: place.kubelet.drivers.get(DRA_DRIVER) not in {None, old},
                    "it is registered again",
                )
                assert place.daemons() == before
                assert Path(place.spec(claim)).read_text("ascii") == spec
                place.give_back(claim)
                assert not place.daemons()


def test_a_mig_device_has_a_daemon_of_its_own_and_its_gpu_no_compute_mode(place: Sharing) -> None:
    claims = [place.shared(each, each, mps={}) for each in place.parts]
    for claim in claims:
        place.have(claim)
    assert len(place.daemons()) == 2
    assert place.modes() == set()
    place.give_back(*claims)
    assert place.daemons() == {}


def test_a_daemon_that_does_not_start_is_the_error_of_the_claim(place: Sharing) -> None:
    program = Path(place.node.driver_root, PROGRAM)
    program.rename(f"{program}.own")
    program.write_text("#!/bin/sh\necho no such luck; exit 7\n", encoding="ascii")
    program.chmod(0o755)
    claim = place.shared("one", place.gpus[0], mps={})
    error = place.refusal(claim)
    assert "NVSHIM-E2735" in error
    assert "it ended with status 7: no such luck" in error
    assert not os.path.exists(place.spec(claim))
    eventually(lambda: not place.modes(), "the compute mode is set back")
    Path(f"{program}.own").rename(program)
    place.have(claim)
    assert len(place.daemons()) == 1


def test_a_daemon_that_is_slow_holds_up_no_other_claim(place: Sharing) -> None:
    program, go = Path(place.node.driver_root, PROGRAM), Path(place.node.state, "go")
    program.rename(f"{program}.own")
    script = f"until [ -e {go} ]; do sleep 0.02; done"
    program.write_text(f'#!/bin/sh\n{script}\nexec {program}.own "$@"\n', encoding="ascii")
    program.chmod(0o755)
    slow, quick = place.shared("slow", place.gpus[0], mps={}), place.claim("quick", place.gpus[1])
    with ThreadPoolExecutor(1) as executor:
        waiting = executor.submit(place.refusal, slow)
        eventually(lambda: len(place.modes()) == 1, "the other daemon is starting")
        place.have(quick)
        place.give_back(quick)
        assert not waiting.done()
        go.touch()
        assert waiting.result() == ""
    assert len(place.daemons()) == 1


def test_a_daemon_that_dies_is_started_again(place: Sharing) -> None:
    claim = place.shared("one", place.gpus[0], mps={"memoryLimit": "1Gi"})
    place.have(claim)
    ((name, pid),) = place.daemons().items()
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: place.daemons().get(name, pid) != pid, "another one serves")
    eventually(lambda: place.refusal(claim) == "", "the claim is ready again")
    # The daemon answers before it writes its log.
    command = "set_default_device_pinned_mem_limit 0 1024M"
    eventually(lambda: place.log(name).count(command) == 2, "both were limited")


def test_what_this_driver_cannot_do_is_said(place: Sharing) -> None:
    error = place.refusal(place.shared("one", place.gpus[0], mps={"multiUser": True}))
    assert "NVSHIM-E2735" in error
    assert "has no option -multiuser-server" in error
    assert place.daemons() == {}


def test_a_gpu_that_the_device_plugin_shares_by_mps_goes_to_no_claim(place: Sharing) -> None:
    gpu, other = place.gpus
    resource = {"name": GPU, "replicas": 2, "devices": [place.uuid(gpu)]}
    sharing = {"mps": {"resources": [resource]}}
    place.agent.configure(flags={"mpsRoot": str(place.mps)}, sharing=sharing)
    assert place.published(3) == {other, *place.parts}
    error = place.refusal(place.claim("one", gpu))
    assert "NVSHIM-E2774" in error
    assert f"shares {GPU}.shared by MPS" in error
    place.have(place.shared("two", other, mps={}))
    place.agent.configure(flags={"mpsRoot": str(place.mps)})
    place.published(4)
    place.have(place.claim("one", gpu))


# -- shares ------------------------------------------------------------------------------------


@IN_PARTS
def test_claims_have_parts_of_a_gpu_until_it_is_full(place: Sharing) -> None:
    gpu, other = place.gpus
    told = place.cluster.devices()[gpu]
    assert told["allowMultipleAllocations"] is True
    assert told["capacity"]["gpu.nvidia.com/shares"]["value"] == "4"
    one, two = place.part("one", gpu, "10Gi"), place.part("two", gpu, "20Gi", 2)
    answers = place.driver.prepare(one, two)
    for claim in (one, two):
        (device,) = answers[claim[1]].devices
        assert device.share_id
        (name,) = device.cdi_device_ids
        assert name.endswith(f"={claim[1]}-{gpu}-{device.share_id}")
        variable = "NVSHIM_GPU_SHARE_" + device.share_id.replace("-", "_")
        assert any(each.startswith(variable) for each in place.environment(claim))
    error = place.refusal(place.part("three", gpu, "20Gi"))
    assert "NVSHIM-E2774" in error
    assert "claim default/one, claim default/two" in error
    for whole in (place.claim("whole", gpu), place.part("many", gpu, "1Gi", 2)):
        assert "NVSHIM-E2774" in place.refusal(whole)
    place.have(place.claim("elsewhere", other))
    eventually(
        lambda: (
            sorted((each["claim"], each["memory"], each["shares"]) for each in place.status())
            == [("default/elsewhere", 0, 0), ("default/one", 10240, 1), ("default/two", 20480, 2)]
        ),
        "the status file lists the shares",
    )
    # A new agent reads the shares from the file, and allocates no more than before.
    place.agent.kill()
    place.start_again()
    assert place.driver.prepare(one, two) == answers
    assert "NVSHIM-E2774" in place.refusal(place.part("three", gpu, "20Gi"))
    place.driver.unprepare(one)
    place.have(place.part("three", gpu, "20Gi"))


def test_where_the_api_server_knows_no_shares_a_gpu_is_given_once() -> None:
    with sharing_node(4) as place:
        place.cluster.gate = False
        place.cluster.wipe()
        gpu = place.gpus[0]
        place.published(4)
        assert "allowMultipleAllocations" not in place.cluster.devices()[gpu]
        writes = len(place.cluster.writes)
        one, two = place.claim("one", gpu), place.claim("two", gpu)
        place.have(one)
        assert "NVSHIM-E2774" in place.refusal(two)
        place.have(place.claim("other", place.gpus[1]))
        assert len(place.cluster.writes) == writes, "unknown slices are not sent again"


@IN_PARTS
def test_shares_of_a_gpu_are_clients_of_one_daemon(place: Sharing) -> None:
    gpu = place.gpus[0]
    one = place.part("one", gpu, "10Gi", mps={"threadPercentage": 25})
    two = place.part("two", gpu, "5Gi", mps={})
    place.have(one)
    ((name, pid),) = place.daemons().items()
    assert name == f"shares/{place.uuid(gpu)}"
    place.have(two)
    assert place.daemons() == {name: pid}
    assert "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=10240M" in place.environment(one)
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25" in place.environment(one)
    assert "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=5120M" in place.environment(two)
    for other in (place.part("plain", gpu, "1Gi"), place.part("s", gpu, "1Gi", timeSlice="Long")):
        error = place.refusal(other)
        assert "NVSHIM-E2789" in error
        assert "shares it by MPS" in error
    place.give_back(one)
    assert place.daemons() == {name: pid}
    place.give_back(two)
    assert place.daemons() == {}
    assert place.modes() == set()


@IN_PARTS
def test_claims_have_parts_of_a_mig_device_and_one_daemon(place: Sharing) -> None:
    part, other = place.parts
    told = place.cluster.devices()[part]
    assert told["allowMultipleAllocations"] is True
    total = told["capacity"]["gpu.nvidia.com/memory"]["value"]
    assert total == "4864Mi"
    one = place.part("one", part, "2Gi", mps={"threadPercentage": 25})
    two = place.part("two", part, "1Gi", 2, mps={})
    for claim in (one, two):
        place.have(claim)
    ((name, pid),) = place.daemons().items()
    uuid = next(
        word.partition("=")[2].partition(",")[0]
        for word in place.environment(one)
        if word.startswith("NVSHIM_GPU_SHARE_")
    )
    assert (uuid.lower(), name) == (part, f"shares/{uuid}")
    assert place.modes() == set(), "a MIG device has no compute mode"
    assert "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=2048M" in place.environment(one)
    assert "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=1024M" in place.environment(two)
    error = place.refusal(place.part("three", part, "2Gi", mps={}))
    assert "NVSHIM-E2774" in error
    assert "claim default/one, claim default/two it would have 4 shares and 5120Mi" in error
    assert "NVSHIM-E2789" in place.refusal(place.part("plain", part, "1Gi"))
    assert "NVSHIM-E2774" in place.refusal(place.claim("whole", part))
    place.have(place.claim("other", other))
    place.agent.kill()
    place.start_again()
    assert place.refusal(place.part("four", part, "2Gi", mps={})) != ""
    place.driver.unprepare(one)
    assert place.daemons() == {name: pid}
    place.have(place.part("five", part, "2Gi", mps={}))


@IN_PARTS
def test_a_time_slice_stays_for_the_last_share_that_asks_for_it(place: Sharing) -> None:
    gpu = place.gpus[0]
    one, two = (place.part(each, gpu, "1Gi", timeSlice="Long") for each in ("one", "two"))
    plain = place.part("plain", gpu, "1Gi")
    for claim in (one, two, plain):
        place.have(claim)
    short = place.part("short", gpu, "1Gi", timeSlice="Short")
    assert "with the time slice Long" in place.refusal(short)
    place.driver.unprepare(one)
    assert place.called() == [call(place.uuid(gpu), 3)]
    place.driver.unprepare(two)
    assert place.called() == [call(place.uuid(gpu), 3), call(place.uuid(gpu), 0)]
    place.have(short)
