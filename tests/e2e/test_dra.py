"""The agent as a DRA driver: a kubelet, an API server, and a simulated node."""

from __future__ import annotations

import json
import os
import tempfile
import threading
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Final

import grpc  # type: ignore[import-untyped] # it ships no types
import pytest

from integration.node.options import DRA_DRIVER
from tests.harness.api_server import denied, invalid
from tests.harness.claim_storm import Storm
from tests.harness.cluster import Cluster
from tests.harness.cri_server import CriServer
from tests.harness.dra_node import NODE, Place, dra_node
from tests.harness.kept import Kept
from tests.harness.kubelet_dra import Driver, KubeletDra, Reference
from tests.harness.nvshim import nvshim
from tests.harness.waiting import at_once, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

GPU: Final = "nvidia.com/gpu"
MIG: Final = "nvidia.com/mig-1g.5gb"
CUT: Final = {"index": 2, "mig": ["1g.5gb", "1g.5gb"]}
VOID: Final = "NVIDIA_VISIBLE_DEVICES=void"


@contextmanager
def node_of_three() -> Iterator[Place]:
    """Yield a node with two whole GPUs, and one that is split into two MIG devices."""
    scenario = {"gpus": 3, "model": "a100", "gpu": [CUT]}
    with (
        tempfile.TemporaryDirectory(prefix="node-") as directory,
        tempfile.TemporaryDirectory(prefix="kubelet-") as root,  # socket addresses are limited
        dra_node(directory, root, scenario, devices=4) as place,
    ):
        yield place


@pytest.fixture
def fresh() -> Iterator[Place]:
    """Yield a node that the test may change."""
    with node_of_three() as place:
        yield place


def announce_parts(place: Place) -> None:
    """Let the device plugin announce the MIG devices as a resource of their own."""
    place.agent.configure(
        flags={"migStrategy": "mixed", "plugin": {"deviceListStrategy": ["envvar"]}}
    )
    place.plugins.wait_for(GPU, 2)
    place.plugins.wait_for(MIG, 2)


@pytest.fixture(scope="module")
def kept() -> Iterator[Kept[Place]]:
    kept = Kept(node_of_three, lambda place: place.tidy(4))
    yield kept
    kept.close()


@pytest.fixture
def place(kept: Kept[Place]) -> Iterator[Place]:
    """Return a node that several tests use, one after another."""
    with kept.lent() as place:
        yield place


def error_of(driver: Driver, reference: Reference) -> str:
    return driver.prepare(reference)[reference[1]].error


def test_a_claim_is_prepared_once_and_taken_back(place: Place) -> None:
    assert place.driver.info.supported_versions[:2] == ["v1.DRAPlugin", "v1beta1.DRAPlugin"]
    uid = "0b1f5c5e-7d47-4c3c-9f0d-5f4b4a3d2c1b"
    claim = place.claim("one", place.gpus[0], place.parts[1], uid=uid)
    first = place.driver.prepare(claim)[claim[1]]
    assert not first.error
    assert [list(each.request_names) for each in first.devices] == [["gpu"], ["gpu"]]
    assert [each.device_name for each in first.devices] == [place.gpus[0], place.parts[1]]
    assert {each.pool_name for each in first.devices} == {NODE}
    names = [name for each in first.devices for name in each.cdi_device_ids]
    kind = f"k8s.{DRA_DRIVER}/claim"
    assert names == [f"{kind}={claim[1]}-{each.device_name}" for each in first.devices]

    with open(place.spec(claim), encoding="utf-8") as file:
        spec = json.load(file)
    assert spec["kind"] == kind
    assert [f"{kind}={each['name']}" for each in spec["devices"]] == names
    assert spec["cdiVersion"] == "0.5.0", "the UID starts with a digit"
    assert VOID in spec["containerEdits"]["env"]
    nodes = [
        {node["path"] for node in each["containerEdits"]["deviceNodes"]} for each in spec["devices"]
    ]
    assert {"/dev/nvidia0", "/dev/nvidia1"} & nodes[0]
    assert "/dev/nvidia2" in nodes[1]
    assert not nodes[0] & nodes[1]

    before = os.stat(place.spec(claim)).st_ino
    assert place.driver.prepare(claim)[claim[1]] == first
    assert os.stat(place.spec(claim)).st_ino == before
    place.cluster.remove_claim("one")  # a kubelet unprepares deleted claims
    place.give_back(claim)
    assert not os.path.exists(place.spec(claim))
    place.give_back(claim)


