"""The driver: steps that fail, concurrent calls, specs that cannot be written."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import anyio
import pytest

from hooks.cdi.spec import Edits
from hooks.config import Config
from hooks.node.gpus import Gpu
from integration.agent_errors import DeviceTaken, DraStateUnwritten, MpsNotReady
from integration.apiserver.client import ApiServer
from integration.node.device_health.device_state import Condition
from integration.node.mps.clients import MpsDaemon
from integration.node.options import DRA_DRIVER, Options
from integration.node.service import Context
from integration.node.services.dra.cdi import SpecTemplate, keep
from integration.node.services.dra.claim_specs import ClaimSpecs
from integration.node.services.dra.claim_table import ClaimTable
from integration.node.services.dra.discovery import NodeDevices
from integration.node.services.dra.driver import Driver
from integration.node.services.dra.plugin_devices import PluginDevices
from integration.node.services.dra.transaction import ClaimTransactions
from integration.node.state import claims_file
from integration.node.state.topic import Topic
from integration.node.values.claims import Claim, ClaimDevice, Reference, Sharing
from integration.node.values.health import HealthState
from integration.node.values.service_name import ServiceName
from integration.nvml.mig_parts import GpuParts, Instance, Parts
from integration.nvml.snapshot import NodeSnapshot
from tests.harness.node_state import publish
from tests.harness.raising import raises
from tests.unit.node.dra.test_slices import DEVICES
from tests.unit.node.inventories import node_with

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio


PARTED, OTHER = (f"GPU-8b53c73b-3dab-58f5-bb22-a6615cf40f{n}" for n in (49, 50))
REFERENCE: Final = Reference("default", "uid", "claim")
RESULT: Final = {
    "driver": DRA_DRIVER, "pool": "node-1", "device": DEVICES[0].name, "request": "gpu",
}  # fmt: skip
ALLOCATED: Final = {
    "metadata": {"uid": "uid"},
    "status": {"allocation": {"devices": {"results": [RESULT]}}},
}


def driver_of(directory: Path) -> Driver:
    config = Config(state=str(directory), kubelet_root=str(directory))
    options = Options("", 60, node_name="node-1", pod_resources="", cri_sockets=())
    api = ApiServer("", 0, "")
    driver = Driver(Context(config, options, lambda *_, **__: None), api)
    devices = {device.name: device for device in DEVICES}
    driver.discovery.latest = NodeDevices(devices, None, Parts())
    return driver


def nothing(*_: Any, **__: Any) -> None:
    pass


async def allocated(*_: Any, **__: Any) -> dict[str, Any]:
    return ALLOCATED


@pytest.mark.parametrize(
    ("part", "step"),
    [
        (PluginDevices, "allocated"),
        (ClaimTable, "write"),
        (ClaimTransactions, "_refuse_engine"),
        (ClaimSpecs, "keep"),
        (ClaimTable, "complete"),
    ],
)
async def test_a_step_that_fails_leaves_a_claim_what_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: type, step: str
) -> None:
    driver = driver_of(tmp_path)
    times: list[str] = []

    def fail(*_: Any, **__: Any) -> None:
        times.append(step)
        if len(times) == 1:
            raise RuntimeError("a bug")

    async def fail_later(*_: Any, **__: Any) -> None:
        fail()

    monkeypatch.setattr(ClaimTransactions, "_read", allocated)
    monkeypatch.setattr(ClaimSpecs, "keep", nothing)
    monkeypatch.setattr(part, step, fail if step == "keep" else fail_later)
    with pytest.raises(RuntimeError):
        await driver.transactions.prepare(REFERENCE)
    assert driver.table.claims == {}
    assert driver._context.state.claimed_devices.value == ()


@pytest.mark.parametrize(("name", "is_taken"), [("nvidia.com/gpu", True), ("claims/one", False)])
async def test_what_the_device_plugin_shares_by_mps_is_no_claims(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, *, is_taken: bool
) -> None:
    driver = driver_of(tmp_path)
    monkeypatch.setattr(driver.transactions, "_read", allocated)
    monkeypatch.setattr(driver.specs, "keep", nothing)
    publish(driver._context.state.mps_daemons, {name: MpsDaemon(name, (DEVICES[0].uuid,))})
    taken = raises(DeviceTaken, match=r"which shares nvidia.com/gpu by MPS")
    with taken if is_taken else nullcontext():
        await driver.transactions.prepare(REFERENCE)


async def test_an_unprepare_that_comes_after_a_prepare_ends_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, goes_on, done = driver_of(tmp_path), anyio.Event(), list[str]()

    async def read(_reference: Reference) -> dict[str, Any]:
        await goes_on.wait()
        return ALLOCATED

    async def run(verb: str) -> None:
        await getattr(driver.transactions, verb)(REFERENCE)
        done.append(verb)

    monkeypatch.setattr(driver.transactions, "_read", read)
    monkeypatch.setattr(driver.specs, "keep", nothing)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run, "prepare")
        await anyio.wait_all_tasks_blocked()
        tasks.start_soon(run, "unprepare")  # by the kubelet, or as a stale claim
        await anyio.wait_all_tasks_blocked()
        goes_on.set()
    assert done == ["prepare", "unprepare"]
    assert driver.table.claims == {}


async def test_a_spec_that_cannot_be_written_is_a_fault_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = driver_of(tmp_path)
    claims_file.save(
        driver._context.config, [Claim(uid, "default", uid, ()) for uid in ("one", "two")]
    )
    full = {"one"}

    async def write(claim: Claim, **_: Any) -> None:
        if claim.uid in full:
            raise DraStateUnwritten(f"to keep {claim.uid}", found="No space left on device")

    monkeypatch.setattr(driver.specs, "write", write)
    monkeypatch.setattr("integration.node.services.dra.driver._LOOK_AGAIN", 0.01)
    await driver.start()
    faults = driver._context.state.faults.lines
    assert "cannot keep one" in faults["dra specs"]
    full.clear()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(driver.follow)
        with anyio.fail_after(20):
            while "dra specs" in driver._context.state.faults.lines:
                await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()


async def test_while_a_spec_cannot_be_written_health_and_devices_are_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, hangs = driver_of(tmp_path), anyio.Event()
    driver.table.put(Claim("uid", "default", "claim", ()))
    state, wanted = driver._context.state, list[Any]()

    async def discover(*_: Any) -> bool:
        return True

    async def write(*_: Any, **__: Any) -> None:
        hangs.set()
        await anyio.sleep_forever()

    async def allocated() -> dict[str, str]:
        return {}

    monkeypatch.setattr(driver, "_discover", discover)
    monkeypatch.setattr(driver.plugins, "allocated", allocated)
    monkeypatch.setattr(driver.specs, "write", write)
    monkeypatch.setattr(driver.publisher, "want", wanted.append)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(driver.follow)
        with anyio.fail_after(20):
            await hangs.wait()
        await anyio.wait_all_tasks_blocked()
        assert len(wanted) == 1
        ill = Condition(HealthState.UNHEALTHY, reason="Xid 79")
        publish(state.health, {DEVICES[0].uuid: ill})
        await anyio.wait_all_tasks_blocked()
        assert len(wanted) == 2
        assert [each.message for each in state.dra_health.value if not each.is_healthy]
        tasks.cancel_scope.cancel()


async def test_a_spec_of_a_claim_in_a_transaction_is_repaired_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, written = driver_of(tmp_path), list[str]()
    driver.table.put(Claim("uid", "default", "claim", ()))

    async def write(claim: Claim, **_: Any) -> None:
        written.append(claim.uid)

    monkeypatch.setattr(driver.specs, "write", write)
    async with driver.transactions.locks.hold("uid"):
        await driver.specs.repair()
        assert written == []
        assert driver.specs.has_pending
    await driver.specs.repair()
    assert written == ["uid"]
    assert not driver.specs.has_pending


async def test_a_claim_is_settled_even_if_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, claim = driver_of(tmp_path), Claim("uid", "default", "claim", ())
    driver.table.put(claim)

    async def full() -> None:
        raise DraStateUnwritten("to write it", found="No space left on device")

    monkeypatch.setattr(driver.table, "write", full)
    await driver.table.settle([(claim, None)])
    assert driver.table.claims == {}


async def test_a_claim_waits_for_an_answer_about_its_gpu_if_its_note_is_lost(
    tmp_path: Path,
) -> None:
    """NVML leaves out a GPU for a moment, just when the agent starts."""
    driver = driver_of(tmp_path)
    gpus = node_with(Gpu(0, 0, PARTED, "0000:18:00.0", ""), Gpu(1, 1, OTHER, "0000:2a:00.0", ""))
    publish(driver._context.state.node, NodeSnapshot(inventory=gpus))
    device = ClaimDevice("gpu", "node-1", f"{PARTED.lower()}-mig-19-4", "", PARTED)
    claims = {
        uid: Claim(uid, "default", uid, (replace(device, device=name),))
        for uid, name in (("there", device.device), ("never-made", f"{PARTED.lower()}-mig-19-5"))
    }
    for claim in claims.values():
        driver.table.put(claim)
    await driver.mig.load()
    assert not await driver.mig.settle(Parts({OTHER: GpuParts()}))
    assert driver.table.claims == claims
    parted = GpuParts(instances=(Instance(11, 19, 4, 1),))
    answer = Parts({OTHER: GpuParts(), PARTED: parted}, instance_of={"MIG-a": (PARTED, 11)})
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(driver.mig.wait_settled, "there")
        assert await driver.mig.settle(answer)
    found = {uid: [each.uuid for each in it.devices] for uid, it in driver.table.claims.items()}
    assert found == {"there": ["MIG-a"]}
    assert list(driver.mig.creator.created.values()) == ["MIG-a"]


async def test_a_claim_does_not_wait_for_an_answer_about_a_lost_gpu(tmp_path: Path) -> None:
    driver = driver_of(tmp_path)
    gpus = node_with(
        Gpu(0, 0, PARTED, "0000:18:00.0", "", lost="off the bus"),
        Gpu(1, 1, OTHER, "0000:2a:00.0", ""),
    )
    publish(driver._context.state.node, NodeSnapshot(inventory=gpus))
    device = ClaimDevice("gpu", "node-1", f"{PARTED.lower()}-mig-19-4", "", PARTED)
    driver.table.put(Claim("uid", "default", "claim", (device,)))
    await driver.mig.load()
    assert await driver.mig.settle(Parts({OTHER: GpuParts()}))
    assert driver.table.claims == {}


def with_mps(uid: str, daemon: str) -> Claim:
    sharing = Sharing(daemon=f"claims/{daemon}")
    device = ClaimDevice("gpu", "node-1", "gpu-0", "GPU-0", "GPU-0", sharing=sharing)
    return Claim(uid, "default", "claim", (device,))


async def test_a_daemon_that_pods_have_goes_on_where_a_claim_cannot_have_another(
    tmp_path: Path,
) -> None:
    driver = driver_of(tmp_path)
    state = driver._context.state
    before, now = with_mps("uid", "before"), with_mps("uid", "now")
    driver.sharing.load([before])
    posted: list[set[str]] = []
    state.claim_daemons = Topic(
        state.claim_daemons.value,
        ServiceName.DRA,
        "which daemons were asked for, each time",
        on_publish=lambda daemons: posted.append(set(daemons or ())),
    )
    driver.sharing._claims["uid"] = now
    await driver.sharing.put_back("uid", before)
    assert posted
    assert all(each == {"claims/before"} for each in posted)


def test_a_spec_is_left_as_it_is_while_it_is_not_known_where_mps_is(tmp_path: Path) -> None:
    claim = with_mps("uid", "one")
    device = SimpleNamespace(edits=Edits())
    template = SpecTemplate(None, {"GPU-0": device}, {}, "0.5.0")  # type: ignore[arg-type,dict-item]
    with pytest.raises(MpsNotReady, match="which name the directory of MPS, are unknown"):
        keep(Config(state=str(tmp_path)), "driver", claim, template, "")