def test_claims_that_cannot_be_had_are_refused_in_words(place: Place) -> None:
    def refused(reference: Reference, *words: str) -> None:
        error = place.refusal(reference)
        assert all(word in error for word in words), error
        assert "\n" not in error
        assert not os.path.exists(place.spec(reference))

    refused(("default", "a UID", "nothing"), "NVSHIM-E2772", "does not exist")
    namespace, _, name = place.claim("replaced", place.gpus[0])
    refused((namespace, "another UID", name), "NVSHIM-E2772", "not another UID")
    refused(("default", place.cluster.claim("new", None), "new"), "E2772", "has no allocation")
    refused(place.claim("gone", "gpu-of-another-node"), "NVSHIM-E2773", "the node lacks it")
    strange = [{"request": "gpu", **place.result(place.gpus[0], pool="node-2")}]
    uid = place.cluster.claim("strange", strange)
    refused(("default", uid, "strange"), "NVSHIM-E2773", "in the pool node-2")
    parameters = {"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig", "sharing": {}}
    config = [{"source": "FromClaim", "opaque": {"driver": DRA_DRIVER, "parameters": parameters}}]
    refused(place.claim("shared", place.gpus[0], config=config), "NVSHIM-E2775", "sharing")
    del parameters["sharing"]
    place.have(place.claim("plain", place.gpus[0], config=config))


def test_a_resource_is_not_served_by_claims_and_by_the_device_plugin(
    fresh: Place, tmp_path: Path
) -> None:
    made = {"annotations": {"resource.kubernetes.io/extended-resource-claim": "true"}}
    fresh.cluster.device_class("ours", extendedResourceName=GPU)
    fresh.cluster.device_class("implicit")
    fresh.plugins.wait_for(GPU, 2)
    claim = fresh.claim("asked-for", fresh.gpus[0], classes=["ours"], **made)
    error = fresh.refusal(claim)
    assert "NVSHIM-E2796" in error
    assert f"the DeviceClass ours and the device plugin both serve {GPU}" in error
    fresh.have(fresh.claim("own", fresh.gpus[1], classes=["ours"]))
    other = fresh.claim("other", fresh.gpus[0], classes=["implicit", "gone"], **made)
    fresh.have(other)
    fresh.give_back(other)
    fresh.agent.stop()
    with fresh.new_agent("--device-plugin", "no"):
        eventually(lambda: DRA_DRIVER in fresh.kubelet.drivers, "it is registered")
        fresh.have(claim)


def test_no_device_is_given_to_two_claims_but_to_who_looks_after_it(place: Place) -> None:
    one, other = place.claim("one", place.gpus[0]), place.claim("other", place.gpus[0])
    place.have(one)
    error = place.refusal(other)
    assert "NVSHIM-E2774" in error
    assert "claim default/one has it" in error
    admin = {"request": "all", "adminAccess": True}
    everything = [*place.gpus, *place.parts]
    uid = place.cluster.claim("admin", [place.result(each, **admin) for each in everything])
    place.have(("default", uid, "admin"))
    # MIG devices of one GPU do not conflict, and neither does admin access.
    for name in place.parts:
        place.have(place.claim(name, name))
    place.driver.unprepare(one)
    place.have(other)


def test_a_gpu_that_is_out_of_service_goes_to_no_new_claim(place: Place) -> None:
    claim, other = place.claim("one", place.gpus[0]), place.claim("other", place.gpus[1])
    place.have(claim)
    place.drain(*place.gpus)
    assert "NVSHIM-E2715" in place.refusal(other)
    eventually(lambda: place.cluster.taints().keys() == {*place.gpus}, "they have taints")
    for (taint,) in place.cluster.taints().values():
        assert taint["key"] == f"{DRA_DRIVER}/out-of-service"
        assert (taint["effect"], bool(taint["timeAdded"])) == ("NoSchedule", True)
    assert place.published(4) == {*place.gpus, *place.parts}
    place.have(claim)  # the claim that has it keeps it
    place.have(place.claim("part", place.parts[0]))
    place.undrain(*place.gpus)
    eventually(lambda: not place.cluster.taints(), "the taints are gone")
    place.have(other)


@pytest.mark.parametrize("how", ["omit", "evict", "dropped"])
def test_what_becomes_of_a_gpu_out_of_service_is_a_setting(fresh: Place, how: str) -> None:
    fresh.agent.stop()
    fresh.cluster.drops = frozenset({"taints"} if how == "dropped" else ())
    flags = () if how == "dropped" else ("--dra-unhealthy", how)
    with fresh.new_agent(*flags):
        eventually(lambda: fresh.cluster.watches, "it publishes")
        fresh.drain(fresh.gpus[0])
        if how == "evict":
            eventually(fresh.cluster.taints, "it has a taint")
            assert fresh.cluster.taints()[fresh.gpus[0]][0]["effect"] == "NoExecute"
        else:
            assert fresh.gpus[0] not in fresh.published(3)
            assert not fresh.cluster.taints()
        fresh.undrain(fresh.gpus[0])
        eventually(lambda: not fresh.cluster.taints(), "it has none")
        fresh.published(4)


def test_two_calls_at_once_for_one_device_give_it_once(place: Place) -> None:
    claims = [place.claim(f"claim-{n}", place.gpus[0]) for n in range(8)]
    errors = at_once(place.refusal, [*claims, claims[0]])
    winners = [each for each in claims if os.path.exists(place.spec(each))]
    assert len(winners) == 1
    assert errors.count("") in {1, 2}  # claims[0] was prepared twice
    assert sum("NVSHIM-E2774" in error for error in errors) == 9 - errors.count("")


# The plugin's answers count as allocated for a while.
def test_a_gpu_is_given_by_the_device_plugin_or_by_a_claim(fresh: Place) -> None:
    announce_parts(fresh)
    claim = fresh.claim("one", fresh.gpus[0])
    fresh.have(claim)
    uuid = fresh.uuid(fresh.gpus[0])
    eventually(lambda: uuid not in fresh.plugins.healthy(GPU), "the plugin does not offer it")
    with pytest.raises(grpc.RpcError, match="NVSHIM-E2774"):
        fresh.plugins.plugins[GPU].allocate(uuid)
    told = fresh.agent.status()["resources"][GPU]
    assert told == {"devices": 2, "healthy": 2}, "the device itself is well"
    part = fresh.claim("part", fresh.parts[0])
    fresh.have(part)
    uuid = fresh.uuid(fresh.parts[0])
    eventually(lambda: uuid not in fresh.plugins.healthy(MIG), "the plugin does not offer it")
    with pytest.raises(grpc.RpcError, match="NVSHIM-E2774"):
        fresh.plugins.plugins[MIG].allocate(uuid)
    fresh.driver.unprepare(part)
    fresh.driver.unprepare(claim)
    eventually(lambda: len(fresh.plugins.healthy(GPU)) == 2, "it is offered again")
    eventually(lambda: len(fresh.plugins.healthy(MIG)) == 2, "the part is offered again")

    # The same in the other order.
    fresh.plugins.allocate(GPU, 2, pod="plain")
    fresh.plugins.allocate(MIG, 2, pod="cut")
    fresh.published(0)
    error = fresh.refusal(claim)
    assert "NVSHIM-E2774" in error
    assert "pod" in error


def test_the_agent_may_be_killed_and_what_pods_have_stays(place: Place) -> None:
    claim, lost = place.claim("one", place.gpus[0]), place.claim("lost", place.parts[0])
    first = place.driver.prepare(claim, lost)
    place.agent.kill()
    os.unlink(place.spec(lost))
    stray = place.spec(("", "an unknown claim", ""))
    with open(stray, "w", encoding="utf-8") as file:
        file.write("{}")
    writes = len(place.cluster.writes)
    place.start_again()
    assert os.path.exists(place.spec(lost)), "its spec exists again before the call"
    assert not os.path.exists(stray), "the unknown claim's spec is removed"
    assert "NVSHIM-E2774" in place.refusal(place.claim("other", place.gpus[0]))
    assert place.driver.prepare(claim, lost) == first
    assert len(place.cluster.writes) == writes, "nothing has changed, so nothing is written"
    place.give_back(claim, lost)


# Missing or damaged state is in tests/unit/node/dra/test_claims.py.
@pytest.mark.parametrize(
    "loss",
    [
        pytest.param("missing", marks=pytest.mark.thorough),
        pytest.param("damaged", marks=pytest.mark.thorough),
        "of another boot",
    ],
)
def test_without_its_own_notes_it_goes_by_the_kubelets(fresh: Place, loss: str) -> None:
    claim = fresh.claim("one", fresh.gpus[0])
    fresh.have(claim)
    fresh.agent.kill()
    fresh.note(claim, fresh.gpus[0], times=2)
    path = f"{fresh.node.state}/dra.json"
    with open(path, encoding="utf-8") as file:
        text = file.read()
    os.unlink(path)
    os.unlink(fresh.spec(claim))
    if loss != "missing":
        document = {**json.loads(text), "boot": "another"} if loss != "damaged" else "{"
        with open(path, "w", encoding="utf-8") as file:
            json.dump(document, file)
    fresh.start_again()
    assert os.path.exists(fresh.spec(claim)), "its spec is there again"
    assert "NVSHIM-E2774" in fresh.refusal(fresh.claim("other", fresh.gpus[0]))
    fresh.have(claim)
    fresh.give_back(claim)


def test_a_kubelet_that_restarts_finds_the_driver_and_its_slices_are_made_again(
    fresh: Place,
) -> None:
    fresh.kubelet.restart()
    fresh.cluster.wipe()
    assert fresh.driver.info.name == DRA_DRIVER
    assert fresh.published(4) == {*fresh.gpus, *fresh.parts}
    registry = f"{fresh.root}/plugins_registry"
    os.unlink(f"{registry}/{DRA_DRIVER}-reg.sock")
    eventually(lambda: os.listdir(registry) == [f"{DRA_DRIVER}-reg.sock"], "it is there again")
    claim = fresh.claim("one", fresh.gpus[0])
    eventually(lambda: DRA_DRIVER in fresh.kubelet.drivers, "it is registered again")
    fresh.have(claim)
    assert fresh.agent.stop() == 0
    assert os.listdir(registry) == []


def test_slices_are_kept_whatever_becomes_of_the_watch(place: Place) -> None:
    cluster = place.cluster
    for trouble in (cluster.close_watches, cluster.forget):
        trouble()
        eventually(lambda: cluster.watches == 1, "it is watched again")
        cluster.wipe()
        place.published(4)
    cluster.refuse = lambda method, _: 503 if method == "POST" else None
    cluster.wipe()
    eventually(lambda: any("503" in each for each in place.agent.faults()), "it is reported")
    cluster.refuse = lambda *_: None
    place.published(4)
    eventually(lambda: not place.agent.faults(), "it is over")


def test_a_conflict_is_no_fault(fresh: Place) -> None:
    refused: list[str] = []

    def once(method: str, path: str) -> int | None:
        if method == "PUT" and not refused:
            refused.append(path)
            return 409
        return None

    fresh.cluster.refuse = once
    announce_parts(fresh)
    fresh.plugins.allocate(GPU, 2, pod="plain")  # so that both have to be freed
    fresh.plugins.allocate(MIG, 2, pod="cut")
    fresh.published(0)
    assert refused
    assert not fresh.agent.said("NVSHIM-E2771")


def test_slices_that_are_taken_for_wrong_are_sent_once(fresh: Place) -> None:
    wrong = invalid(("spec.devices[0].name", "must be another"))
    fresh.cluster.refuse = lambda method, _: wrong if method in {"POST", "PUT"} else None
    fresh.cluster.wipe()
    eventually(lambda: any("E2778" in each for each in fresh.agent.faults()), "it is reported")
    before = len(fresh.cluster.writes)
    fresh.cluster.close_watches()
    eventually(lambda: fresh.cluster.watches == 1, "it is watched again")
    assert len(fresh.cluster.writes) == before


def test_a_policy_that_denies_slices_is_named_and_tried_again(fresh: Place) -> None:
    fresh.cluster.refuse = lambda method, _: denied() if method in {"POST", "PUT"} else None
    fresh.cluster.wipe()
    named = "ValidatingAdmissionPolicy no-slices"
    eventually(lambda: any(named in each for each in fresh.agent.faults()), "it is named")
    assert not any("E2778" in each for each in fresh.agent.faults()), "our slices are right"
    fresh.cluster.refuse = lambda *_: None
    assert fresh.published(4) == {*fresh.gpus, *fresh.parts}
    eventually(
        lambda: not any(named in each for each in fresh.agent.faults()), "the fault is cleared"
    )


def test_a_node_that_is_not_there_is_not_the_fault_of_a_role(fresh: Place) -> None:
    fresh.agent.stop()
    with fresh.new_agent("--node-name", "node-2") as agent:
        found = eventually(
            lambda: [each for each in agent.faults() if "E2771" in each], "it is reported"
        )
        assert "--node-name" in found[0]
        assert "ClusterRole" not in found[0]


def test_while_the_api_server_is_away_what_is_prepared_goes_on(place: Place) -> None:
    claim, new = place.claim("one", place.gpus[0]), place.claim("new", place.gpus[1])
    first = place.driver.prepare(claim)
    place.cluster.refuse = lambda *_: 503
    os.unlink(place.spec(claim))
    assert place.driver.prepare(claim) == first
    assert os.path.exists(place.spec(claim))
    assert "NVSHIM-E2771" in place.refusal(new)
    place.agent.kill()
    place.start_again()
    assert place.driver.prepare(claim) == first
    place.give_back(claim)
    assert "NVSHIM-E2771" in place.refusal(claim), "the claim is no longer prepared"
    place.cluster.refuse = lambda *_: None
    place.have(new)
    place.cluster.wipe()
    place.published(4)


def test_what_was_taken_back_is_not_prepared_by_a_call_that_was_given_up(place: Place) -> None:
    claim = place.claim("slow", place.gpus[0])
    goes_on, asked = threading.Event(), threading.Event()

    def slowly(_method: str, path: str) -> None:
        if path.endswith("resourceclaims/slow"):
            asked.set()
            goes_on.wait(60)

    place.cluster.refuse = slowly
    with pytest.raises(grpc.RpcError):  # as with a kubelet's deadline
        place.driver.prepare(claim, patience=0.1)
    asked.wait(60)
    with suppress(grpc.RpcError):  # it waits for the earlier call
        place.driver.unprepare(claim, patience=1)
    goes_on.set()

    def said() -> list[str]:
        return [line["event"] for line in place.agent.said("prepared")]

    eventually(lambda: {"prepared", "unprepared"} <= {*said()}, "both calls have returned")
    assert said() == ["prepared", "unprepared"]
    assert not os.path.exists(place.spec(claim))
    place.have(place.claim("other", place.gpus[0]))


def test_health_is_told_whole(place: Place) -> None:
    driver = place.driver
    everything = {*place.gpus, *place.parts}
    eventually(lambda: driver.health.keys() == everything, "the driver reports all devices")
    (first, *_) = driver.health.values()
    assert (first.health, first.health_check_timeout_seconds) == (1, 30)
    assert first.device.pool_name == NODE
    name = place.gpus[0]
    place.drain(name)
    eventually(lambda: driver.health[name].health == 2, "the device is reported unhealthy")
    assert "out of service" in driver.health[name].message
    place.undrain(name)


def test_an_engine_that_reads_no_cdi_names_is_given_none(fresh: Place, tmp_path: Path) -> None:
    fresh.agent.stop()
    socket = str(tmp_path / "engine.sock")
    agent = fresh.new_agent(engine=socket)
    claim = fresh.claim("one", fresh.gpus[0])
    with CriServer(socket, "1.7.24", cdi=False) as engine, agent:
        eventually(lambda: DRA_DRIVER in fresh.kubelet.drivers, "it is registered")
        error = fresh.refusal(claim)
        assert "NVSHIM-E2776" in error
        assert "nvshim configure containerd --enable-cdi" in error
        assert not os.path.exists(fresh.spec(claim))
        engine.restart("1.7.24", cdi=True)
        fresh.have(claim)


def test_an_older_kubelet_and_an_older_api_are_spoken_to(fresh: Place, tmp_path: Path) -> None:
    fresh.agent.stop()
    fresh.kubelet.__exit__()
    with (
        Cluster(str(tmp_path / "older"), node=NODE, versions=("v1beta1",)) as cluster,
        KubeletDra(fresh.root, ("v1beta1.DRAPlugin",)) as kubelet,
    ):
        fresh.cluster = cluster
        with fresh.new_agent():
            assert fresh.published(4) == {*fresh.gpus, *fresh.parts}
            driver = kubelet.wait_for(DRA_DRIVER)
            assert driver.version == "v1beta1.DRAPlugin"
            claim = fresh.claim("one", fresh.gpus[0])
            assert error_of(driver, claim) == ""
    fresh.kubelet.__enter__()


def test_an_agent_of_the_host_asks_as_the_kubelet(fresh: Place, tmp_path: Path) -> None:
    fresh.agent.stop()
    path = tmp_path / "kubeconfig"
    with Cluster(str(tmp_path / "other"), node=NODE, by_certificate=True) as cluster:
        server = f"https://127.0.0.1:{cluster.port}"
        here = {"server": server, "certificate-authority": "other/ca.crt"}
        me = {"client-certificate": cluster.certificate, "client-key": cluster.certificate}
        document = {
            "current-context": "here",
            "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
            "clusters": [{"name": "here", "cluster": here}],
            "users": [{"name": "me", "user": me}],
        }
        path.write_text(json.dumps(document))
        fresh.cluster = cluster
        with fresh.new_agent("--kubeconfig", str(path)):
            fresh.published(4)
            fresh.have(fresh.claim("one", fresh.gpus[0]))
    with pytest.raises(AssertionError, match="NVSHIM-E2795"):
        nvshim("node", "--config", fresh.node.config_path, "--kubeconfig", "/nowhere")


def test_the_driver_can_take_nvidias_name(fresh: Place) -> None:
    def drivers() -> set[str]:
        return {each["spec"]["driver"] for each in fresh.cluster.slices()}

    foreign = fresh.cluster.slices()[0]
    foreign["spec"]["driver"] = "nic.example.com"
    fresh.cluster.put(foreign)
    fresh.agent.stop()
    assert drivers() == {DRA_DRIVER, "nic.example.com"}, "they stay when an agent exits"
    with fresh.new_agent("--dra-driver", "gpu.nvidia.com"):
        assert fresh.kubelet.wait_for("gpu.nvidia.com").info.name == "gpu.nvidia.com"
        eventually(lambda: "gpu.nvidia.com" in drivers(), "it publishes its own")
        assert drivers() == {"gpu.nvidia.com", "nic.example.com"}, "no GPU is there twice"
    history = [(kind, each["spec"]["driver"]) for kind, each in fresh.cluster.history()]
    assert history.index(("DELETED", DRA_DRIVER)) < history.index(("ADDED", "gpu.nvidia.com"))


def test_nothing_is_given_twice_or_left_whatever_ends(place: Place) -> None:
    devices = [*place.gpus, *place.parts]
    storm = Storm(place, devices)
    threads = [threading.Thread(target=storm.pods, args=(number, 12)) for number in range(6)]
    for thread in threads:
        thread.start()
    for trouble in (place.cluster.wipe, place.cluster.forget, place.cluster.close_watches):
        enough = storm.prepared + 3
        eventually(partial(storm.is_past, enough), "some more are prepared")
        place.agent.kill()
        trouble()
        place.start_again()
    for thread in threads:
        thread.join(120)
    assert storm.failed == []
    assert storm.twice == []
    left = [each for each in os.listdir(place.cdi) if DRA_DRIVER in each]
    assert left == []
    with open(f"{place.node.state}/dra.json", encoding="utf-8") as file:
        assert json.load(file)["claims"] == []
    place.published(len(devices))
